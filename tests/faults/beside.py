"""What lies beside a run: folders of other programs, half copies of another run, and files that are not what their
names say.

Every reading command leaves them out and says so, and neither ends nor counts them: what it tells of the run that
nothing happened to is as before, and whatever it tells of the other is true.
"""

from __future__ import annotations

import csv
import gzip
import json
import os
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests.faults.attempt import Ended, attempt
from tests.faults.damage import DAMAGES
from tests.faults.run import SURVIVED, WORDS, Case, Lost, Outcome, Stock, checked, drawing_nothing

RUN, BESIDE = "run", "beside"
Harm = Callable[[Path], object]  # of the folder beside runs/run, which is a whole run before
COMMANDS = {  # the words behind each command: of the folder of runs, and of one to write to
    "status": ("status", "{runs}", "--json"),
    "report": ("report", "{runs}", "out={out}"),
    "claims": ("claims", "{runs}", "out={out}"),
    "collect": ("collect", "{runs}", "out={out}", "--csv", "--metrics", "all"),
    "compare": ("compare", f"{{runs}}/{RUN}", "{runs}"),
    "step times": ("figure", "step_times", "{runs}", "out={out}"),
    "layers": ("figure", "error_decomposition", "{runs}", "out={out}"),
}
READERS = ("report", "claims", "collect", "compare", "figure")
SEEN = ("cut", "empty", "delete", "binary")  # damages that a reader without checksums can see
OF_RUN = (
    *("config.yaml", "done.json", "env.json", "metrics.jsonl", "rollouts.jsonl", "seals.jsonl", "samples.parquet"),
    *("layers.parquet", "eval.json", "engine.json", "run.log", "formats.json"),
)


# What is told of runs/run alone, and of both runs.


def prepare(stock: Path, root: Path) -> dict[str, Any]:
    """Make the second run, of another seed, in `stock`; what the commands tell of the first alone, and of both."""
    words = [*WORDS[:-1], f"name={BESIDE}", "seed=1", f"root={root}"]
    ended = checked(attempt(words, drawing_nothing(None)))
    if ended.code != 0:
        raise SystemExit(f"the run beside the other ended with {ended.code}:\n{ended.said}")
    (root / "runs" / BESIDE).rename(stock / BESIDE)
    shutil.copytree(stock / "finished", root / "runs" / RUN)
    alone = found(told(root, "alone"))
    shutil.copytree(stock / BESIDE, root / "runs" / BESIDE)
    return {"alone": alone, "both": found(told(root, "both"))}


def told(root: Path, out: str) -> dict[str, tuple[Ended, Any]]:
    """How each command ends that reads runs/ in `root`, and what it tells."""
    made: dict[str, tuple[Ended, Any]] = {}
    for name, words in COMMANDS.items():
        place = root / out / name
        ended = attempt([word.format(runs=root / "runs", out=place) for word in words])
        if ended.code != 0:
            raise Lost(f"{name} ends with {ended.code}: {ended.words}")
        try:
            made[name] = checked(ended), READ[name](ended.said.replace(str(root), "ROOT"), place)
        except Lost as lost:
            raise Lost(f"{name}: {lost}") from lost
    return made


def found(made: dict[str, tuple[Ended, Any]]) -> dict[str, Any]:
    return {name: content for name, (_, content) in made.items()}


def states(said: str, out: Path) -> dict[str, str]:
    content = json.JSONDecoder().raw_decode(said, min(said.find(start) for start in ("[\n", "[]") if start in said))[0]
    return {one["run"].removeprefix("ROOT/runs/"): one["state"] for one in content}


def rows(said: str, out: Path) -> dict[str, set[tuple[str, ...]]]:
    """The numbers of each run; behind the name of an unfinished one is a star."""
    known = json.loads((out / "settings.json").read_text())["runs"]
    table: dict[str, set[tuple[str, ...]]] = {
        f"{run}{'' if one['finished'] else ' *'}": set() for run, one in known.items()
    }
    with open(out / "tidy.csv", newline="") as file:
        for row in csv.DictReader(file):
            name = row["run"] if known[row["run"]]["finished"] else f"{row['run']} *"
            table[name].add((row["kind"], row["step"], row["metric"], row["value"]))
    return table


READ: dict[str, Callable[[str, Path], Any]] = {
    "status": states,
    "report": lambda said, out: said.splitlines()[-1].partition("index.html")[2],
    "claims": lambda said, out: re.sub(r" (Unfinished and l|L)eft out.*", "", (out / "claims.md").read_text()),
    "collect": rows,
    "compare": lambda said, out: said[said.index("first   ") :],
    "step times": lambda said, out: (out / "step_times.csv").read_text(),
    "layers": lambda said, out: (out / "error_decomposition.svg").exists(),
}


def left_beside(harm: Harm, case: Case) -> Outcome:
    """The commands tell of runs/run what they tell of it alone, and of what is beside it nothing that is not so."""
    for name, source in ((RUN, "finished"), (BESIDE, BESIDE)):
        shutil.copytree(case.stock / source, case.root / "runs" / name)
    harm(case.root / "runs" / BESIDE)
    alone, both = case.others["beside"]["alone"], case.others["beside"]["both"]
    made = told(case.root, "now")
    now = found(made)
    require_true(now["collect"], both["collect"])
    counted = {"whole": BESIDE in now["collect"], "unfinished": f"{BESIDE} *" in now["collect"]}
    if len(now["collect"]) > 2 or now["status"].keys() - {RUN, BESIDE}:
        raise Lost(f"a folder that is no run is counted: {[*now['collect']]}, {[*now['status']]}")
    if now["status"].get(BESIDE) == "done" and not counted["whole"]:
        raise Lost("status says done of a run that other commands leave out")
    expected = both if counted["whole"] else alone
    for name in ("report", "claims", "compare", "step times"):
        if now[name] != expected[name] and not counted["unfinished"]:
            raise Lost(f"{name} tells {str(now[name])[-200:]} in the place of {str(expected[name])[-200:]}")
    if counted["whole"]:
        return SURVIVED
    said = [line for ended, _ in made.values() for line in ended.said.splitlines() if "left out: " in line]
    if BESIDE in now["status"]:
        said.append(f"status: {now['status'][BESIDE]}")
    return Outcome("refused", said[0].replace(str(case.root), "ROOT")) if said else SURVIVED


def require_true(now: dict[str, set[Any]], both: dict[str, set[Any]]) -> None:
    """Raise Lost unless all of the first run is told, and nothing of the other that is not so."""
    if now.get(RUN) != both[RUN]:
        raise Lost("other numbers of the run that nothing happened to")
    if now.get(BESIDE, both[BESIDE]) != both[BESIDE]:
        raise Lost("other numbers of a run that is taken for whole")
    if not now.get(f"{BESIDE} *", set()) <= both[BESIDE]:
        raise Lost("numbers that the unfinished run does not have")


# Folders of other programs.


def instead(files: dict[str, str], folder: Path) -> None:
    """Another program's files in the place of the run."""
    shutil.rmtree(folder)
    added(files, folder)


def added(files: dict[str, str], folder: Path) -> None:
    for name, content in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)


LINES = "".join(json.dumps({"step": step, "loss": 1 / step}) + "\n" for step in range(1, 9))
OURS_NEARLY = "".join(json.dumps({"kind": "train", "step": step, "loss": 1 / step}) + "\n" for step in range(1, 9))
PROGRAMS: dict[str, dict[str, str]] = {
    "W&B": {"wandb/run-1/files/config.yaml": "wandb_version: 1\n", "wandb/run-1/files/output.log": "step 1\n"},
    "TensorBoard": {"events.out.tfevents.1": "\x00\x01"},
    "Lightning": {"version_0/hparams.yaml": "lr: 1\n", "version_0/metrics.csv": "step,loss\n1,2\n"},
    "Trainer": {"checkpoint-500/trainer_state.json": '{"log_history": []}', "checkpoint-500/config.json": "{}"},
    "Hydra": {"multirun.yaml": "hydra: {}\n", "0/.hydra/config.yaml": "lr: 1\n", "0/train.log": "step 1\n"},
    "MLflow": {"0/meta.yaml": "artifact_location: x\n", "0/metrics/loss": "1 2 3\n"},
    "RLlib": {"params.json": "{}", "progress.csv": "a,b\n", "result.json": "{}\n"},
    "lines of its own": {"metrics.jsonl": LINES},
    "lines like ours": {"metrics.jsonl": OURS_NEARLY},
    "lines and a config": {"metrics.jsonl": OURS_NEARLY, "config.yaml": "lr: 1\nseed: 0\n"},
    "lines and a config with steps": {"metrics.jsonl": OURS_NEARLY, "config.yaml": "lr: 1\nsteps: 8\n"},
    "lines and a config of groups": {"metrics.jsonl": OURS_NEARLY, "config.yaml": "model: {name: x}\nsteps: 8\n"},
    "a config and checkpoints": {"config.yaml": "lr: 1\n", "checkpoints/last/weights.bin": "x"},
    "a config and a log": {"config.yaml": "lr: 1\n", "run.log": "begun\n"},
    "a log and done.json": {"run.log": "begun\n", "done.json": "{}"},
    "settings of an editor": {"settings.json": '{"editor.tabSize": 4}', ".vscode/settings.json": "{}"},
    "settings and a table": {"settings.json": '{"editor.tabSize": 4}', "tidy.parquet": "run,step\n"},
    "a job": {"job.json": '{"id": 5}'},
    "a folder of folders": {"a/metrics.jsonl": LINES, "b/c/metrics.jsonl": LINES, "d/config.yaml": "x: 1\n"},
    "nothing": {},
}
IN_A_RUN: dict[str, dict[str, str]] = {
    "W&B's files": PROGRAMS["W&B"],
    "Hydra's record": {".hydra/config.yaml": "lr: 1\n", ".hydra/overrides.yaml": "[]\n"},
    "of Finder": {"._metrics.jsonl": "\x00\x05\x16\x07", ".DS_Store": "Bud1"},
    "of rsync": {".metrics.jsonl.aB3dE5": "half", ".done.json.x1Y2z3": "{"},
    "of Syncthing": {"metrics.sync-conflict-20261129-1.jsonl": "{}\n", ".stfolder/x": ""},
    "of NFS": {".nfs000000000123": "x", "checkpoints/.nfs01": "x"},
    "of Jupyter": {".ipynb_checkpoints/config-checkpoint.yaml": "x: 1\n", ".ipynb_checkpoints/metrics.jsonl": LINES},
    "of an editor": {"config.yaml~": "x: [\n", ".config.yaml.swp": "b0VIM", "#metrics.jsonl#": "x"},
    "lines in a folder": {"backup/metrics.jsonl": LINES, "backup/config.yaml": "x: 1\n"},
    "a pycache": {"__pycache__/a.cpython-311.pyc": "\x00"},
}


# Half copies: a program copies file by file, in the order of names; the last one is half there.


def half_copied(files: int, folder: Path) -> None:
    paths = sorted(file for file in folder.rglob("*") if file.is_file())
    for path in paths[files:]:
        path.unlink()
    half = paths[files - 1]
    os.truncate(half, half.stat().st_size // 2)
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_dir() and not [*path.iterdir()]:
            path.rmdir()


# Files that are not what their names say, with the checksums of the run and without.


def unsealed(folder: Path) -> None:
    """As a run from before checksums."""
    (folder / "seals.jsonl").unlink()
    done = json.loads((folder / "done.json").read_text())
    (folder / "done.json").write_text(json.dumps({key: value for key, value in done.items() if key != "seals"}))


def with_harm(file: str, harm: Harm, sealed: bool, folder: Path) -> None:
    if not sealed:
        unsealed(folder)
    harm(folder / file)


def linked_nowhere(file: Path) -> None:
    file.unlink()
    file.symlink_to("gone")


def linked_to_itself(file: Path) -> None:
    file.unlink()
    file.symlink_to(file.name)


def pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def made_a_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def zipped(file: Path) -> None:
    file.write_bytes(gzip.compress(file.read_bytes()))


def said_as(content: bytes, file: Path) -> None:
    file.write_bytes(content)


IS: dict[str, Harm] = {
    **{
        harm.__name__.replace("_", " "): harm
        for harm in (linked_nowhere, linked_to_itself, pipe, made_a_folder, zipped)
    },
    "a picture": partial(said_as, b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR"),
    "a table of texts": partial(said_as, b"step,loss\n1,0.5\n"),
    "a page of a login": partial(said_as, b"<!DOCTYPE html><html><body>Sign in</body></html>\n"),
    "a pointer of Git LFS": partial(said_as, b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n"),
    "a list": partial(said_as, b"[1, 2]\n"),
    "an empty object": partial(said_as, b"{}\n"),
    "UTF-16": partial(said_as, "kind: train\n".encode("utf-16")),
}


def places(stock: Stock) -> dict[str, Callable[[Case], Outcome]]:
    files = sum(file.is_file() for file in (stock.path / BESIDE).rglob("*"))
    harms: dict[str, Harm] = {
        **{f"folder of another program: {name}": partial(instead, content) for name, content in PROGRAMS.items()},
        **{f"files in the other run: {name}": partial(added, content) for name, content in IN_A_RUN.items()},
        **{f"half copied: {count} of {files} files": partial(half_copied, count) for count in range(1, files + 1)},
        **{f"{file} is {name}": partial(with_harm, file, harm, True) for file in OF_RUN for name, harm in IS.items()},
        **{
            f"{file}: {name}": partial(with_harm, file, harm, True) for file in OF_RUN for name, harm in DAMAGES.items()
        },
        **{
            f"{file} without checksums: {name}": partial(with_harm, file, DAMAGES[name], False)
            for file in OF_RUN
            if file != "seals.jsonl"
            for name in SEEN
        },
    }
    return {name: partial(left_beside, harm) for name, harm in harms.items()}
