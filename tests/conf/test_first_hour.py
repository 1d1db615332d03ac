"""docs/first-hour.md is what docs/record.py records, and shows what the README tells a newcomer to type."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SPEC = importlib.util.spec_from_file_location("record", ROOT / "docs" / "record.py")
assert SPEC is not None and SPEC.loader is not None
RECORD = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(RECORD)


def test_the_page_shows_each_recorded_command_under_its_heading() -> None:
    page = RECORD.PAGE.read_text()
    sections = re.findall(r"^## (.+)\n\n.*; exit code (\d+)\n\n```console\n\$ (.+)$", page, re.MULTILINE)
    assert {command: meaning for meaning, _, command in sections} == RECORD.COMMANDS
    assert [command for *_, command in sections] == [*RECORD.COMMANDS]
    assert {command for _, code, command in sections if code != "0"} == {c for c in RECORD.COMMANDS if "nmae" in c}


def test_what_the_readme_shows_of_its_first_command_is_recorded() -> None:
    readme = (ROOT / "README.md").read_text()
    (block,) = re.findall(r"what it prints\]\(docs/first-hour\.md\):\n\n((?:    .*\n)+)", readme)
    printed = RECORD.PAGE.read_text().partition("\n$ make run\n")[2].splitlines()
    lines = [line.removeprefix("    ") for line in block.splitlines()]
    places = [printed.index(line) for line in lines]
    assert len(lines) == 8 and places == sorted(places)


def test_of_consecutive_steps_the_first_and_the_last_are_kept() -> None:
    steps = [f"step {step}/4  loss 1" for step in range(1, 5)]
    assert RECORD.shortened(["begin", *steps, "end "]) == ["begin", steps[0], "...", steps[3], "end"]
