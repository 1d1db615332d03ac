"""`qerl-bench study init=FOLDER`: the design reads, its seeds fit the budget, its power is that of Student's t."""

from __future__ import annotations

import math
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from qerl_bench.commands.study import main
from qerl_bench.conduct.draft import MOST_SEEDS, Budget
from qerl_core.checks import ConfigError
from qerl_core.options import user_options
from qerl_core.options.suggestions import unknown_option
from qerl_core.options.user_options import search_path
from qerl_studies.commands.plan import Spread, seeds_of_one_base
from qerl_studies.design.design import read_design

CONF = Path(__file__).parents[2] / "conf"
ASSETS = Path(__file__).parents[1] / "assets" / "runs"
QUESTION = ("model=tiny_untrained", "task=even_characters", "contrast=aqn=none,exp", "experiment=smoke")
COST = ("minutes=10", "run_minutes=0.5")


def drafted(folder: Path, *words: str) -> None:
    main([f"init={folder}", *words])


def budget(**changes: float) -> Budget:
    values: dict[str, Any] = {"minutes": 100, "run_minutes": 2, "slots": 1, "models": 1, "arms": 2, "margin": 1}
    return Budget(**values | {"sd": 2, "formats": 1, "answers": 10**9, "dosed": 0} | changes)


def fitting(one: Budget, left: float) -> int:
    """Seeds that fit into the minutes that are left, of which three quarters of one are kept for the end."""
    rounds = int((left - 0.75) / one.run_minutes)
    return min(MOST_SEEDS, rounds * one.slots // (one.arms * one.models))


def test_a_design_is_read_as_it_was_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drafted(tmp_path / "q", *QUESTION, *COST)
    design = read_design(tmp_path / "q" / "study.yaml")
    assert {arm.name: arm.words for arm in design.arms} == {"none": ["aqn=none"], "exp": ["aqn=exp"]}
    assert design.common == ["task=even_characters", "experiment=smoke"] and design.seeds == tuple(range(8))
    assert [unit.words for unit in design.units.values()] == [("model=tiny_untrained",)]
    protocol = (tmp_path / "q" / "protocol.md").read_text()
    assert f"{tmp_path}/q/study.yaml minutes=10" in protocol and "| 8 (this study) |" in protocol
    assert "2 arms x 8 seeds" in capsys.readouterr().out


def test_places_of_models_and_words_with_dots_are_taken(tmp_path: Path) -> None:
    words = ("model=ORG/A,tiny", "contrast=optim.lr=1e-5,3e-5,1e-4", "task.max_completion_tokens=64", "minutes=60")
    drafted(tmp_path / "q", *words, "run_minutes=1")
    design = read_design(tmp_path / "q" / "study.yaml")
    assert [unit.words for unit in design.units.values()] == [("model=hub", "model.id=ORG/A"), ("model=tiny",)]
    assert len(design.seeds) == 9 and [arm.name for arm in design.arms] == ["1e-5", "3e-5", "1e-4"]


def test_time_and_spread_come_from_finished_runs(tmp_path: Path) -> None:
    size = ("steps=10", "rollout.prompts_per_step=4", "rollout.group_size=4", "task.max_completion_tokens=48")
    drafted(tmp_path / "q", "model=tiny", "contrast=quant=bf16,nvfp4", "minutes=600", f"runs={ASSETS}", *size)
    (sd,) = re.findall(
        r"standard deviation of (\S+) points\s+over seeds, as in the runs", (tmp_path / "q" / "protocol.md").read_text()
    )
    assert float(sd) == pytest.approx(18, abs=1)  # of two seeds with four questions


def test_runs_of_another_size_tell_no_time(tmp_path: Path) -> None:
    """A newcomer's two steps of 32 tokens promised 128 runs of 150 steps."""
    words = ("model=tiny", "contrast=quant=bf16,nvfp4", "minutes=600", f"runs={ASSETS}", "rollout.prompts_per_step=4")
    words += ("rollout.group_size=4", "task.max_completion_tokens=48", "steps=150")
    with pytest.raises(ConfigError, match=r"\(steps=10 there, steps=150 here\).*run_minutes=MINUTES"):
        drafted(tmp_path / "q", *words)
    drafted(tmp_path / "q", *words, "run_minutes=3")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((*QUESTION, "minutes=10"), "run_minutes=6, or runs=FOLDER"),
        ((*QUESTION, "minutes=1", "run_minutes=1"), "minutes=1 .* 0 seeds of 2 arms"),
        ((*QUESTION[:2], "contrast=aqn", *COST), "contrast=aqn must be KEY=FIRST,OTHER"),
        ((*QUESTION[:2], "contrast=aqn=none", *COST), "contrast=aqn=none must be"),
        ((*QUESTION[:2], "contrast=aqn=none,exq", *COST), "aqn=exp"),
        ((*QUESTION, *COST, "optm.lr=1"), "optim.lr"),
        ((*QUESTION, *COST, "sd=0"), "sd must be a number above 0"),
        (("model=tiny", "contrast=task=gsm8k,dag", *COST), "differ in model or task"),
        (("model=tiny", "task=dag", "contrast=optim.lr=1e-4,0.0001", *COST), "1e-4 and 0.0001 .* the same numbers"),
        ((*QUESTION, *COST, "seed=3"), "seed=3, which the study sets"),
    ],
)  # fmt: skip
def test_what_is_no_question_is_refused_and_nothing_is_written(
    words: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        drafted(tmp_path / "q", *words)
    assert not (tmp_path / "q").exists()


def test_what_is_there_is_kept(tmp_path: Path) -> None:
    drafted(tmp_path / "q", *QUESTION, *COST)
    (tmp_path / "q" / "study.yaml").write_text("mine")
    with pytest.raises(ConfigError, match="already"):
        drafted(tmp_path / "q", *QUESTION, *COST)
    assert (tmp_path / "q" / "study.yaml").read_text() == "mine"


def test_seeds_fill_the_time() -> None:
    """But for the probe, of which an answer costs nearly nothing here."""
    assert budget(minutes=101).seeds == 25 and budget(slots=2, arms=4, minutes=101).seeds == 25
    assert budget(models=5, minutes=101).seeds == 5 and budget(minutes=1e6).seeds == MOST_SEEDS


@pytest.mark.parametrize(
    ("changes", "questions"),
    [
        ({}, 50),  # 10 minutes of an answer in 2/160 minutes, 16 answers each
        ({"minutes": 200}, 100),
        ({"minutes": 200, "formats": 2}, 50),
        ({"minutes": 200, "models": 2}, 50),
        ({"minutes": 200, "models": 2, "slots": 2}, 100),
        ({"run_minutes": 4}, 25),
        ({"minutes": 20}, 16),  # the least
        ({"minutes": 1e5}, 512),  # the most
    ],
)
def test_the_probe_asks_what_a_tenth_of_the_minutes_buys(changes: dict[str, float], questions: int) -> None:
    one = budget(**{"answers": 160} | changes)
    assert one.questions == questions
    spent = one.questions * one.question_minutes
    assert questions in (16, 512) or spent == pytest.approx(one.minutes / 10)
    assert one.seeds == fitting(one, one.minutes - spent)


def test_runs_come_in_rounds_of_the_slots() -> None:
    """Eight runs of 40 minutes, six at a time, take 80 minutes and not 53; the end of a session takes 45 seconds."""
    assert budget(minutes=60, run_minutes=40, slots=6).seeds == 3
    assert budget(minutes=81, run_minutes=40, slots=6).seeds == 6
    assert budget(minutes=80, run_minutes=40, slots=6).seeds == 3
    bought = budget(minutes=100, run_minutes=40, slots=6, arms=5).bought()
    assert bought.endswith("10 runs of 40 min, 6 at a time, 80 min")


def test_a_draft_says_what_its_probe_costs_and_tells(tmp_path: Path) -> None:
    for minutes, questions in ((5, 26), (10, 52)):  # a run has 6 x 4 x 16 answers in training and 2 x 8 x 2 beside
        drafted(tmp_path / str(minutes), *QUESTION, f"minutes={minutes}", "run_minutes=0.5")
        probe = read_design(tmp_path / str(minutes) / "study.yaml").probe
        assert (probe.questions, probe.samples) == (questions, 16) and int(minutes * 0.1 / 0.5 * 416 / 16) == questions
        protocol = (tmp_path / str(minutes) / "protocol.md").read_text()
        assert f"{questions} questions, 16 answers" in protocol
        assert (
            f"{questions * 16 * 0.5 / 416:.2g} minutes" in protocol and f"{50 / questions**0.5:.1f} points" in protocol
        )


@pytest.mark.parametrize(
    ("changes", "draws"),
    [({}, 4), ({"minutes": 200}, 8), ({"minutes": 25}, 1), ({"models": 2}, 2), ({"models": 2, "slots": 2}, 4)],
)  # 2.5 minutes each: 10 x 32 prompts x 8 answers of 2/2048 minutes
def test_the_dose_has_the_draws_that_another_tenth_buys(changes: dict[str, float], draws: int) -> None:
    one = budget(**{"answers": 2048, "dosed": 8} | changes)
    assert one.draws == draws and one.draw_minutes == pytest.approx(2.5 * -(-one.models // one.slots))
    left = one.minutes - one.questions * one.question_minutes - draws * one.draw_minutes
    assert one.seeds == fitting(one, left)


def test_a_budget_fits_with_its_dose_or_is_refused() -> None:
    """Of 12.49 minutes: 79 questions x 16 answers are 1.23, one draw is 2.5, two seeds of two arms 8, the end 0.75."""
    values = {"answers": 2048, "dosed": 8}
    assert budget(minutes=12.49, **values).seeds == 2
    with pytest.raises(ConfigError, match=r"minutes=12\.48 .* 1 draws of the dose and 1 seeds"):
        budget(minutes=12.48, **values)
    assert budget(minutes=12.48, answers=2048).seeds == 2


def test_only_a_draft_with_matched_noise_pays_for_a_dose(tmp_path: Path) -> None:
    words = ("model=tiny_untrained", "task=even_characters", "experiment=smoke", "minutes=60", "run_minutes=0.5")
    for name in ("exp", "matched"):
        drafted(tmp_path / name, *words, f"contrast=aqn=none,{name}")
    exp, matched = (read_design(tmp_path / name / "study.yaml") for name in ("exp", "matched"))
    price = 0.5 / 416 * 16 * 32 * 10  # of a draw, minutes, of a run of 416 answers in groups of 16
    assert (exp.dose.draws, matched.dose.draws) == (8, 1) and 60 * 0.1 / price < 2
    assert (len(exp.seeds), len(matched.seeds)) == (53, math.floor((53.25 - price) / 0.5 / 2))
    assert f"{price:.2g} minutes" in (tmp_path / "matched" / "protocol.md").read_text()


def test_power_is_that_of_the_paired_t_test() -> None:
    one, rng = budget(sd=2.5), np.random.default_rng(0)
    found = stats.ttest_1samp(rng.normal(1.0, 2.5, (20_000, one.seeds)), 0.0, axis=1).pvalue
    assert one.power(one.seeds) == pytest.approx(np.mean(found < 0.05), abs=0.012)
    assert budget(margin=one.detectable(25), sd=2.5).power(25) == pytest.approx(0.8, abs=1e-3)
    assert one.needed is not None and one.power(one.needed) >= 0.8 > one.power(one.needed - 1)
    assert budget(arms=3).power(25) < budget().power(25)


def test_a_plan_says_how_many_seeds_one_base_needs() -> None:
    spread = Spread(within=4.0, between=9.0, questions=0.0)  # bases do not matter to a verdict about one
    seeds = seeds_of_one_base(spread, 1.0, 0.025, 0.8)
    assert seeds == budget(sd=2).needed
    assert seeds_of_one_base(Spread(4.0, 0.0, 1.0), 1.0, 0.025, 0.8) is None  # the questions alone are too few


def test_units_of_a_gguf_file_are_copies_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("gguf")
    from tests.models.gguf_files import model_of, write

    file = write(tmp_path / "m.gguf", model_of("llama"))
    words = (f"model={file}", "task=arithmetic", "contrast=quant=bf16,nvfp4", "minutes=60", "run_minutes=1")
    drafted(tmp_path / "q", *words)
    design = read_design(tmp_path / "q" / "study.yaml")
    copies = len(design.units)
    assert [unit.words for unit in design.units.values()] == [(f"model.dither={n}",) for n in range(1, copies + 1)]
    assert design.common[:2] == ["model=hub", f"model.id={file}"] and len(design.seeds) == 1 < copies
    assert f"2 arms x {copies} copies" in capsys.readouterr().out
    protocol = (tmp_path / "q" / "protocol.md").read_text()
    assert f"{copies} copies of one GGUF file" in protocol and "in pairs of one copy" in protocol
    drafted(tmp_path / "seeds", *words, "as_is=true")
    as_is = read_design(tmp_path / "seeds" / "study.yaml")
    assert len(as_is.units) == 1 and len(as_is.seeds) >= copies  # one probe in the place of one a copy


def test_each_copy_has_its_own_probe_in_the_budget() -> None:
    whole = budget(minutes=100, run_minutes=2, slots=2, answers=2000, copies=True)
    spent = whole.probe_minutes + whole.runs * whole.run_minutes / whole.slots
    assert spent <= whole.minutes and whole.probed_models == whole.seeds
    assert f"{whole.runs} runs" in whole.bought() and f"{whole.probe_minutes:.3g} min" in whole.bought()
    assert whole.questions < budget(minutes=100, run_minutes=2, slots=2, answers=2000).questions


def test_what_the_minutes_buy_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drafted(tmp_path / "q", *QUESTION, *COST)
    assert re.search(
        r"10 minutes buy a probe of \d+ questions, .* min; 16 runs of 0.5 min, 1 at a time, 8 min",
        capsys.readouterr().out,
    )


def test_the_command_names_the_folder_of_own_options(tmp_path: Path) -> None:
    own = tmp_path / "my own" / "task"
    own.mkdir(parents=True)
    (own / "plus.yaml").write_text(
        (CONF / "task/even_characters.yaml").read_text().replace("name: even", "name: plus_even")
    )
    (own / "plus.yaml").rename(own / "plus_even_characters.yaml")
    folder, place = shlex.quote(str(own.parent)), tmp_path / "q r"
    words = [*search_path([own.parent]), f"init={place}", "model=tiny_untrained", "task=plus_even_characters"]
    user_options.use([own.parent])
    main([*words, "experiment=smoke", "contrast=aqn=none,exp", *COST])
    assert f"study --config-dir {folder} {shlex.quote(str(place))}/study.yaml" in (place / "protocol.md").read_text()
    assert "--config-dir DIR" in unknown_option("aqn", "mine", [CONF])
    assert "--config-dir DIR" not in unknown_option("aqn", "mine", [CONF, own.parent])
