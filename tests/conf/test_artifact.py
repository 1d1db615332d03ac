"""ARTIFACT.md expects what docs/first-hour.md recorded and what the committed runs have."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
import pytest

from qerl_bench.config import build, compose
from qerl_core.options.fingerprint import as_dict, flat
from qerl_studies.runs.comparable import load_runs
from qerl_studies.runs.load import Run

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "ARTIFACT.md").read_text()
CELLS = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.splitlines()]
ROWS = {name: row for name, *row in filter(None, CELLS)}
SECTIONS = {part.partition("\n")[0]: part for part in PAGE.split("\n## ")}
RUNS, FOLLOWS = (part for title, part in SECTIONS.items() if title.startswith("Minutes"))
COMMANDS = re.findall(r"^    python src/run\.py (.+)$", PAGE.replace("\\\n", " "), re.MULTILINE)
SMOKE, LEARNS = ([word for word in command.split() if word != "-m"] for command in COMMANDS)


def numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"-?\d+\.?\d*", text)]


def commands(section: str) -> list[str]:
    """The indented lines of a section, without their comments."""
    return [line.partition("#")[0].strip() for line in re.findall(r"^    (\S.*)$", section, re.MULTILINE)]


def recorded() -> str:
    """What docs/first-hour.md shows of the run that SMOKE makes, which its sweep makes too."""
    sections = (ROOT / "docs" / "first-hour.md").read_text().split("\n## ")
    (sweep,) = (one for one in sections if "$ python src/run.py experiment=smoke quant=nvfp4 -m aqn=none,exp" in one)
    last = re.split(r"\d\d:\d\d:\d\d done ", sweep)[1]
    assert f"{build(compose(SMOKE)).name}\n" in last
    return re.sub(r"\n {4}", " ", last)


def test_the_smoke_run_has_the_name_that_the_page_gives() -> None:
    (pattern,) = re.findall(r"`runs/(tiny_untrained\S+)/`", PAGE)
    assert fnmatch(build(compose(SMOKE)).name, pattern)


@pytest.mark.parametrize(
    ("row", "shown"),
    [
        ("`entropy`, nats per token", "entropy"),
        ("`reward/mean`", "reward"),
        ("`accuracy`", "accuracy"),
        ("`aqn/sigma`", "sigma"),
    ],
)
def test_steps_of_the_smoke_run_are_those_of_the_first_hour(row: str, shown: str) -> None:
    steps = re.findall(rf"step +(\d)/6 .*?\b{shown} +([\d.e-]+)", recorded())
    assert [steps[0], steps[-1]] == [("1", ROWS[row][0]), ("6", ROWS[row][1])]  # the page may show others between


@pytest.mark.parametrize("way", ["greedy", "sampled"])
def test_evaluations_of_the_smoke_run_are_those_of_the_first_hour(way: str) -> None:
    found = re.findall(rf"step \d, 8 questions: .*?accuracy_{way} ([\d.]+)", recorded())
    assert found == ROWS[f"held-out {way} accuracy, before and after"][0].split(", ")


def test_the_noise_of_the_smoke_run_is_that_of_its_schedule() -> None:
    experiment = build(compose(SMOKE))
    given = [float(ROWS["`aqn/sigma`"][0]), *numbers(ROWS["`aqn/sigma` of steps 2 to 5"][0])]
    given.append(float(ROWS["`aqn/sigma`"][1]))
    assert given == pytest.approx([experiment.aqn.sigma(step, 6) for step in range(1, 7)], rel=5e-3)
    assert re.search(r"\b8 norms can get noise", recorded())
    assert numbers(ROWS["`aqn/norms_perturbed` from step 2 on"][0])[0] == 8


def learned() -> list[Run]:
    """The committed runs that differ from LEARNS in nothing that both know but the seed, and keys named since."""
    config = flat(as_dict(compose([re.sub(r"^(seed=\d+),.*", r"\1", word) for word in LEARNS])))
    renamed = {"lora.targets", "device", "seed", "name", "root"}
    same = [
        run
        for run in load_runs([ROOT / "studies" / "tiny"])
        if all(run.config_items[key] == config[key] for key in (run.config_items.keys() & config.keys()) - renamed)
    ]
    seeds = [int(seed) for seed in LEARNS[-1].removeprefix("seed=").split(",")]
    assert sorted(run.option("seed") for run in same) == seeds == [*range(8)]
    return same


@pytest.mark.parametrize(
    ("row", "kind", "metric", "step"),
    [
        ("held-out accuracy, greedy, before training", "eval", "eval/accuracy_greedy", 0),
        ("held-out accuracy, greedy, after 100 steps", "eval", "eval/accuracy_greedy", 100),
        ("held-out accuracy, sampled, after 100 steps", "eval", "eval/accuracy_sampled", 100),
        ("`entropy` in step 1", "train", "entropy", 1),
    ],
)
def test_what_eight_seeds_learn_is_what_the_committed_runs_did(row: str, kind: str, metric: str, step: int) -> None:
    values = [run.series(kind, metric)[step] for run in learned()]
    mean, spread = ROWS[row]
    assert numbers(mean) == pytest.approx([np.mean(values)], abs=5e-4)
    if len({*values}) == 1:
        assert "one value" in spread
    else:
        assert numbers(spread) == pytest.approx([np.std(values, ddof=1), min(values), max(values)], abs=5e-4)
