"""Packs the probes of a study into the folder of a session: probes.json, the design, and all answers in one table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import yaml

from qerl_core.options.user_options import split_search_path
from qerl_core.rundir.durable import atomically, write_atomically
from qerl_studies.design.design import Design
from qerl_studies.design.sessions import PROBES

ANSWERS = "probe_answers.parquet"
LEVEL = 9  # of compression: texts of one model are much alike


def archive_probes(design: Design, probes: Sequence[Mapping[str, Any]], out: Path) -> None:
    """Write the design as it is run, its probes and, of probes with details, their answers to `out`.

    Where this machine has options of one's own (--config-dir) is left out of the design.

    The table of answers has the columns `base` and `quant` before those of a base (probe/answers.py).
    """
    out.mkdir(parents=True, exist_ok=True)
    _, common = split_search_path(design.common)
    as_run = yaml.safe_load(design.path.read_text()) | {"common": common}
    write_atomically(out / "study.yaml", yaml.safe_dump(as_run, sort_keys=False))
    write_atomically(out / PROBES, json.dumps(probes))
    parts = []
    for base, quant in [(one["base"], quant) for one in probes for quant in one["formats"]]:
        file = design.answers_file(base, quant)
        if file.is_file():
            answers = parquet.read_table(file)
            answers = answers.add_column(0, "quant", pa.repeat(quant, len(answers)))
            parts.append(answers.add_column(0, "base", pa.repeat(pa.scalar(base, pa.int32()), len(answers))))
    if parts:
        with atomically(out / ANSWERS) as writing:
            parquet.write_table(pa.concat_tables(parts), writing, compression="zstd", compression_level=LEVEL)
