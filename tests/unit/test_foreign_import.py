"""`qerl-bench import`: TRL's and verl's own files and tables of others become studies that every command reads.

What would make a verdict wrong and can be seen in the files is planted here: no seeds, other steps, missing questions,
a rerun that wrote into a folder.
"""

from __future__ import annotations

import csv
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from qerl_bench.__main__ import main
from qerl_core.checks import ConfigError
from qerl_core.process.arguments import whole
from qerl_core.process.installation import CONF_DIR
from qerl_core.statistics import mean_ci
from qerl_studies.claims.evaluate import evaluate_claims
from qerl_studies.claims.read import read_claim
from qerl_studies.commands.check import check_study
from qerl_studies.effects.state import WORDS
from qerl_studies.foreign.verdict import Judged, judge, markdown
from qerl_studies.runs.comparable import load_runs
from qerl_studies.runs.reported import ABOUT, COLUMNS, REPORTED, read_rows
from qerl_studies.runs.settings import by_scope
from tests.unpacked import unpack

ROOT = Path(__file__).parents[2]
ASSETS = ROOT / "tests" / "assets" / "foreign"
SEEDS = ROOT / "studies" / "h200" / "data" / "beside_trl_cpu.csv"
NAMED = ["model=SmolLM2", "task=sums"]


@pytest.fixture
def foreign(tmp_path: Path) -> Callable[[str], Path]:
    def unpacked(name: str) -> Path:
        unpack(ASSETS / f"{name}.tar.xz", tmp_path)
        return tmp_path / name

    return unpacked


def imported(*words: str) -> Path:
    """The study that a command with out=DIR makes."""
    assert main(["import", *words]) == 0
    return Path(next(word for word in words if word.startswith("out="))[4:])


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(["import", *words])
    assert end.value.code == 2
    return whole(capsys.readouterr().err)


def by_metric(judged: list[Judged]) -> dict[str, Judged]:
    return {one.metric: one for one in judged}


# --- TRL -------------------------------------------------------------------------------------------------------------


def test_runs_of_trl_get_verdicts_in_pairs(foreign: Callable[[str], Path], tmp_path: Path) -> None:
    runs = foreign("trl")
    study = imported("trl", str(runs), f"out={tmp_path / 'study'}", *NAMED, "accuracy=right_number")
    states = {
        (beta, seed): json.loads((runs / f"beta-{beta}-s{seed}" / "trainer_state.json").read_text())["log_history"]
        for beta in ("0", "0.04")
        for seed in (0, 1)
    }
    last = {key: next(one["reward"] for one in history if one["step"] == 6) for key, history in states.items()}
    expected = mean_ci([last["0.04", seed] - last["0", seed] for seed in (0, 1)])  # a fifth of six steps: the last
    found = by_metric(judge(study))
    assert (found["reward/mean"].first, found["reward/mean"].second) == ("beta-0.04", "beta-0")
    reward = found["reward/mean"].difference
    if expected.stderr > 0:
        assert reward is not None and (reward.value, reward.low) == pytest.approx((expected.value, expected.low))
    assert found["trl/kl"].state.untested == "no run of beta-0 has it"
    assert all(one.state.word in WORDS for one in found.values())
    about = json.loads((study / ABOUT).read_text())
    assert about["arms"] == {"beta-0": {"beta": 0.0}, "beta-0.04": {"beta": 0.04}} and not about["unjudged"]


def test_the_numbers_of_trl_stand_in_the_table_with_their_definitions(
    foreign: Callable[[str], Path], tmp_path: Path
) -> None:
    runs = foreign("trl")
    study = imported("trl", str(runs), f"out={tmp_path / 'study'}", *NAMED, "accuracy=right_number")
    history = json.loads((runs / "beta-0.04-s1" / "trainer_state.json").read_text())["log_history"]
    own = [row for row in read_rows(study / REPORTED) if (row.arm, row.seed) == ("beta-0.04", 1)]
    rows = {(row.step, row.metric): row for row in own}
    entry = next(one for one in history if one["step"] == 6)
    assert rows[6, "reward/mean"].value == entry["reward"] and rows[6, "reward/mean"].n == 16
    assert rows[6, "trl/kl"].value == entry["kl"] and "k3" in rows[6, "trl/kl"].definition
    assert rows[6, "completions/truncated_frac"].value == entry["completions/clipped_ratio"]
    assert rows[6, "accuracy"].value == pytest.approx(entry["reward"]), "the one reward is 1 for a right answer"
    assert rows[6, "trl/entropy"].source == "beta-0.04-s1/trainer_state.json"
    assert {row.metric for row in rows.values()}.isdisjoint({"kl", "entropy"}), "those are ours, defined otherwise"


def test_a_log_of_another_run_than_its_completions_is_said(foreign: Callable[[str], Path], tmp_path: Path) -> None:
    runs = foreign("trl")
    shutil.copy(runs / "beta-0-s1" / "trainer_state.json", runs / "beta-0-s0" / "trainer_state.json")
    histories = [json.loads((runs / name / "trainer_state.json").read_text()) for name in ("beta-0-s0", "beta-0.04-s0")]
    for entry in histories[1]["log_history"]:
        entry["reward"] = entry.get("reward", 0.0) + 0.25
    (runs / "beta-0.04-s0" / "trainer_state.json").write_text(json.dumps(histories[1]))
    study = imported("trl", str(runs), f"out={tmp_path / 'study'}", *NAMED)
    unjudged = json.loads((study / ABOUT).read_text())["unjudged"]
    assert "rerun" in unjudged["beta-0.04-s0"] and "reward" in unjudged["beta-0.04-s0"]
    found = by_metric(judge(study))["reward/mean"]
    assert found.difference is None and "single seed" in found.state.untested and "rerun" in found.state.untested


@pytest.mark.parametrize("last", [True, False])
def test_checkpoints_that_an_earlier_run_left_are_said(
    last: bool, foreign: Callable[[str], Path], tmp_path: Path
) -> None:
    """The rerun ended at step 4 and overwrote the checkpoints up to there; of two runs no log is whole."""
    runs = foreign("trl")
    for name in ("beta-0-s0", "beta-0-s1"):
        state = json.loads((runs / name / "trainer_state.json").read_text())
        for step in (2, 4, 6):
            (runs / name / f"checkpoint-{step}").mkdir()
            part = [one for one in state["log_history"] if one["step"] <= step]
            if name == "beta-0-s0" and step < 6:
                part = [one | {"grad_norm": 0.5} for one in part]
            (runs / name / f"checkpoint-{step}" / "trainer_state.json").write_text(json.dumps({"log_history": part}))
        if not last:
            (runs / name / "trainer_state.json").unlink()
    study = imported("trl", str(runs), f"out={tmp_path / 'study'}", *NAMED)
    unjudged = json.loads((study / ABOUT).read_text())["unjudged"]
    assert "checkpoint-2 has another log" in unjudged["beta-0-s0"] and "checkpoint-6" not in unjudged["beta-0-s0"]
    assert "beta-0-s1" not in unjudged


def test_a_run_that_stopped_early_or_has_later_steps_is_said(foreign: Callable[[str], Path], tmp_path: Path) -> None:
    runs = foreign("trl")
    for name, change in (("beta-0-s0", "max_steps"), ("beta-0-s1", "log_history")):
        file = runs / name / "trainer_state.json"
        state = json.loads(file.read_text())
        state |= {"max_steps": 9} if change == "max_steps" else {
            "log_history": [one for one in state["log_history"] if one["step"] < 4], "max_steps": 3
        }  # fmt: skip
        file.write_text(json.dumps(state))
    study = imported("trl", str(runs), f"out={tmp_path / 'study'}", *NAMED)
    unjudged = json.loads((study / ABOUT).read_text())["unjudged"]
    assert "step 6 of 9" in unjudged["beta-0-s0"] and "log does not have" in unjudged["beta-0-s1"]
    assert all(one.difference is None for one in judge(study))


def test_without_seeds_and_options_nothing_is_compared(foreign: Callable[[str], Path], tmp_path: Path) -> None:
    runs = foreign("trl")
    for place, folder in enumerate(sorted(runs.iterdir())):
        (folder / "training_args.json").unlink()
        folder.rename(runs / f"run {'ab'[place % 2]}{'xy'[place // 2]}")
    study = imported("trl", str(runs), f"out={tmp_path / 'study'}", *NAMED)
    assert all("seed" in reason for reason in json.loads((study / ABOUT).read_text())["unjudged"].values())
    assert not [one for one in judge(study) if one.difference is not None]


def test_an_arm_of_two_settings_is_no_arm(foreign: Callable[[str], Path], tmp_path: Path) -> None:
    runs = foreign("trl")
    file = runs / "beta-0-s1" / "training_args.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"learning_rate": 0.5, "output_dir": "elsewhere"}))
    study = imported("trl", str(runs), f"out={tmp_path / 'study'}", *NAMED)
    unjudged = json.loads((study / ABOUT).read_text())["unjudged"]
    assert {*unjudged} == {"beta-0-s0", "beta-0-s1"} and "learning_rate" in unjudged["beta-0-s0"]
    assert "output_dir" not in unjudged["beta-0-s0"], "a place decides nothing"


def test_one_seed_twice_is_no_pair(foreign: Callable[[str], Path], tmp_path: Path) -> None:
    runs = foreign("trl")
    shutil.copytree(runs / "beta-0-s0", runs / "beta-0-seed0")
    study = imported("trl", str(runs), f"out={tmp_path / 'study'}", *NAMED)
    unjudged = json.loads((study / ABOUT).read_text())["unjudged"]
    assert len(unjudged) == 2 and all("two runs" in reason for reason in unjudged.values())
    assert "single seed" in by_metric(judge(study))["reward/mean"].state.untested


def test_one_arm_alone_is_said_and_not_compared(
    foreign: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    imported("trl", str(foreign("trl") / "beta-0-s0"), f"out={tmp_path / 'study'}", *NAMED)
    assert "nothing to compare with" in capsys.readouterr().out


# --- verl ------------------------------------------------------------------------------------------------------------


def test_runs_of_verl_get_verdicts_with_questions(foreign: Callable[[str], Path], tmp_path: Path) -> None:
    runs = foreign("verl")
    study = imported("verl", str(runs), f"out={tmp_path / 'study'}", *NAMED, "tool=verl 0.9.1")
    found = by_metric(judge(study))
    last = {}
    for arm in ("bf16", "mxfp8"):
        for seed in range(3):
            lines = (runs / f"{arm}-s{seed}.jsonl").read_text().splitlines()
            last[arm, seed] = json.loads(lines[-1])["data"]
    for key, metric in (("rollout_corr/k3_kl", "mismatch/kl"), ("actor/entropy", "verl/actor/entropy")):
        expected = mean_ci([last["mxfp8", seed][key] - last["bf16", seed][key] for seed in range(3)])
        difference = found[metric].difference
        assert difference is not None
        assert (difference.value, difference.low) == pytest.approx((expected.value, expected.low))
    answers = found["eval/accuracy_greedy"].difference
    assert answers is not None and answers.stderr_questions is not None, "drawn, since answers are known by question"
    (run, *_) = load_runs([study])
    assert run.answers("greedy").shape == (8, 1)
    assert "mean over all tokens" in run.environment["metrics"]["verl/actor/entropy"], "as its config says"


def test_what_verl_did_not_write_is_said(foreign: Callable[[str], Path], tmp_path: Path) -> None:
    runs = foreign("verl")
    for file in runs.glob("*.yaml"):
        file.unlink()
    study = imported("verl", str(runs), f"out={tmp_path / 'study'}", *NAMED)
    notes = " ".join(json.loads((study / ABOUT).read_text())["notes"])
    assert "no config" in notes and "answers=greedy" in notes
    (run, *_) = load_runs([study])
    assert "not reported" in run.environment["metrics"]["verl/actor/entropy"] and run.kept_answers is None
    told = imported("verl", str(runs), f"out={tmp_path / 'told'}", *NAMED, "answers=sampled")
    assert load_runs([told])[0].answers("sampled").shape == (8, 1)


def test_questions_that_are_missing_are_said(foreign: Callable[[str], Path], tmp_path: Path) -> None:
    runs = foreign("verl")
    file = runs / "mxfp8-s1" / "validation" / "5.jsonl"
    file.write_text("\n".join(file.read_text().splitlines()[:-2]) + "\n")
    study = imported("verl", str(runs), f"out={tmp_path / 'study'}", *NAMED)
    found = by_metric(judge(study))
    assert "2 of 8 questions" in found["eval/accuracy_greedy"].state.untested
    assert found["reward/mean"].difference is not None, "what does not need them is judged"


def test_a_log_that_goes_back_and_dumps_of_other_steps_are_said(foreign: Callable[[str], Path], tmp_path: Path) -> None:
    runs = foreign("verl")
    log = runs / "bf16-s0.jsonl"
    lines = log.read_text().splitlines()
    log.write_text("\n".join([*lines, lines[1]]) + "\n")
    shutil.copy(runs / "bf16-s1" / "rollout" / "5.jsonl", runs / "bf16-s1" / "rollout" / "7.jsonl")
    study = imported("verl", str(runs), f"out={tmp_path / 'study'}", *NAMED)
    unjudged = json.loads((study / ABOUT).read_text())["unjudged"]
    assert "twice" in unjudged["bf16-s0"] and "rerun" in unjudged["bf16-s1"]


# --- tables ----------------------------------------------------------------------------------------------------------

WIDE = [
    *("model=SmolLM2-135M-Instruct", "task=word_problems", "arm=trainer", "step=24", "control=TRL"),
    *("metric=reward_19_24:late reward:mean reward of steps 19 to 24", "metric=greedy_right:eval/accuracy_greedy"),
    "metric=sampled_right:eval/accuracy_sampled",
]


def test_eight_seeds_of_trl_and_ours_have_the_intervals_of_their_page(tmp_path: Path) -> None:
    """studies/h200/README.md: -0.011 [-0.165, +0.144], +6.7 points [-18.5, +31.9], -3.4 [-17.3, +10.6]."""
    study = imported("csv", str(SEEDS), f"out={tmp_path / 'study'}", *WIDE)
    found = by_metric(judge(study, "TRL"))
    expected = {
        "late reward": (-0.011, -0.165, 0.144),
        "eval/accuracy_greedy": (0.067, -0.185, 0.319),
        "eval/accuracy_sampled": (-0.034, -0.173, 0.106),
    }
    for metric, numbers in expected.items():
        one = found[metric].difference
        assert one is not None and (one.value, one.low, one.high) == pytest.approx(numbers, abs=6e-4)
        assert found[metric].state.word == "not decided"


def test_a_margin_makes_a_small_difference_no_difference(tmp_path: Path) -> None:
    words = [word.replace("late reward:", "late_reward:") for word in WIDE]
    study = imported("csv", str(SEEDS), f"out={tmp_path / 'study'}", *words, "margin=late_reward:0.2")
    page = (study / "verdict.md").read_text()
    assert "no difference beyond the margin" in page and "Margin of late_reward: 0.2." in page
    assert by_metric(judge(study, "TRL", {"late_reward": 0.2}))["late_reward"].state.within
    assert not by_metric(judge(study, "TRL", {"late_reward": 0.16}))["late_reward"].state.within


def table(rows: list[dict[str, object]]) -> str:
    lines = [",".join(COLUMNS)]
    base = dict.fromkeys(COLUMNS, "") | {"study": "s", "model": "m", "task": "t", "definition": "d", "source": "f"}
    lines += [",".join(str((base | row)[key]) for key in COLUMNS) for row in rows]
    return "\n".join(lines) + "\n"


def long_rows(gap: float = 0.1, steps: tuple[int, int] = (4, 4)) -> list[dict[str, object]]:
    return [
        {
            "arm": arm,
            "seed": seed,
            "step": step,
            "metric": "score",
            "value": seed / 10 + gap * place * (1 + seed / 10),
        }
        for place, (arm, last) in enumerate(zip(("a", "b"), steps, strict=True))
        for seed in range(3)
        for step in range(1, last + 1)
    ]


def test_the_table_of_twelve_columns_is_read_and_written_again(tmp_path: Path) -> None:
    (tmp_path / "theirs.csv").write_text(table(long_rows()))
    study = imported("csv", str(tmp_path / "theirs.csv"), f"out={tmp_path / 'study'}")
    again = imported("csv", str(study / REPORTED), f"out={tmp_path / 'again'}")
    assert (again / REPORTED).read_text() == (study / REPORTED).read_text() and len(COLUMNS) == 12
    (found,) = judge(study)
    expected = mean_ci([0.1, 0.11, 0.12])
    assert found.difference is not None and found.difference.low == pytest.approx(expected.low)
    assert found.state.word == "supported", "above 0, where nothing was claimed"


def test_other_steps_in_each_arm_are_said_and_not_judged(tmp_path: Path) -> None:
    (tmp_path / "theirs.csv").write_text(table(long_rows(steps=(4, 5))))
    study = imported("csv", str(tmp_path / "theirs.csv"), f"out={tmp_path / 'study'}")
    (found,) = judge(study)
    assert found.difference is None and "other steps" in found.state.untested and "5 up to 5" in found.state.untested
    assert "other steps" in (study / "verdict.md").read_text()


def test_seeds_without_a_counterpart_and_equal_numbers_decide_nothing(tmp_path: Path) -> None:
    rows = [row | {"seed": int(str(row["seed"])) + 10 * (row["arm"] == "b")} for row in long_rows()]
    (tmp_path / "apart.csv").write_text(table(rows))
    (found,) = judge(imported("csv", str(tmp_path / "apart.csv"), f"out={tmp_path / 'apart'}"))
    assert "no seed that both arms have" in found.state.untested
    (tmp_path / "same.csv").write_text(table(long_rows(gap=0.0)))
    (found,) = judge(imported("csv", str(tmp_path / "same.csv"), f"out={tmp_path / 'same'}"))
    assert "same difference in all pairs" in found.state.untested


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"seed": "x"}, "seed must be a whole number"),
        ({"step": "-1"}, "step"),
        ({"value": "high"}, "value must be a number"),
        ({"question": "q", "value": "0.5"}, "share of its n answers"),
        ({"question": "q", "metric": "eval/accuracy_greedy", "value": "1.5", "n": "2"}, "from 0 to 1"),
        ({"metric": ""}, "metric is empty"),
        ({"n": "0"}, "n must be"),
        ({"model": "x" * 500}, "characters"),
    ],
)
def test_a_wrong_row_is_refused_by_its_line(
    change: dict[str, str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = long_rows()
    rows[2] = rows[2] | change
    (tmp_path / "theirs.csv").write_text(table(rows))
    told = refused(capsys, "csv", str(tmp_path / "theirs.csv"), f"out={tmp_path / 'study'}")
    assert said in told and "line 4" in told and not (tmp_path / "study").exists()


def test_words_that_are_missing_or_wrong_are_refused_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], foreign: Callable[[str], Path]
) -> None:
    runs, out = foreign("trl"), f"out={tmp_path / 'study'}"
    assert "model=NAME" in refused(capsys, "trl", str(runs), out, "task=sums")
    assert "is not there" in refused(capsys, "trl", str(tmp_path / "none"), out, *NAMED)
    assert "no run of verl" in refused(capsys, "verl", str(runs), out, *NAMED)
    assert "control=x" in refused(capsys, "trl", str(runs), out, *NAMED, "control=x")
    assert "METRIC:SIZE" in refused(capsys, "trl", str(runs), out, *NAMED, "margin=reward")
    assert "there are reward/mean" in refused(capsys, "trl", str(runs), out, *NAMED, "margin=rewrd/mean:0.02")
    assert "right" in refused(capsys, "trl", str(runs), out, *NAMED, "accuracy=none")
    assert "twelve columns" in refused(capsys, "csv", str(SEEDS), out, *NAMED)
    assert "no column" in refused(capsys, "csv", str(SEEDS), out, *NAMED, "step=1", "metric=x:y:z")
    assert "say what it is" in refused(capsys, "csv", str(SEEDS), out, *WIDE[:-1], "metric=sampled_right:mine")
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / "mine.txt").write_text("mine")
    assert "is there already" in refused(capsys, "trl", str(runs), out, *NAMED)
    assert [*(tmp_path / "study").iterdir()] == [tmp_path / "study" / "mine.txt"]


# --- other commands --------------------------------------------------------------------------------------------------


@pytest.fixture
def reported(tmp_path: Path) -> Path:
    (tmp_path / "theirs.csv").write_text(
        table([row | {"metric": "reward/mean", "definition": "mean reward"} for row in long_rows()])
    )
    return imported("csv", str(tmp_path / "theirs.csv"), f"out={tmp_path / 'study'}")


def test_reports_comparisons_and_checks_read_them_marked(
    reported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = ROOT / "tests" / "assets" / "runs"
    assert [*by_scope(load_runs([reported, own]))] == ["m on t, reported", *by_scope(load_runs([own]))]
    assert main(["report", str(reported), str(own), f"out={tmp_path / 'pages'}"]) == 0
    texts = [file.read_text() for file in tmp_path.glob("pages/**/index.html")]
    (page,) = [text for text in texts if "m on t" in text]
    assert "m on t, reported" in page and "not reported" in page
    capsys.readouterr()
    assert main(["compare", str(reported / "b-*"), str(reported / "a-*")]) == 0
    said = capsys.readouterr().out
    assert said.count("3 runs, reported") == 2 and "[+0.08516, +0.1348]" in said
    assert "reported" in check_study(reported)
    with pytest.raises(SystemExit):
        main(["collect", str(reported), f"out={tmp_path / 'collected'}"])
    assert "made by others" in whole(capsys.readouterr().err)


def claim(folder: Path, defaults: str) -> Path:
    (folder / "claim").mkdir(parents=True)
    (folder / "claim" / "theirs.yaml").write_text(
        f"defaults: [{defaults}]\nfamily: theirs\nnumber: 1\npaper: p\naddress: a\ntitle: b is higher\n"
        "statement: s\nreported: r\nsource: s\nexpected: more\nmeasure: late_reward\nmargin: 0.02\n"
        "contrasts:\n  b - a:\n    factor: [arm.]\n    arms: {b: {arm.name: b}, a: {arm.name: a}}\n"
        "gates: []\ncommand: steps=1\nat_scale: steps=1\n"
    )
    return folder


def test_a_claim_counts_them_only_where_it_asks(reported: Path, tmp_path: Path) -> None:
    runs = load_runs([reported])
    asked = read_claim([CONF_DIR, claim(tmp_path / "asked", "shared/learning, shared/reported")], "theirs")
    (result,) = evaluate_claims([asked], runs)
    assert result.verdict == "supported" and result.contrasts[0].effect is not None
    assert result.contrasts[0].effect.whole.low == pytest.approx(mean_ci([0.1, 0.11, 0.12]).low)
    silent = read_claim([CONF_DIR, claim(tmp_path / "silent", "shared/learning")], "theirs")
    (result,) = evaluate_claims([silent], runs)
    assert result.verdict == "incomplete"


def test_a_study_that_was_edited_is_refused(reported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (reported / REPORTED).open() as file:
        rows = [*csv.DictReader(file)]
    pd.DataFrame([*rows, rows[0]]).to_csv(reported / REPORTED, index=False)
    with pytest.raises(ConfigError, match="two rows"):
        load_runs([reported])
    (reported / ABOUT).write_text("[]")
    with pytest.raises(ConfigError, match=ABOUT):
        load_runs([reported])


def test_a_page_shows_names_and_nothing_else(reported: Path) -> None:
    assert markdown(reported, judge(reported)).count("# ") >= 3


def test_the_page_is_enough_for_the_three_kinds_of_files(
    foreign: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its commands as printed, in a folder that has what the page says and nothing else."""
    page = (ROOT / "docs" / "how-to" / "import.md").read_text()
    (claim_command,) = re.findall(r"(?m)^    qerl-bench (register .*)$", page)
    lines = re.findall(r"(?m)^    qerl-bench (import .*)$", page)
    assert [line.split()[1] for line in lines] == ["trl", "verl", "csv"]
    arms = {"beta-0-": "bf16-", "beta-0.04-": "fp8-"}
    for line in lines:
        place = tmp_path / f"for-{line.split()[1]}"
        place.mkdir()
        monkeypatch.chdir(place)
        if "csv" in line:
            rows = [
                f"{arm},{seed},{0.5 + 0.1 * k + 0.01 * seed * k}" for k, arm in enumerate("ab") for seed in range(3)
            ]
            Path("numbers.csv").write_text("\n".join(["format,seed,greedy", *rows]) + "\n")
        else:
            foreign(line.split()[1]).rename("my-runs")
        for run in [*Path("my-runs").glob("beta-*")]:
            old = next(old for old in reversed(arms) if run.name.startswith(old))
            run.rename(run.with_name(run.name.replace(old, arms[old])))
        if "trl" in line:
            own = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/how-to/own-claim.md").read_text(), flags=re.DOTALL)[0]
            Path("mine/claim").mkdir(parents=True)
            Path("mine/claim/first_entropy.yaml").write_text(own)
            assert main(claim_command.split()) == 0
        assert main(line.split()) == 0 and main(["check", "my-study"]) == 0
        verdict = Path("my-study/verdict.md").read_text()
        assert "| eval/accuracy_greedy |" in verdict or "| reward/mean |" in verdict
        assert ("registered on" in verdict) == ("trl" in line)
    for word in ("higher", "lower", *(word for word in WORDS if word not in ("supported", "opposite"))):
        assert f"*{word}*" in page, "each word of a verdict is explained"


CONTROLS = {"trl-eight-seeds": "TRL", "verl-7519-gsm8k": "bf16", "verl-7519-dapo": "bf16"}
MARGINS = {"early reward": 0.02, "late reward": 0.02}


def test_pages_of_committed_reports_follow_from_their_numbers() -> None:
    folder = ROOT / "studies" / "reported"
    assert {file.parent.name for file in folder.glob("*/reported.csv")} == {*CONTROLS}
    for name, control in CONTROLS.items():
        judged = judge(folder / name, control, MARGINS)
        assert markdown(folder / name, judged) == (folder / name / "verdict.md").read_text(), name
        decided = {one.metric for one in judged if one.difference is not None}
        assert bool(decided) == (name == "trl-eight-seeds"), "one run an arm decides nothing"
