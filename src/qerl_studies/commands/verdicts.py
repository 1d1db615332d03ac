"""Write what studies say about claims as one file of data, claims.json, and one picture of it, verdicts.svg.

    qerl-bench verdicts studies community out=studies
    qerl-bench verdicts mine out=mine --config-dir mine     # mine/claim/NAME.yaml too

claims.json has `studies` (runs, whether their model is a released one, code, machines, gates, the commit that brought
the protocol) and `verdicts`: paper and claim, contrast, measure, unit and margin, arms with their options and dose of
noise, units, effect and interval, bases with their digests, verdict and reason. Each study is judged by itself.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

from qerl_core.process.arguments import KeyValueParser, output_folder
from qerl_studies.claims.registry import with_own_folders
from qerl_studies.figures.forest import svg
from qerl_studies.figures.verdicts import all_verdicts
from qerl_studies.report.verdicts import studies_in, verdicts_of


def main(arguments: list[str] | None = None) -> None:
    words = with_own_folders(arguments)
    parser = KeyValueParser(__doc__)
    parser.add_argument("studies", nargs="+", type=Path, help="folders that hold studies, or single studies")
    parser.add_argument("--out", type=output_folder, default="figures", help="folder to write (default: figures)")
    options = parser.parse_args(words)
    content = verdicts_of(studies_in(options.studies))
    options.out.mkdir(parents=True, exist_ok=True)
    for name, text in {"claims.json": as_text(content), "verdicts.svg": svg(all_verdicts(content))}.items():
        (options.out / name).write_text(text)
        print(options.out / name)


def as_text(content: dict[str, object]) -> str:
    """JSON with a line for each study and each verdict."""
    studies, verdicts = content["studies"], content["verdicts"]
    assert isinstance(studies, dict) and isinstance(verdicts, list)
    short = partial(json.dumps, separators=(",", ":"))
    lines = ",\n".join(f"{short(name)}: {short(study)}" for name, study in studies.items())
    rows = ",\n".join(map(short, verdicts))
    return f'{{"studies": {{\n{lines}\n}}, "verdicts": [\n{rows}\n]}}\n'
