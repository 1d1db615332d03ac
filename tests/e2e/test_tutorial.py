"""docs/tutorial.md is true: its commands run, in small, and print the files, columns and claims that it shows.

So do the README's commands for pretrained models, with a tiny checkpoint in their place.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.models.builds import build
from tests.parallel.programs import UNDRAWN

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "tutorial.md"
README = (ROOT / "README.md").read_text().replace("\\\n", " ")
SMALL = {
    "steps=40": "steps=3 model.warm_start_steps=2",
    "prompts_per_step=8": "prompts_per_step=2 rollout.group_size=2",
    "questions=64": "questions=4",
}


def shown() -> dict[str, list[str]]:
    """The commands of the page, each with the lines that it shows below them."""
    blocks = re.findall(r"^```console\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return {command.removeprefix("$ "): lines for command, *lines in map(str.splitlines, blocks)}


def run(command: str, folder: Path, programs: Path, **more: str) -> str:
    """What `command` prints in `folder`, which stands for the checkout; `more` is of its environment."""
    for part in ("src", "analysis"):
        (folder / part).exists() or (folder / part).symlink_to(ROOT / part)
    environment = {key: value for key, value in os.environ.items() if key != "QERL_ROOT"} | {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        **more,
    }
    done = subprocess.run(
        ["sh", "-ec", command], cwd=folder, env=environment, text=True, timeout=500, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


def headings(text: str) -> list[str]:
    """The words above the columns of the tables of runs in `text`."""
    return [" ".join(line.split()) for line in text.splitlines() if re.search(r"step 0 +final", line)]


def claims(text: str) -> list[str]:
    """The claims in a table of verdicts, without the verdicts, which three steps cannot give."""
    return re.findall(r"^\| (\d+\. .+?):", text, re.MULTILINE)


@pytest.mark.slow
def test_the_commands_of_the_tutorial_print_what_it_shows(tmp_path: Path, programs: Path) -> None:
    pages = shown()
    assert len(pages) == 6
    for command, lines in pages.items():
        small, text = command, "\n".join(lines)
        for large, little in SMALL.items():
            small = small.replace(large, little)
        printed = run(small, tmp_path, programs, **({UNDRAWN: "1"} if " -m " in command else {}))
        if command.startswith("ls "):
            assert printed.split() == text.split()
        elif command.startswith("grep "):
            assert re.sub(r"\d\S*", "0", printed).split() == re.sub(r"\d\S*", "0", text).split()
        elif command.startswith("qerl-bench report"):
            assert printed.splitlines()[-1] == lines[-1]
        elif command.startswith("qerl-bench claims"):
            assert set(claims(text)) <= set(claims(printed)) and claims(text)
        elif "src/run.py" in command:
            assert headings(printed) == headings(text) != []
    finished = [json.loads(file.read_text()) for file in tmp_path.glob("runs/*/done.json")]
    assert len(finished) == 4


@pytest.mark.slow
def test_the_commands_of_the_readme_for_pretrained_models_make_runs(tmp_path: Path, programs: Path) -> None:
    checkpoint = build("llama", tmp_path / "checkpoint")
    commands = re.findall(r"^ +python (src/run\.py model=hub [^\n#]*)", README, re.MULTILINE)
    assert len(commands) == 1
    for number, command in enumerate(commands):
        replaced = ("model.id", "task", "task.answer_format", "experiment", "steps")
        words = [word for word in shlex.split(command) if word.partition("=")[0] not in replaced]
        own = [f"model.id={checkpoint}", "experiment=smoke", "steps=2", "device=cpu", f"name=run{number}"]
        run(shlex.join(["python", *words, *own]), tmp_path, programs, **{UNDRAWN: "1"})
    assert len([*tmp_path.glob("runs/*/done.json")]) == 1
