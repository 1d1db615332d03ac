"""Every command that the documentation shows is accepted: it composes, and its options can work together.

What runs them is tests/e2e/test_artifact.py, for the README. Left out: docs/LOG.md and protocols, whose commands are of
their day, docs/first-hour.md, which shows a mistake, and the data files, packages and machines that commands need.
"""

from __future__ import annotations

import re
import shlex
from importlib.util import find_spec
from itertools import pairwise, zip_longest
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from qerl_bench.__main__ import COMMANDS
from qerl_bench.commands.eval import OURS, apply_overrides
from qerl_bench.config import build, compose
from qerl_core.options.explain import explain
from qerl_core.sweeps.points import flags_first

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("docs", "kernels", "studies")
PAGES = [*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))]
SHOWN = [
    (str(page.relative_to(ROOT)), match[0])
    for page in sorted(PAGES)
    if page.name not in ("LOG.md", "CHANGELOG.md", "first-hour.md", "protocol.md")
    for match in re.finditer(
        r"(?:python (?:src|sweeps|analysis|kernels|-m qerl)|qerl-bench [a-z])[^\n`#;]*",
        page.read_text().replace("\\\n", " "),
    )
]
BY_COMMAND = {command: page for page, command in reversed(SHOWN)}  # each once, with the first page that shows it


def points(words: list[str]) -> list[list[str]]:
    """The corners of a sweep: the first values of all its keys, the second ones, and so on."""
    parsed = OverridesParser.create().parse_overrides(words)
    values = [[*o.sweep_string_iterator()] if o.is_sweep_override() else [o.get_value_element_as_str()] for o in parsed]
    keys = [str(o.input_line).split("=")[0] for o in parsed]
    rows = zip_longest(*values)
    return [
        [f"{key}={given[0] if value is None else value}" for key, given, value in zip(keys, values, row, strict=True)]
        for row in rows
    ]


def test_the_pages_show_commands() -> None:
    assert len(SHOWN) > 50 and len({page for page, _ in SHOWN}) > 15


@pytest.mark.parametrize("command", BY_COMMAND, ids=lambda command: f"{BY_COMMAND[command]}-{command}")
def test_a_shown_command_is_accepted(command: str) -> None:
    program, *words = shlex.split(command)
    if program == "qerl-bench":
        name, *words = words
        assert name in COMMANDS
        if name == "eval":  # the folder of own options is the reader's, and is made above the command
            words = [word for before, word in pairwise(["", *words]) if "--config-dir" not in (before, word)]
            build(apply_overrides(compose(), [word for word in words[1:] if word.partition("=")[0] not in OURS]))
        return
    program, *words = words
    if program == "-m":
        assert find_spec(words[0]) is not None
        return
    assert (ROOT / program).exists()
    if "--explain" in words:
        assert explain([word for word in words if word != "--explain"])
    elif program == "src/run.py" and not {"--cfg", "--help"} & {*words}:
        for point in points([word for word in flags_first(words) if word != "-m"]) or [[]]:
            build(compose(point))
