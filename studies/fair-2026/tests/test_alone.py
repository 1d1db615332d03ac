"""Part 9 of the fair test: the runs that its commands make, and words of planted data."""

from __future__ import annotations

import hashlib
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from qerl_bench.config import build, compose
from qerl_core.checks import ConfigError
from qerl_studies.runs.collect import write_study
from tests.run_folders import write_run
from tests.scripts import ROOT, script

STUDY = ROOT / "studies" / "fair-2026"
PAGE = script("studies/fair-2026/alone.py")
DONE = script("studies/fair-2026/tests/test_mechanism.py").DONE
FROZEN = "fe1cd149ff1a5a1c9c27a0878813a977c536a7d340913159a069e4ca5e063e59"  # of the protocol without its amendments
COMMANDS = re.findall(r"^    python src/run.py (.*) root=DIR -m$", (STUDY / "alone" / "protocol.md").read_text(), re.M)


def test_the_protocol_is_the_frozen_one() -> None:
    before = (STUDY / "alone" / "protocol.md").read_text().partition("\n## Amendments")[0].rstrip("\n")
    assert hashlib.sha256(before.encode()).hexdigest() == FROZEN


@cache
def trees() -> list[Any]:
    """The config of each run of the protocol's commands."""
    found: list[list[str]] = []
    for command in COMMANDS:
        grid: list[list[str]] = [[]]
        for word in command.replace("FILE.gguf", PAGE.MODELS["0.5B"]).split():
            key, _, values = word.partition("=")
            grid = [[*one, f"{key}={value}"] for one in grid for value in values.split(",")]
        found += grid
    return [compose(words) for words in found]


def test_the_commands_make_the_runs_that_the_page_wants() -> None:
    cells = []
    for tree in trees():
        assert (tree.task.lengths, tree.task.name, tree.engine.name) == ("fixed", "shape", "hf")
        assert (tree.steps, tree.train.micro_batch_tokens) == (PAGE.STEPS, 8192)
        assert (tree.task.prompt_tokens, tree.task.completion_tokens) == (256, 256)
        cells.append((tree.quant.name, tree.rollout.prompts_per_step * tree.rollout.group_size))
    assert len(COMMANDS) == 2 and PAGE.Counter(cells) == PAGE.WANTED
    assert build(trees()[0])


def planted(form: str, machine: int) -> list[dict[str, Any]]:
    """NVFP4 samples half as much again as BF16, in half of its memory, and a step takes as long."""
    speed = 1 + machine / 1000
    rollouts = {"nvfp4": 1500.0, "bf16": 1000.0, "nf4": 1490.0}[form] * speed
    peak = {"nvfp4": 5.0, "bf16": 10.0, "nf4": 5.0}[form]
    return [
        {
            "kind": "train", "step": at, "speed/rollout_tok_s": rollouts if at > 2 else 1.0, "memory/peak_gib": peak,
            "train/taught_frac": 1.0, "time/step_s": 2.0 * speed if at > 2 else 90.0,
        }
        for at in range(1, 9)
    ]  # fmt: skip


def pack(data: Path, machine: int, change: dict[str, float] | None = None, steps: int = 8, card: str = "") -> None:
    folder = data.parent / f"runs-{machine}"
    for tree in trees():
        lines = [line | (change or {}) for line in planted(tree.quant.name, machine)[:steps]]
        write_run(folder / tree["name"], tree, lines, DONE, {"device": "cuda", "gpu": "H200"})
    write_study(sorted(folder.iterdir()), data / f"m{machine}", mixed_code=True, metrics=("study",))
    (data / f"m{machine}" / "cards.txt").write_text(f"{card or f'a{machine}'}\nb{machine}\n")


def test_three_whole_machines_have_words(tmp_path: Path) -> None:
    data = tmp_path / "data"
    assert PAGE.page(data).count("0 of 3 machines have all runs.") == 2
    for machine in (1, 2):
        pack(data, machine)
    assert "## 0.5B\n\nNot whole, so no words: 2 of 3 machines" in PAGE.page(data)
    pack(data, 3)
    page = PAGE.page(data)
    assert "| rollouts, NVFP4 / BF16 | x1.500" in page
    assert "| memory, NVFP4 / BF16 | x0.500 | 0.0000 | **less** |" in page  # equal on all machines: exact
    assert "| nvfp4, 8 | 1,503 | 2.00 | 5.00 |" in page and "more than a tenth: 0 of 36." in page
    assert "## 1.5B\n\nNot whole, so no words: 0 of 3 machines" in page


def rows(spread: float, **ratios: float) -> Any:
    draw = np.random.default_rng(0)
    found = []
    for machine in range(3):
        for form in PAGE.FORMATS:
            for batch in PAGE.BATCHES:
                values = {
                    name: ratios.get(f"{form}_{name}", 1.0) * float(np.exp(spread * draw.standard_normal()))
                    for name in ("rollouts", "step", "memory")
                }
                uneven = {"halves": 1.2 if batch == 8 else 1.0}
                found.append({"format": form, "completions": batch, "machine": machine} | values | uneven)
    return pd.DataFrame(found)


def test_words_are_those_of_the_protocol() -> None:
    ratios = {"nvfp4_rollouts": 1.5, "nvfp4_step": 0.7, "nvfp4_memory": 0.5, "nf4_rollouts": 1.5}
    table = "\n".join(PAGE.words(rows(0.002, **ratios)))
    for line in (
        r"rollouts, NVFP4 / BF16 .* \*\*more\*\*",
        r"step, NVFP4 / BF16 .* \*\*less\*\*",
        r"memory, NVFP4 / BF16 .* \*\*less\*\*",
        r"rollouts, NVFP4 / NF4 .* \*\*no difference beyond the margin\*\*",
    ):
        assert re.search(line, table), line
    assert "more than a tenth: 9 of 27." in table
    assert "\n".join(PAGE.words(rows(0.3, nvfp4_rollouts=1.5))).count("**not decided**") == 4


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"change": {"train/taught_frac": 0.5}}, "taught less than all"),
        ({"steps": 7}, "has not 8 steps of"),
        ({"card": "one"}, "cards one are in two sessions, which are one machine"),
    ],
)
def test_what_the_protocol_refuses_is_refused(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    for machine in (1, 2, 3):
        pack(tmp_path / "data", machine, **options)
    with pytest.raises(ConfigError, match=said):
        PAGE.page(tmp_path / "data")
