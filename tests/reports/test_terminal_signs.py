r"""Whatever a name or text of somebody else holds, a terminal is not told to move, paint or copy: it sees `\x1b`.

Kind 8 (7) of the reports: `status` and `compare` printed the names of folders raw.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from qerl_bench.__main__ import main
from qerl_core.process.terminal import lasting_output
from tests.run_folders import DONE, SHORT, write_run
from tests.scripts import ROOT

SIGN = "\x1b]52;c;eA==\x07red\x1b[31m\x9b2J"  # copies, rings, paints, clears
SHOWN = r"\x1b]52;c;eA==\x07red\x1b[31m\x9b2J"
LINES = [{"kind": "train", "step": step, "reward/mean": 0.5, "accuracy": 0.5} for step in (1, 2, 3)]
LINES += [{"kind": "eval", "step": step, "eval/accuracy_sampled": 0.1 * (step + 1)} for step in (0, 3)]
ENVIRONMENT = {"gpu": None, "cpu": "x86_64", "packages": {"torch": "2.11.0"}}


def made(place: Path, name: str, config: dict | None = None, done: dict | None = DONE, **more: Any) -> Path:
    return write_run(
        place / name,
        {**SHORT, "optim": {"lr": 1e-5}, **(config or {})},
        LINES,
        done,
        **{"environment": ENVIRONMENT, **more},
    )


def in_a_folder(place: Path) -> list[str]:
    made(place, SIGN)
    return ["status", str(place)]


def in_a_folder_that_is_left_out(place: Path) -> list[str]:
    made(place, "whole")
    (made(place, SIGN) / "config.yaml").write_text("[")
    return ["claims", str(place)]


def in_a_folder_that_is_compared(place: Path) -> list[str]:
    return ["compare", str(made(place, SIGN)), str(made(place, "other", {"seed": 1}))]


def in_a_value_of_an_option(place: Path) -> list[str]:
    odd = made(place, "odd", {"quant": {"name": SIGN}})
    return ["compare", str(odd), str(made(place, "other"))]


def in_the_name_of_an_option(place: Path) -> list[str]:
    odd = made(place, "odd", {"optim": {"lr": 1e-5, SIGN: 1}})
    return ["compare", str(odd), str(made(place, "other"))]


def in_the_version_of_a_package(place: Path) -> list[str]:
    odd = made(place, "odd", environment={**ENVIRONMENT, "packages": {"torch": SIGN}})
    return ["compare", str(odd), str(made(place, "other"))]


def in_a_setting_of_a_table(place: Path) -> list[str]:
    made(place, "whole")
    made(place, "odd", {"quant": {"name": SIGN}})
    return ["figure", "runs", str(place), f"out={place / 'out'}"]


def in_a_file_that_is_not_there(place: Path) -> list[str]:
    return ["score", "task=arithmetic", f"completions={place / SIGN}.jsonl", f"out={place / 'out'}"]


def in_a_command(place: Path) -> list[str]:
    return [SIGN]


def in_a_word(place: Path) -> list[str]:
    return ["status", str(place), f"{SIGN}=1"]


def in_an_arm(place: Path) -> list[str]:
    arms = {"bf16": {"tier": 1, "words": []}, SIGN: {"tier": "first", "words": []}}
    content = {"bases": 1, "seeds": 1, "probe": {"questions": 2, "samples": 2}, "common": ["experiment=smoke"]}
    content |= {"arms": arms, "dose": {"rise": 0.1, "prompts": 2, "draws": 1}}
    (place / "study.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    return ["gates", str(place / "study.yaml")]


def in_a_column(place: Path) -> list[str]:
    pd.DataFrame({"run": ["a"], "step": [1], SIGN: [0.5]}).to_csv(place / "theirs.csv", index=False)
    return [
        "import",
        "csv",
        str(place / "theirs.csv"),
        "metric=right:accuracy",
        "step=1",
        "model=m",
        "task=t",
        f"out={place / 'out'}",
    ]


@pytest.mark.parametrize(
    "case",
    [
        in_a_folder,
        in_a_folder_that_is_left_out,
        in_a_folder_that_is_compared,
        in_a_value_of_an_option,
        in_the_name_of_an_option,
        in_the_version_of_a_package,
        in_a_setting_of_a_table,
        in_a_file_that_is_not_there,
        in_a_command,
        in_a_word,
        in_an_arm,
        in_a_column,
    ],
    ids=lambda case: case.__name__,
)
def test_signs_of_others_are_shown_and_not_obeyed(
    case: Callable[[Path], list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    words = case(tmp_path)
    monkeypatch.chdir(tmp_path)
    with lasting_output(), suppress(SystemExit):
        main(words)
    said = capfd.readouterr()
    both = (said.out + said.err).replace("\n    ", "")
    assert "\x1b" not in both and "\x07" not in both and "\x9b" not in both
    assert SHOWN in both.replace("\n", "").replace(" ", "")


def test_nothing_goes_to_stderr_that_is_not_made_printable() -> None:
    """As sys.stdout is, once for all; sys.stderr also has the bars of libraries, which move the cursor."""
    raw = []
    for path in sorted((ROOT / "src").rglob("*.py")):
        for call in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)):
            to_stderr = any(word.arg == "file" and ast.unparse(word.value) == "sys.stderr" for word in call.keywords)
            if ast.unparse(call.func) == "print" and to_stderr:
                (text, *_) = call.args
                if not ast.unparse(text).startswith(("wrap_lines(", "printable(")):
                    raw.append(f"{path.relative_to(ROOT)}:{call.lineno}")
    assert raw == []
