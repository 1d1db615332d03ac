"""A study as the hub takes it: a committed study (runs/committed.py) with a card, Croissant and RO-Crate metadata.

So whoever has the folder can read it as its author does: `qerl-bench claims FOLDER`. Left out: checkpoints, completions
and questions, whose texts may belong to others.
"""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import Any

from huggingface_hub import DatasetCardData

from qerl_core import __version__
from qerl_core.checks import require
from qerl_core.statistics import mean_ci
from qerl_studies.claims.registration import carry, check_registration, registered_files
from qerl_studies.effects.pairs import by_unit
from qerl_studies.publish.crate import CRATE, crate
from qerl_studies.publish.croissant import CROISSANT, croissant
from qerl_studies.publish.description import Description
from qerl_studies.publish.folder import Names, rendered
from qerl_studies.runs.collect import write_study
from qerl_studies.runs.committed import ANSWERS, SETTINGS, TIDY
from qerl_studies.runs.comparable import load_runs
from qerl_studies.runs.find import find_runs
from qerl_studies.runs.load import load_run
from qerl_studies.runs.parse import first_names
from qerl_studies.runs.private import Private
from qerl_studies.runs.settings import Setting, group_by_setting, unit_count

CARD = "README.md"
LICENSE = "cc-by-4.0"
OUTCOMES = ("eval/accuracy_sampled", "eval/accuracy_greedy")  # the first that a run has is in the card's table


def write_dataset(source: Path, out: Path, names: Names, private: Private, mixed_code: bool) -> None:
    """Write the runs below `source` to `out`, with everything that describes them.

    A registered claim goes along. Raises ConfigError if a run is unfinished, as `write_study` does, for damage or
    several versions of the code, and as `check_registration`.
    """
    paths = find_runs(source)
    unfinished = [path.name for path in paths if not load_run(path, metrics=False).finished]
    require(
        not unfinished,
        f"{len(unfinished)} of {len(paths)} runs in {source} are not finished: {first_names(unfinished)}. The command "
        "that began them continues them; or move them elsewhere",
    )
    study = write_study(paths, out, mixed_code, ["study", "time"], private=private)
    runs = load_runs([out], mixed_code=True)
    carry(source, out)
    registered = check_registration(out, runs) if registered_files(out) else ""
    described = Description(names, names.license or LICENSE, date.today(), runs, study.cost, registered)
    (out / CARD).write_text(card(described, out))
    (out / CROISSANT).write_text(json.dumps(croissant(described, out), indent=1) + "\n")
    (out / CRATE).write_text(json.dumps(crate(described, out), indent=1) + "\n")


def card(described: Description, out: Path) -> str:
    """The dataset card: a header that the hub reads, and a page for people."""
    tables = {"numbers": TIDY, **({"answers": ANSWERS} if (out / ANSWERS).is_file() else {})}
    header = DatasetCardData(
        license=described.license,
        pretty_name=described.title,
        tags=["qerl-bench", "reinforcement-learning", "quantization", "benchmark-results"],
        configs=[{"config_name": name, "data_files": file} for name, file in tables.items()],
    )
    settings = group_by_setting(described.runs)
    return rendered(
        "dataset.md",
        header=header.to_yaml(),
        described=described,
        files=[SETTINGS, *tables.values(), *registered_files(out), CROISSANT, CRATE],
        settings=[_row(setting) for setting in settings],
        codes=sorted({run.code for run in described.runs}),
        blocks=sorted({run.block for run in described.runs}),
        version=__version__,
        repo=described.names.repo,
    )


def _row(setting: Setting) -> dict[str, Any]:
    """A line of the card's table: the mean over units of the last evaluation, with its 95 % interval."""
    first = setting.runs[0]
    metric = next((name for name in OUTCOMES if len(first.series("eval", name))), "")
    evaluated = [run for run in setting.runs if not run.series("eval", metric).empty]
    means = by_unit(evaluated, lambda run: run.series("eval", metric).iloc[-1]) if evaluated else ()
    units = unit_count(setting.runs)
    several = len({run.base for run in evaluated}) > 1
    return first.identity() | {
        "runs": len(setting.runs),
        "units": f"{units} {'bases' if several else 'seed' if units == 1 else 'seeds'}",
        "outcome": mean_ci(means).text(lambda share: f"{100 * share:.1f}") if evaluated else "-",
        "metric": metric.removeprefix("eval/accuracy_"),
    }
