"""`qerl-bench estimate`: what it counts is what runs have, its error is that of its page, and what it leaves open."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from omegaconf import OmegaConf

from qerl_bench.commands import estimate as command
from qerl_bench.commands.run import run_experiment
from qerl_bench.config import build
from qerl_bench.estimate import point, words
from qerl_bench.estimate import sizes as of_models
from qerl_bench.estimate.cards import CARDS, card_of
from qerl_bench.estimate.estimate import RunEstimate, checkpoint_bytes
from qerl_bench.estimate.memory import memory
from qerl_bench.estimate.sizes import sizes_of
from qerl_bench.estimate.table import RATES, table
from qerl_bench.estimate.work import Work
from qerl_bench.sweep.grid import grid
from qerl_core.checks import ConfigError
from qerl_core.options.composer import Composer
from qerl_core.options.fingerprint import as_dict, flat
from tests.short_runs import without_figures

ROOT = Path(__file__).resolve().parents[2]
SHAPE = ["experiment=speed/step", "model=shape/7b", "lora.rank=32", "kernel=block"]
H200 = CARDS["h200"]


@pytest.fixture(scope="module")
def benchmark() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        sys.modules.pop("estimate", None)
        found: ModuleType = __import__("estimate")
        yield found
        sys.modules.pop("estimate", None)


@pytest.fixture(scope="module")
def rows(benchmark: Any) -> list[Any]:
    return list(benchmark.rows())


def estimated(*given: str, card: str = "h200", per_card: int = 1, told: point.GivenLengths = point.NOTHING) -> Any:
    return point.of_point(Composer().tree([*SHAPE, *given]), CARDS[card], per_card, told)


def printed(capsys: pytest.CaptureFixture[str], *given: str) -> str:
    command.main([*given])
    return capsys.readouterr().out


def test_the_table_is_what_the_committed_runs_give(benchmark: Any, rows: list[Any]) -> None:
    again, kept = json.loads(benchmark.stored(rows)), json.loads(RATES.read_text())
    assert again["lengths"] == kept["lengths"]
    assert again["rates"] == pytest.approx(kept["rates"], rel=0.02)  # another SciPy may end elsewhere
    assert len(again["runs"]) == len(kept["runs"]) > 20
    for one, other in zip(again["runs"], kept["runs"], strict=True):
        assert one["session"] == other["session"] and one["place"] == pytest.approx(other["place"])


def test_the_page_has_the_errors_that_are_measured(benchmark: Any, rows: list[Any]) -> None:
    found = benchmark.errors(rows)
    page = (ROOT / "docs/estimate.md").read_text()
    assert [line for line in benchmark.markdown(found).splitlines() if line not in page] == []
    assert found["run"].nunique() == len(benchmark.JUDGED) == 10


def test_no_judged_run_is_in_its_own_fit(benchmark: Any, rows: list[Any]) -> None:
    judged = next(one for one in rows if one.model == "shape-7b")
    for left_out in ("session", "model"):
        kept = benchmark.without(rows, judged, left_out)
        assert 0 < len(kept) < len(rows) and judged not in kept
        assert getattr(judged, left_out) not in {getattr(one, left_out) for one in benchmark.fit(kept)[1]}


def test_memory_of_committed_runs_is_counted_within_a_tenth(rows: list[Any]) -> None:
    """Of all runs of these studies that record how many shared the card, not of the ten alone."""
    off = [memory(one.work, H200).peak / one.peak - 1 for one in rows if one.model != "shape-tiny"]
    assert len(off) > 100
    assert sum(abs(one) < 0.1 for one in off) > 0.95 * len(off)


@pytest.mark.parametrize("targets", ["all", "[q_proj,down_proj]"])
def test_sizes_are_those_of_the_model(
    make_policy: Callable[..., Any], make_experiment: Callable[..., Any], targets: str
) -> None:
    given = [f"lora.targets={targets}", "model.hidden_size=64", "model.kv_heads=1"]
    policy, experiment = make_policy(*given, quant="bf16", width=64), make_experiment(*given)
    sizes = sizes_of(experiment.model)
    assert not isinstance(sizes, str)
    base = {name: one.numel() for name, one in policy.model.named_parameters() if one.ndim == 2 and "lora" not in name}
    in_blocks = sum(size for name, size in base.items() if "layers" in name)
    assert (sizes.block_weights, sizes.embedding_weights) == (in_blocks, sum(base.values()) - in_blocks)
    trained = sum(one.numel() for one in policy.trainable)
    assert sizes.adapter_weights(experiment.lora.rank, experiment.lora.targets) == trained


def test_a_hub_that_does_not_answer_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def no_answer(name: str, *_: object) -> None:
        asked.append(name)
        raise ConfigError(f"{name} was not found")

    monkeypatch.setattr(of_models, "causal_lm_config", no_answer)
    for quant in ("bf16", "nvfp4"):
        tree: Any = Composer().tree(["model=hub", "model.id=nobody/asked-once", "task=arithmetic", f"quant={quant}"])
        model = build(tree).model
        assert "nobody/asked-once was not found" in str(sizes_of(model))
    assert asked == ["nobody/asked-once"]


def test_checkpoints_take_the_counted_disk(tmp_path: Path) -> None:
    cfg = OmegaConf.create(Composer().tree(["experiment=smoke", "steps=2", "save_every=1", f"root={tmp_path}"]))
    experiment = build(cfg)
    with without_figures():
        run_experiment(experiment, cfg)
    saved = [*(experiment.run_dir / "checkpoints").iterdir()]
    sizes = sizes_of(experiment.model)
    assert not isinstance(sizes, str)
    work = Work.of(flat(as_dict(cfg)), sizes, None, 10, 10)
    assert work.checkpoints == len(saved) == 2
    whole = sum(file.stat().st_size for folder in saved for file in folder.rglob("*") if file.is_file())
    assert whole / 2 == pytest.approx(checkpoint_bytes(work), rel=0.05)  # the rest are small files of text


def test_a_measured_setting_is_estimated_as_it_was_measured() -> None:
    found = estimated("quant=nvfp4", "steps=6", "train.packing=false")
    assert found.step_s == pytest.approx(54.0, rel=0.15) and found.memory.peak == pytest.approx(39.5, rel=0.1)
    assert all("far from" not in said and "no committed" not in said for said in found.said)


def test_more_work_takes_longer_and_less_memory_costs_time() -> None:
    usual = estimated()
    assert estimated("task.completion_tokens=1200").step_s > 1.5 * usual.step_s
    assert usual.memory.weights > 2.5 * estimated("quant=nvfp4").memory.weights
    again = estimated("train.recompute=full")
    assert again.memory.train < usual.memory.train and again.train_s > usual.train_s
    beside = estimated(per_card=3, told=point.GivenLengths())
    assert beside.rollout_s > usual.rollout_s and beside.steps == usual.steps
    a100 = estimated(card="a100")
    assert a100.step_s > usual.step_s and "A100" not in a100.said[-1] and "no committed run" in a100.said[-1]


def test_what_cannot_fit_is_said_with_the_remedy() -> None:
    found = estimated("model=shape/72b", "quant=bf16", card="4090")
    assert not found.memory.fits
    assert any("does not fit" in said and "train.recompute" in said for said in found.said)
    assert estimated("quant=nvfp4").memory.fits


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["engine=vllm", "~engine.cache_gib", "~engine.kept_gib"], "engine.name=vllm"),
        (["quant=int8"], "quant.name=int8"),
        (["algo=dapo"], "algo.max_resampling_rounds"),
        (["rollout.quant=bf16"], "rollout.quant=bf16"),
        (["device=cpu"], "card=h200|h100"),
        (["model=shape/qwen3-30b-a3b"], "mixture of experts"),
    ],
)
def test_without_a_table_there_is_no_number(given: list[str], named: str) -> None:
    found = estimated(*given)
    assert not isinstance(found, RunEstimate) and any(named in why for why in found)


def test_a_far_shape_is_named_as_far() -> None:
    found = estimated("model=shape/72b", "quant=nvfp4")
    assert any("far from all that was timed" in said for said in found.said)


def test_lengths_are_from_the_user_the_table_or_the_limit() -> None:
    tiny = ["model=tiny", "model.dtype=bfloat16"]
    tree = Composer().tree([*tiny, "task=arithmetic"])
    found = point.of_point(tree, H200, 1)
    assert isinstance(found, RunEstimate) and any(
        said.startswith("at most:") and "tokens=N" in said for said in found.said
    )
    less = point.of_point(tree, H200, 1, point.GivenLengths(tokens=5))
    assert isinstance(less, RunEstimate) and less.step_s < found.step_s
    assert any("as you say" in said for said in less.said)
    with pytest.raises(ConfigError, match=r"tokens=49 .*max_completion_tokens=48"):
        point.of_point(tree, H200, 1, point.GivenLengths(tokens=49))
    (gsm8k, *_) = [one for one in table().lengths if one.task == "gsm8k"]
    assert 250 < gsm8k.tokens < 330 and gsm8k.model.startswith("qwen2.5-coder")


def test_a_sweep_has_the_points_that_hydra_makes() -> None:
    points, slots = grid(["quant=nvfp4,bf16", "seed=range(3)", "hydra.launcher.slots=4"])
    assert len(points) == 6 and slots == 4
    assert ["quant=nvfp4", "seed=0"] in points and not any("hydra" in word for one in points for word in one)
    assert len(grid(["experiment=speed/step", "quant=nvfp4"])[0]) > 1  # the experiment's own keys
    with pytest.raises(ConfigError, match="interval"):
        grid(["optim.lr=interval(0,1)"])


def test_the_command_prints_a_table_price_and_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    told = printed(capsys, *SHAPE, "quant=nvfp4", "card=h200", "per_hour=3")
    found = estimated("quant=nvfp4")
    assert f"{found.memory.train:.1f} GiB" in told and f"{found.step_s:.2f} s" in told and "docs/estimate.md" in told
    assert f"price: {found.run_s / 3600 * 3:.2f}" in told
    both = printed(capsys, *SHAPE, "quant=nvfp4,int8", "seed=0,1", "-m", "--card", "h200", "per_hour=3", "cards=2")
    assert "2 runs" in both and "no estimate for 2 runs: quant.name=int8" in both and "price:" in both
    assert both.count("the run ") == 1  # equal estimates once
    objects = json.loads(printed(capsys, *SHAPE, "card=h200", "json=true", "quant=nvfp4"))
    assert objects[0]["memory"] and objects[0]["rollout_s"] == pytest.approx(found.rollout_s)


def test_wrong_words_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=r"card must be one of .*4090.* got t4"):
        command.main(["card=t4"])
    with pytest.raises(ConfigError, match="per_hour"):
        command.main(["card=h200", "per_hour=-1"])
    with pytest.raises(ConfigError, match="modell"):
        command.main([*SHAPE, "modell=x", "card=h200"])


def test_a_card_is_known_by_the_name_that_it_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    def has(name: str | None) -> None:
        monkeypatch.setattr("qerl_bench.estimate.cards.listed_gpus", lambda: {} if name is None else {"0": name})

    has("NVIDIA H100 80GB HBM3")
    assert card_of(None) == CARDS["h100"]
    has("NVIDIA GeForce RTX 4090")
    assert card_of(None) == CARDS["4090"]
    has(None)
    assert card_of(None) is None
    has("Tesla T4")
    with pytest.raises(ConfigError, match=r"Tesla T4.*card=h200"):
        card_of(None)


def test_a_run_and_a_sweep_say_it_before_they_begin(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("qerl_bench.estimate.cards.listed_gpus", lambda: {"0": "NVIDIA H200"})
    cfg = OmegaConf.create(Composer().tree([*SHAPE, "quant=nvfp4"]))
    found = estimated("quant=nvfp4")
    said = words.run_estimate_lines(build(cfg), cfg, "cuda")
    assert len(said) == 3 and f"{found.memory.train:.1f} while training" in said[0] and "steps of" in said[1]
    assert words.run_estimate_lines(build(cfg), cfg, "cpu") == []
    other = OmegaConf.create(Composer().tree([*SHAPE, "quant=int8"]))
    (line,) = words.run_estimate_lines(build(other), other, "cuda")
    assert line.startswith("no estimate") and "int8" in line
    with caplog.at_level("INFO"):
        words.log_sweep_estimate([[*SHAPE, "quant=nvfp4"], [*SHAPE, "quant=nvfp4", "seed=1"]], 2, 1)
    assert "for 2 runs, 2 at a time" in caplog.text


def test_runs_wait_for_a_free_slot() -> None:
    one = estimated("quant=nvfp4")
    assert words.hours_s([one, one, one], 2) == pytest.approx(2 * one.run_s)
    assert words.hours_s([one], 4) == one.run_s
