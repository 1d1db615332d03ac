"""The five names of qerl_bench, on recorded runs and on real ones."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

import qerl_bench
from qerl_bench import claims, effects, figure, load_runs, run
from qerl_core.checks import ConfigError, TrainingStopped
from qerl_studies.claims.evaluate import evaluate_claims
from qerl_studies.claims.registry import shown_claims
from qerl_studies.figures.named import FIGURES
from qerl_studies.runs.load import Run
from qerl_studies.runs.settings import by_scope

ROOT = Path(__file__).parents[2]
ASSETS = ROOT / "tests" / "assets" / "runs"
H200 = ROOT / "studies" / "h200"
PAGE = (ROOT / "docs" / "how-to" / "python.md").read_text()
TINY = (
    *("experiment=smoke", "steps=2", "optim.warmup_steps=0", "eval=none", "device=cpu", "model.hidden_size=64"),
    *("model.layers=2", "model.intermediate_size=64", "task.max_completion_tokens=12"),
)


@pytest.fixture(scope="module")
def runs() -> list[Run]:
    return load_runs(ASSETS)


def test_the_page_names_what_there_is() -> None:
    named = set(re.findall(r"^\| `(\w+)\(", PAGE, re.MULTILINE))
    assert named == {*qerl_bench.__all__} - {"__version__"} and len(named) == 5


def test_importing_it_imports_nothing_large() -> None:
    code = "import qerl_bench, sys; assert not {'torch', 'pandas', 'hydra', 'matplotlib'} & {*sys.modules}, sys.modules"
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}).returncode == 0


def test_effects_are_differences_of_pairs(runs: list[Run]) -> None:
    table = effects(runs)
    rows = table[(table["contrast"] == "nvfp4 - bf16") & (table["where"] == "none")].set_index("metric")
    by_name = {(one.option("quant.name"), one.option("aqn.name"), one.option("seed")): one for one in runs}
    last = [
        [by_name[quant, "none", seed].series("eval", "eval/accuracy_sampled").iloc[-1] for seed in (0, 1)]
        for quant in ("nvfp4", "bf16")
    ]
    row = rows.loc["eval/accuracy_sampled"]
    assert row["effect"] == pytest.approx(np.mean(np.subtract(*last)))
    assert row["low"] < row["effect"] < row["high"] and row["word"] == "not decided" and row["margin"] == 0.01
    assert (row["n"], row["unit"], row["pairs"], row["mixed_machines"]) == (2, "seed", 2, False)
    same = rows.loc["eval/accuracy_greedy"]  # in all pairs
    assert same["effect"] == 0 and np.isnan(same["low"]) and same["word"] == "not tested"
    assert {*table["contrast"]} == {"nvfp4 - bf16", "exp - none"} and len(table) == 4 * 4
    assert effects(runs[:1]).empty


def test_claims_are_those_of_the_command(runs: list[Run]) -> None:
    every = claims(runs, everything=True)
    assert {*every["number"]} == {*range(1, len(shown_claims()) + 1)} and every["reason"].str.len().gt(0).all()
    assert 0 < len(claims(runs)) < len(every) and claims(runs)["effect"].isna().all()  # of 12 steps
    speed = claims(load_runs(H200))
    found = [
        effect.whole.value
        for group in by_scope(load_runs(H200)).values()
        for result in evaluate_claims(shown_claims(), group)
        for one in result.voting
        if (effect := one.effect)
    ]
    assert found and [*speed["effect"].dropna()] == found and (speed["n"][speed["effect"].notna()] > 0).all()
    assert not claims(runs, papers="literature", everything=True).empty


def test_figures_and_tables_by_name(runs: list[Run]) -> None:
    assert isinstance(figure("reward", runs), Figure)
    table = figure("runs", runs)
    assert not isinstance(table, Figure) and [*table["run"]] == [one.name for one in runs]
    assert figure("runs", runs[2:4]).equals(table.iloc[2:4].reset_index(drop=True))  # of these runs alone
    for wrong in (
        lambda: figure("rewards", runs),
        lambda: figure("reward", runs[:1]),
        lambda: figure("reward", []),
        lambda: figure("reward", runs, style="paper"),
        lambda: claims(runs, papers="no_such"),
    ):
        with pytest.raises(ConfigError):
            wrong()
    assert {name for name, one in FIGURES.items() if one.draw is None} >= {"runs", "step_times"}


def test_finished_runs_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert load_runs(tmp_path / "none", finished=True) == []
    with pytest.raises(ConfigError, match="none"):
        load_runs(tmp_path / "none")
    assert len(load_runs(ASSETS, without=["*-s1-*"])) == 4
    capsys.readouterr()
    assert len(load_runs(ASSETS, finished=True)) == 8 and "left out" not in capsys.readouterr().out


def test_a_run_is_made_read_and_continued(
    tmp_path: Path, programs: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """By an interpreter that has imported everything; test_wheel.py has one that has not."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(sys, "executable", str(programs / "python"))
    words = (*TINY, "quant=nvfp4", f"root={tmp_path}")
    made = run(*words, quiet=True)
    assert made.finished and made.last_step == 2 and made.path.parent == tmp_path / "runs"
    said = capfd.readouterr()
    assert said.out == "" and [line[:8] for line in said.err.splitlines()] == ["step 1/2", "step 2/2"]
    assert run(*words).metrics.equals(made.metrics) and "step 1/2" not in capfd.readouterr().err
    with pytest.raises(ConfigError, match="quant=nvfp4"):
        run(*TINY, "quant=nvfp5", f"root={tmp_path}")
    with pytest.raises(ConfigError, match="-m"):
        run(*TINY, "-m", "seed=0,1")
    assert [one.name for one in (tmp_path / "runs").iterdir() if one.is_dir()] == [made.name]
    with pytest.raises(TrainingStopped, match="reward"):
        own = tmp_path / "mine.py"
        lines = (
            "def reward(completions, **columns):",
            "    return [float('nan') if len(completions) > 3 else 0.0] * len(completions)",
        )
        own.write_text("\n".join(lines))
        run(*TINY, "reward=function", f"reward.file={own}", f"root={tmp_path}")
