"""What earlier versions have stored stays readable: today's code reads, continues, evaluates again and exports it.

tests/assets/stored/README.md says what lies there, and how it was made. No number here was computed by today's code.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from qerl_bench.__main__ import main
from qerl_bench.config import compose
from tests.parallel import ranks

STORED = Path(__file__).resolve().parents[1] / "assets" / "stored" / "3f726285"
RUNS, STUDY, OWN = STORED / "runs", STORED / "study", STORED / "own"
MADE_IN = "/tmp/stored/killed"  # the folder of its command, in which mine/ was
WRITTEN = "0ec04964e45ac527c0e186818695405c45efff7fa721aba831cecd8a22e3fb67"  # SHA-256 of all files
BF16, NVFP4, NF4, MXFP4 = (
    f"tiny_untrained-{name}"
    for name in (
        "bf16-none-grpo-r2-s0-753258ad",
        "nvfp4-none-grpo-r2-s0-c6b24d99",
        "nf4-none-grpo-r2-s0-3821fcf1",
        "mxfp4-none-grpo-r2-s0-9802f8e8",
    )
)
EXP, EXP_RANK_4, DAPO, SFT, HALVING = (
    f"tiny_untrained-{name}"
    for name in (
        "nvfp4-exp-grpo-r2-s0-1ae1ffa9",
        "nvfp4-exp-grpo-r4-s0-1571605c",
        "nvfp4-exp-dapo-r2-s0-ca1e798c",
        "bf16-none-sft-r2-s0-46859ace",
        "nvfp4-halving-grpo-r2-s0-f23e9043",
    )
)
LAST = {  # of each run: SHOWN, at its last step
    BF16: (0.3293155, 5.218077, 0.1808047, 0.4375, 0.3125),
    NVFP4: (0.3110119, 5.223810, 0.1809413, 0.2500, 0.1875),
    NF4: (0.3621652, 5.224523, 0.1642657, 0.0625, -0.125),
    MXFP4: (0.3258929, 5.216900, 0.1360286, 0.2500, 0.0),
    EXP: (0.3453125, 5.226535, 0.1399757, 0.1875, 0.125),
    EXP_RANK_4: (0.3342634, 5.231795, 0.2130558, 0.0625, 0.0),
    DAPO: (0.2825378, 5.225450, 0.2587574, 0.3750, 0.3125),
    SFT: (None, None, 0.5237830, 0.0, 0.0),
}
SHOWN = ("reward/mean", "entropy", "grad_norm", "eval/accuracy_sampled", "eval/gain_sampled")
# What a step computes, other than its times and what is nothing but rounding (mismatch/kernel_*, a loss of zero).
COMPUTED = re.compile(
    r"reward/|accuracy|entropy|completions/|dynamic/|aqn/(?!dose)|rollout/lag|lr|grad_norm|mismatch/noise_|clip_ratio/"
)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands begin in an empty folder, where they write what all runs share."""
    monkeypatch.chdir(tmp_path)


def printed(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    """What a command that ends well has printed."""
    capsys.readouterr()
    assert main([*map(str, words)]) == 0
    return capsys.readouterr().out


def rows_of(said: str) -> dict[str, list[str]]:
    """The cells of printed tables, by the first one of a row; of two rows the first."""
    rows = [line.split() for line in said.splitlines() if line and " at step " not in line]
    return {first: cells for first, *cells in reversed(rows)}


def numbers(run: Path, kind: str = "train") -> dict[int, dict[str, Any]]:
    """The records of one kind, by step."""
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {record["step"]: record for record in records if record["kind"] == kind}


def words_of(run: Path, **elsewhere: str) -> list[str]:
    """The words of its command, as env.json has them, with other folders in place of these."""
    words = json.loads((run / "env.json").read_text())["argv"][1:]
    for place, other in elsewhere.items():
        words = [word.replace(place, other) for word in words]
    return words


# --- reading ---------------------------------------------------------------------------------------------------------


def test_the_files_are_those_that_were_stored() -> None:
    """They are never edited nor made anew: what a later version stores otherwise gets a folder beside them."""
    state = hashlib.sha256()
    for file in sorted(path for path in STORED.rglob("*") if path.is_file() and "__pycache__" not in path.parts):
        state.update(f"{file.relative_to(STORED)}\0".encode() + file.read_bytes())
    assert state.hexdigest() == WRITTEN


def test_status_knows_what_became_of_each_run(capsys: pytest.CaptureFixture[str]) -> None:
    places = [STORED / name for name in ("runs", "own/runs", "stopped/runs", "killed/runs")]
    found = json.loads(printed(capsys, "status", *places, "--json"))
    told = {
        str(Path(one["run"]).relative_to(STORED)): (one["state"], one["step"], one["steps"], one["note"])
        for one in found
    }
    assert told == {f"runs/{name}": ("done", 8, 8, "") if name == DAPO else ("done", 4, 4, "") for name in LAST} | {
        f"own/runs/{HALVING}": ("done", 8, 8, ""),
        f"stopped/runs/{DAPO}": ("unfinished", 4, 8, "stopped by SIGTERM"),
        f"killed/runs/{HALVING}": ("unfinished", 5, 8, ""),
    }


def test_collected_numbers_are_those_of_the_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By `qerl-bench collect`, from the runs and from their study: all of its metrics, and the answers."""
    printed(capsys, "collect", RUNS, "out=study", "metrics=all")
    table = pd.read_parquet("study/tidy.parquet").sort_values("step", kind="stable")
    last = table[table["kind"].isin(["train", "eval"])].groupby(["run", "metric"], observed=True)["value"].last()
    for name, expected in LAST.items():
        found = [last.get((name, metric)) for metric in SHOWN]
        assert found == [pytest.approx(value, rel=1e-5) if value is not None else None for value in expected], name
    answers = pd.read_parquet("study/answers.parquet")
    assert len(answers) and {*answers["run"]} == {*LAST}


@pytest.mark.parametrize("run", [*LAST, HALVING])
def test_a_command_has_the_name_that_it_had(run: str) -> None:
    """So that it continues its run, or finds it finished; a new option has its earlier value in ADDED_LATER."""
    folder = (OWN / "runs" if run == HALVING else RUNS) / run
    config = compose(words_of(folder, **{"/tmp/stored/own": str(OWN)}))
    assert config.name == run


def test_a_report_has_all_runs_and_their_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "1 study, 8 runs, 7 pages of samples" in printed(capsys, "report", RUNS, "out=report")
    page = Path("report/index.html").read_text()
    assert all(name in page for name in LAST)
    assert {file.stem for file in Path("report/samples").iterdir()} == {*LAST} - {SFT}


def test_two_runs_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    said = printed(capsys, "compare", RUNS / BF16, RUNS / NVFP4)
    rows = rows_of(said)
    assert rows["quant.name"] == ["bf16", "nvfp4"]
    assert rows["eval/accuracy_sampled"][:3] == ["0.4375", "0.25", "+0.1875"]
    assert rows["reward/mean"][:2] == ["0.3293", "0.311"] and rows["entropy"][:2] == ["5.218", "5.224"]


def test_a_study_gives_the_verdicts_that_it_gave(capsys: pytest.CaptureFixture[str]) -> None:
    """Words and effects; intervals are a matter of the statistics."""
    printed(capsys, "claims", STUDY, "out=claims")
    page = Path("claims/claims.md").read_text()
    assert re.search(
        r"2\. Faster reward growth than 16-bit LoRA: \*\*undecided\*\* \(not decided\) \| nvfp4 - bf16 \| -0\.0043 ",
        page,
    )
    assert re.search(
        r"3\. Higher final accuracy than 16-bit LoRA: \*\*undecided\*\* \(not decided\) \| nvfp4 - bf16 \| -9\.38 ",
        page,
    )
    assert re.search(
        r"4\. AQN adds to it: \*\*not testable here\*\* \(not tested\) \| exp - none \| \+0\.00 .*\| \+21\.88 ", page
    )
    assert "1 study, 12 runs" in printed(capsys, "report", STUDY, "out=report")


def test_two_runs_of_a_study_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    """Which are nothing but rows of its tables."""
    names = ("bf16-none-grpo-r32-s0-2b6c9ed7", "nvfp4-none-grpo-r32-s0-916e2571")
    places = [STUDY / "data" / "2026-11-28" / f"tiny_untrained-{name}" for name in names]
    rows = rows_of(printed(capsys, "compare", *places))
    assert rows["quant.name"] == ["bf16", "nvfp4"]
    assert rows["eval/accuracy_sampled"][:3] == ["0.875", "0.625", "+0.25"]
    assert rows["reward/mean"][:2] == ["0.4222", "0.4693"]


# --- going on --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("place", "run", "whole", "kept"), [
    ("stopped", DAPO, RUNS, 4),
    ("killed", HALVING, OWN / "runs", 3),
])  # fmt: skip
def test_an_unfinished_run_goes_on_to_the_end_of_one_that_was_not_stopped(
    place: str, run: str, whole: Path, kept: int, tmp_path: Path
) -> None:
    """By its own command. Differences are those of rounding, on other processors and by other versions of PyTorch."""
    shutil.copytree(STORED / place / "runs", tmp_path / "runs")
    shutil.copytree(OWN / "mine", tmp_path / "mine")
    ended = ranks.run(words_of(tmp_path / "runs" / run, **{MADE_IN: str(tmp_path)}), 1, tmp_path / "said")
    assert ended.codes == [0] and f"continuing after step {kept}" in ended.said, ended.said
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [run]
    assert (tmp_path / "runs" / run / "done.json").is_file()
    found, expected = numbers(tmp_path / "runs" / run), numbers(whole / run)
    assert [*found] == [*expected] == [*range(1, 9)]
    for step, record in expected.items():
        computed = {name: value for name, value in record.items() if COMPUTED.match(name)}
        assert len(computed) > 20
        assert {name: found[step].get(name) for name in computed} == pytest.approx(computed, rel=1e-3, abs=1e-6), step
    (ours, theirs) = (numbers(folder / run, "eval")[8] for folder in (tmp_path / "runs", whole))
    assert ours["eval/accuracy_sampled"] == theirs["eval/accuracy_sampled"]


@pytest.mark.parametrize("run", [EXP, NF4, MXFP4])
def test_a_finished_run_is_evaluated_again_with_the_same_answers(
    run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    printed(capsys, "eval", RUNS / run, "eval.samples=2", "out=again")
    tables = [pd.read_parquet(folder / "samples.parquet") for folder in (RUNS / run, Path("again"))]
    assert len(tables[0]) == 48 and [*tables[0]["completion"]] == [*tables[1]["completion"]]
    scores = [json.loads((folder / "eval.json").read_text()) for folder in (RUNS / run, Path("again"))]
    ours, theirs = ({(one["step"], one["metric"]): one["value"] for one in entries} for entries in scores)
    assert ours == {key: theirs[key] for key in ours}


IDS = torch.tensor([[3, 200, 17, 44, 101, 7]])
LOGITS = [-0.189275, -1.891803, 2.044070, 0.702892, 0.529451, -1.147578]  # behind IDS, of the first tokens


def test_a_finished_run_is_exported_with_its_adapter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "step_000004, in float32" in printed(capsys, "export", RUNS / EXP_RANK_4, "out=whole")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    with torch.no_grad():
        found = model(input_ids=IDS).logits[0, -1, : len(LOGITS)].tolist()
    assert found == pytest.approx(LOGITS, abs=1e-4)


def test_a_finished_run_is_exported_in_its_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed(capsys, "export", RUNS / MXFP4, "quant=mxfp4", "out=packed")
    packing = json.loads(Path("packed/config.json").read_text())["quantization_config"]
    assert packing["format"] == "mxfp4-pack-quantized"
    with safe_open("packed/model.safetensors", "pt") as file:
        assert sum(name.endswith("weight_packed") for name in file.keys()) == 7  # noqa: SIM118


# --- options of one's own --------------------------------------------------------------------------------------------


def test_a_run_with_an_own_option_is_read_without_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "1 study, 1 runs, 1 pages of samples" in printed(capsys, "report", OWN / "runs", "out=report")
    assert HALVING in Path("report/index.html").read_text()
    said = printed(capsys, "compare", OWN / "runs" / HALVING, RUNS / NVFP4)
    rows = rows_of(said)
    assert rows["aqn.name"] == ["halving", "none"] and rows["aqn/sigma"][:2] == ["0.0025", "0"]
    assert rows["eval/accuracy_sampled"][:3] == ["0.125", "0.25", "-0.125"]


def test_a_run_with_an_own_option_is_evaluated_with_its_folder(capsys: pytest.CaptureFixture[str]) -> None:
    printed(capsys, "eval", OWN / "runs" / HALVING, "eval.samples=2", "out=again", "--config-dir", OWN / "mine")
    tables = [pd.read_parquet(folder / "samples.parquet") for folder in (OWN / "runs" / HALVING, Path("again"))]
    assert [*tables[0]["completion"]] == [*tables[1]["completion"]]


@pytest.mark.parametrize("words", [(), ("quant=nvfp4", "questions=4")], ids=["merged", "in few bits"])
def test_a_run_with_an_own_option_is_exported_with_its_folder(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    run = OWN / "runs" / HALVING
    with pytest.raises(SystemExit):
        main(["export", str(run), *words, "out=refused"])
    assert "aqn._target_=halving.Halving" in (said := capsys.readouterr().err) and "--config-dir" in said
    printed(capsys, "export", run, *words, "out=exported", "--config-dir", OWN / "mine")
    assert [*Path("exported").glob("*.safetensors")]
