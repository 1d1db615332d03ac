"""Turn the logs of others into a study of class *reported*, and say what they show: TRL, verl, or CSV files.

    qerl-bench import trl DIR out=STUDY model=NAME task=NAME
    qerl-bench import verl DIR out=STUDY model=NAME task=NAME control=bf16
    qerl-bench import csv FILE out=STUDY        # twelve columns, a line for each number
    qerl-bench import csv FILE out=STUDY model=NAME task=NAME step=24 metric=COLUMN:NAME

DIR has the runs, each named ARM-sSEED: of TRL folders, of verl files ARM-sSEED.jsonl. STUDY gets reported.csv,
reported.json and verdict.md: differences of arms in pairs of seeds, with intervals, and what cannot be judged and why.
Other commands read STUDY like runs of ours, and mark it. Files are read as data; nothing in them is executed.
"""

from __future__ import annotations

import math
from argparse import Namespace
from pathlib import Path
from tempfile import TemporaryDirectory

from qerl_core.checks import require
from qerl_core.process.arguments import KeyValueParser, output_folder, printable
from qerl_studies.claims.registration import GROUP, REGISTERED, carry, check_registration, registered_files
from qerl_studies.foreign import table, trl, verl
from qerl_studies.foreign.definitions import UNREAD
from qerl_studies.foreign.gather import study_of, with_copies
from qerl_studies.foreign.verdict import NOTHING, judge, markdown, shown
from qerl_studies.runs.committed import read_study
from qerl_studies.runs.comparable import load_runs
from qerl_studies.runs.reported import ABOUT, REPORTED, About, Row, write

PROGRAMS = ("trl", "verl", "csv")
NAMES = {"trl": "TRL", "verl": "verl", "csv": "a program that is not named"}
PAGE = "verdict.md"


def main(words: list[str]) -> None:
    parser = KeyValueParser(__doc__)
    parser.add_argument("program", choices=PROGRAMS, help="whose files they are")
    parser.add_argument("place", type=Path, help="folder of runs; of csv a file, or a folder of files")
    parser.add_argument("--out", type=output_folder, required=True, help="folder to write, which must be new")
    parser.add_argument("--model", help="name of the model that all runs begin with")
    parser.add_argument("--task", help="name of what is asked")
    parser.add_argument("--tool", help="who made the runs, with its version: tool='TRL 1.16.0'")
    parser.add_argument("--control", help="the arm that others are compared with (default: the first by name)")
    margin = "smallest difference of a metric that matters, fixed before: margin=reward/mean:0.02; may be repeated"
    parser.add_argument("--margin", nargs=1, action="extend", default=[], metavar="METRIC:SIZE", help=margin)
    parser.add_argument("--accuracy", help="trl: the reward function that gives 1 for a right answer and else 0")
    parser.add_argument(
        "--answers", choices=verl.MODES, help="verl: how validation answers were drawn, if no config says"
    )
    wide = "csv with one line a run: COLUMN:NAME or COLUMN:NAME:DEFINITION; may be repeated"
    parser.add_argument("--metric", nargs=1, action="extend", default=[], metavar="COLUMN:NAME", help=wide)
    parser.add_argument("--arm", default="arm", help="csv: the column that has the arm (default: arm)")
    parser.add_argument("--seed", default="seed", help="csv: the column that has the seed (default: seed)")
    parser.add_argument("--step", type=int, help="csv: the step after which the numbers of `metric` are")
    given = parser.parse_args(words)
    out: Path = given.out
    held = {path.name for path in out.iterdir()} if out.exists() else set()
    free = not held or held == {REGISTERED, GROUP}
    require(free, f"{out} is there already: name a new folder, or delete it; only a registered claim may be in it")
    require(given.place.exists(), f"{given.place} is not there: give the folder or file that the runs are in")
    margins = dict(_margin(text) for text in given.margin)
    rows, about = _read(given, out.resolve().name)
    about = with_copies(rows, about)
    out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as place:
        folder = Path(place, out.name)
        write(folder, rows, about)
        for source in (out, given.place if given.place.is_dir() else given.place.parent):
            carry(source, folder)
        runs = read_study(folder).runs
        registered = check_registration(folder, load_runs([folder])) if registered_files(folder) else ""
        judged = judge(folder, given.control, margins)
        unknown = margins.keys() - {one.metric for one in judged}
        names = ", ".join(printable(one.metric) for one in judged if one.state.untested != UNREAD)
        require(
            not unknown, f"margin={min(unknown, default='')}: no number of these runs is called so; there are {names}"
        )
        told = [f"Margin of {shown(metric)}: {size:g}." for metric, size in margins.items()]
        told += [f"A claim was {shown(registered)}."] if registered else []
        promised = "".join(f"\n{line}\n" for line in ("## What was said beforehand", *told)) if told else ""
        (folder / PAGE).write_text(markdown(folder, judged) + promised)
        if held:  # its claims stay as they are
            for name in (REPORTED, ABOUT, PAGE):
                (folder / name).rename(out / name)
        else:
            folder.replace(out)
    print(f"{out}: {len(runs)} runs reported with {printable(about.tool)}, {len(rows):,} numbers\n")
    if not judged:
        print(NOTHING[False])
    for one in [one for one in judged if one.state.untested != UNREAD]:
        value = " ".join(one.texts[2:4]) if one.difference else ""
        why = f" ({one.state.untested})" if one.state.untested else ""
        print(printable(f"{one.first} - {one.second}  {one.metric}  {value}  {one.state.of_pair}{why}"))
    print(f"\n{printable(registered)}\n{out / PAGE}" if registered else f"\n{out / PAGE}")


def _read(given: Namespace, name: str) -> tuple[list[Row], About]:
    tool = given.tool or NAMES[given.program]
    if given.program == "csv":
        files = table.files_of(given.place)
        if not given.metric and all(table.is_long(file) for file in files):
            return table.read_long(files, tool)
        step = given.step
        require(
            bool(given.metric) and len(files) == 1 and given.step is not None,
            f"{files[0]} does not have the twelve columns of a reported study: name the numbers of one file with "
            "metric=COLUMN:NAME, and the step after which they are with step=24 (docs/how-to/import.md)",
        )
        needed = _named(given)
        columns = {"study": name, "arm": given.arm, "seed": given.seed} | needed
        assert step is not None
        return table.read_wide(files[0], tool, columns, given.metric, step)
    needed = _named(given)
    require(given.place.is_dir(), f"{given.place} is a file: give the folder that holds the runs")
    runs = trl.read(given.place, given.accuracy) if given.program == "trl" else verl.read(given.place, given.answers)
    program = given.tool if given.tool and given.tool.lower().startswith(given.program) else NAMES[given.program]
    return study_of(program, name, needed["model"], needed["task"], runs)


def _named(given: Namespace) -> dict[str, str]:
    missing = [f"{key}=NAME" for key in ("model", "task") if not getattr(given, key)]
    require(not missing, f"say which {' and which '.join(missing)} the runs have: no file of theirs is sure to say it")
    return {"model": given.model, "task": given.task}


def _margin(text: str) -> tuple[str, float]:
    metric, _, size = text.rpartition(":")
    try:
        number = float(size)
    except ValueError:
        number = math.nan
    require(bool(metric) and number > 0 and math.isfinite(number), f"margin must be METRIC:SIZE, above 0, got {text!r}")
    return metric, number
