"""What the benches compute from their times, and which adapters they give to a layer; needs no GPU."""

from __future__ import annotations

import csv
import importlib
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from qerl_bench.config import build, compose
from qerl_kernels import decode_configs, projection
from qerl_kernels.decode_configs import Config

BENCH = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def _as_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bench finds `timing` in its own folder."""
    monkeypatch.syspath_prepend(str(BENCH))


def test_decode_speed_leaves_out_reading_and_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that records in 800 ms, reads in 100 and replays in 2; one repeat is slow."""
    bench, calls = importlib.import_module("decoding"), []

    class Way:
        def __init__(self, *_: Any) -> None:
            pass

        def seconds(self, prompts: list[Any], lengths: list[int], limit: int) -> tuple[float, dict[str, float]]:
            calls.append((len(prompts), len(lengths), lengths[0], limit))
            slow, record = (0.5 if len(calls) in (8, 9) else 0.0), 0.8 if len(calls) == 1 else 0.0
            taken = 0.1 + record + 0.002 * (lengths[0] - 1) + slow * lengths[0]
            return taken, {"peak_gib": 1.0 + lengths[0], "time/recording_s": record, "memory/cache_gib": 0.5}

    monkeypatch.setattr(bench, "Way", Way)
    (row,) = bench.measure(None, "recorded", [8], prompt=256, new=256, repeats=5, group=4)
    assert calls == [(2, 8, 256, 256), *[(2, 8, 1, 256), (2, 8, 256, 256)] * 5]
    assert row["step_ms"] == pytest.approx(2.0) and row["step_ms_least"] == pytest.approx(2.0)
    assert row["step_ms_most"] == pytest.approx(502.0)
    assert row["decode_tok_s"] == pytest.approx(8 / 0.002)
    assert (row["read_s"], row["first_record_s"], row["cache_gib"]) == (pytest.approx(0.1), 0.8, 0.5)
    assert row["peak_gib"] == 257.0 and row["repeats"] == 5


def test_it_runs_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(projection, "BESIDE_ROWS", projection.BESIDE_ROWS)
    words = "--shape tiny --formats nvfp4 --ranks 4 --batches 2 --slow --prompt 5 --new 6 --repeats 1"
    ragged = "--ragged 8 --mean 5 --limit 9"
    files = ["--out", str(tmp_path / "x.csv"), "--profile", str(tmp_path / "profile.csv")]
    importlib.import_module("decoding").main([*words.split(), *ragged.split(), *files, "--behind"])
    assert projection.BESIDE_ROWS == 0
    with (tmp_path / "x.csv").open() as file:
        even, ragged_row = csv.DictReader(file)
    assert even["matmuls"] == "torch"
    with (tmp_path / "profile.csv").open() as file:
        kernels = [*csv.DictReader(file)]
    assert {(row["format"], row["way"], row["batch"]) for row in kernels} == {("nvfp4", "recorded", "2")}
    assert sum(float(row["share"]) for row in kernels) == pytest.approx(1) and float(kernels[0]["ms"]) > 0
    assert (even["shape"], even["batch"], even["new"]) == ("tiny", "2", "6") and float(even["total_s"]) > 0
    assert (ragged_row["way"], ragged_row["batch"], ragged_row["group"]) == ("ragged", "8", "8")
    tokens = int(ragged_row["tokens"])
    assert 8 <= tokens <= 72 and float(ragged_row["tok_s"]) == pytest.approx(tokens / float(ragged_row["total_s"]))
    assert 0 < float(ragged_row["rows_used"]) <= 1
    assert 0 < float(ragged_row["cache_used_gib"]) <= float(ragged_row["cache_gib"])
    for wrong in (["--new", "1"], ["--ragged", "9"]):
        with pytest.raises(SystemExit):
            importlib.import_module("decoding").main(wrong)
        assert wrong[0] in capsys.readouterr().err


def test_updates_are_timed_on_the_same_ragged_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench, out = importlib.import_module("updating"), tmp_path / "updates.csv"
    fp8 = "fp8+quant.activations=fp8+train.gradients=fp8"
    bench.main(f"--shape tiny --formats bf16 {fp8} --completions 8 --repeats 1 --tokens 8192 --out {out}".split())
    with out.open(newline="") as file:
        bf16, other = csv.DictReader(file)
    assert (bf16["format"], other["format"]) == ("bf16", fp8)
    assert float(bf16["times_the_first"]) == 1 and bf16["tokens"] == other["tokens"]
    assert float(other["times_the_first"]) == pytest.approx(float(other["update_s"]) / float(bf16["update_s"]))
    with pytest.raises(SystemExit):
        bench.main(["--completions", "12"])
    assert "--completions must be a multiple of 8" in capsys.readouterr().err


def test_it_rounds_the_inputs_of_a_format_that_does() -> None:
    spec = build(compose(["quant=fp8", "quant.activations=fp8", "model=shape/tiny", "task=shape", "eval=none"]))
    policy = importlib.import_module("decoding").random_policy(spec, 4, "cpu")
    assert policy.rounding.kind == "fp8"
    policy.model(torch.arange(6)[None])
    assert policy.rounding.take()[1] > 0


@pytest.mark.peers
def test_steps_of_trl_run_on_a_cpu(tmp_path: Path, stand_in: Callable[..., None]) -> None:
    """Through transformers instead of vLLM; every group has unequal rewards, so every completion has a gradient."""
    pytest.importorskip("trl", reason="extra peers")
    lengths = "rollout.prompts_per_step=2 task.prompt_tokens=5 task.completion_tokens=6 task.max_completion_tokens=6"
    words = f"--shape tiny --rank 4 --steps 2 --fixed --words {lengths} --out {tmp_path / 'x.csv'}"
    bench, rewards = importlib.import_module("trl_step"), []
    asked = bench.Load.reward
    stand_in(bench.Load, reward=lambda *args, **more: rewards.append(asked(*args, **more)) or rewards[-1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of libraries
        bench.main(words.split())
    assert [sorted(of_step) for of_step in rewards] == [[0.0] * 8 + [1.0] * 8] * 2
    with (tmp_path / "x.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["step"], row["sampler"], row["lengths"], row["rows"]) for row in rows] == [
        (step, "transformers", "fixed", "4") for step in "12"
    ]
    for row in rows:
        assert row["sync_s"] == "" and min(float(row[name]) for name in ("rollout_s", "rest_s", "startup_s")) > 0


@pytest.mark.peers
@pytest.mark.slow
def test_a_model_is_trained_by_trl_and_by_us(tmp_path: Path) -> None:
    """Three updates agree in FP32, but not at another rate; TRL stops when its time is over, and continues."""
    pytest.importorskip("trl", reason="extra peers")
    pytest.importorskip("gguf", reason="extra gguf")
    from tests.models import gguf_files

    model = gguf_files.write(tmp_path / "mini.gguf", gguf_files.model_of("qwen2"), "Q4_1")
    words = f"model={model} model.dtype=float32 task=even_characters task.template=chat steps=2 save_every=2"
    sizes = "rollout.prompts_per_step=2 rollout.group_size=4 eval.questions=3 eval.samples=2 --rows 2 --seeds 3"
    folder = tmp_path / "out"

    def run(*more: str, to: Path = folder) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of libraries
            importlib.import_module("beside_trl").main([str(to), *words.split(), *sizes.split(), *more])

    def rows(file: Path) -> list[dict[str, str]]:
        with file.open() as lines:
            return list(csv.DictReader(lines))

    with pytest.raises(SystemExit, match="1%"):
        run("--parts", "same", "--trl", "learning_rate=0.01", to=tmp_path / "other")
    with pytest.raises(SystemExit) as stopped:
        run("--minutes", "0")
    compared = rows(folder / "same.csv")
    assert [row["update"] for row in compared] == ["1", "2", "3"] * 2
    assert all(float(row["gap"]) < 1e-4 for row in compared)
    assert all(float(row["trl"]) > 0.01 for row in compared if row["number"] == "grad_norm")
    assert stopped.value.code == 3 and len(rows(folder / "trl-s3" / "steps.csv")) == 1
    run("--parts", "ours", "trl", "table")
    assert [row["step"] for row in rows(folder / "trl-s3" / "steps.csv")] == ["1", "2"]
    ours, peer = rows(folder / "table.csv")
    assert (ours["trainer"], peer["trainer"], ours["seed"], peer["seed"]) == ("ours", "TRL", "3", "3")
    assert ours["sampled_before"] == peer["sampled_before"]  # the same base, and the same questions
    assert min(float(row[name]) for row in (ours, peer) for name in ("step_s", "rollout_s", "tokens", "peak_gib")) > 0
    assert len((folder / "table.md").read_text().splitlines()) == 8


@pytest.mark.peers
def test_prompts_of_numbers_are_their_own_token_ids() -> None:
    """None of them is cut at a zero."""
    pytest.importorskip("trl", reason="extra peers")
    tokenizer = importlib.import_module("trl_step").number_tokenizer(300)
    assert tokenizer("10 0 255 100 299")["input_ids"] == [10, 0, 255, 100, 298]
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (299, 299)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("--group-batches 10", "--group-batches of --group"),
        ("--ragged 4", "--ragged must be multiples of 8"),
        ("--repeats 0", "at least 1"),
        ("--new 1", "--new must be above 1"),
    ],
)
def test_sizes_that_vllm_cannot_be_asked_for(wrong: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        importlib.import_module("vllm_decoding").main(wrong.split())
    assert said in capsys.readouterr().err


@pytest.mark.peers
def test_trl_gets_the_lengths_and_rewards_of_our_load() -> None:
    pytest.importorskip("trl", reason="extra peers")
    experiment = build(compose(["experiment=speed/step", "model=shape/tiny", "rollout.prompts_per_step=2"]))
    load = importlib.import_module("trl_step").Load(experiment, 2)
    prompts = [prompt for step in (1, 2) for prompt in experiment.task.train_prompts(step, 2, experiment.seed)]
    assert [row["prompt"].split() for row in load.rows] == [[str(one) for one in p.token_ids or ()] for p in prompts]
    assert [length for of_step in load.lengths for length in of_step] == [
        n for p in prompts for n in p.new_tokens or ()
    ]
    repeated = [row["right"] for row in load.rows for _ in range(load.group)]
    assert load.reward(repeated) == [float(digit) for prompt in prompts for digit in prompt.answer]


@pytest.mark.peers
def test_vllm_is_told_each_length() -> None:
    pytest.importorskip("trl", reason="extra peers")

    class Params:
        max_tokens = 99

        def clone(self) -> Params:
            return Params()

    asked = []
    generate = importlib.import_module("trl_step").with_lengths(
        lambda prompts, sampling_params, use_tqdm: asked.extend(
            (prompt, one.max_tokens) for prompt, one in zip(prompts, sampling_params, strict=True)
        ),
        iter([[3, 1], [2, 5]]),
    )
    for prompts in (["a", "b"], ["c", "d"]):
        generate(prompts, sampling_params=Params(), use_tqdm=False)
    assert asked == [("a", 3), ("b", 1), ("c", 2), ("d", 5)]


@pytest.mark.parametrize(
    ("layer", "rank", "together"),
    [("7B qkv", 32, 96), ("32B gate_up", 32, 64), ("7B down", 32, 32), ("7B o", 128, 128), ("7B qkv", 43, 0),
     ("7B gate_up", 65, 0), ("7B qkv", 0, 0)],
)  # fmt: skip
def test_a_search_has_the_adapters_of_a_run(layer: str, rank: int, together: int) -> None:
    """Query, key and value are one layer with three adapters; more ranks than 128 are not fused."""
    assert importlib.import_module("gemm").concatenated_rank(layer, rank) == together


def test_projection_is_compared_on_matrices_that_no_cache_holds(
    stand_in: Callable[..., None], gpu: Callable[..., None]
) -> None:
    """On a machine where ours takes 2 us and the library 7; matrices are as many as fill the rotated bytes."""
    bench, timing = importlib.import_module("projection"), importlib.import_module("timing")
    counts: list[list[int]] = []

    def times(runs: list[list[Any]]) -> list[list[float]]:
        counts.append([len(run) for run in runs])
        return [[2.0] * 5, [7.0] * 5]

    stand_in(timing, times=times, ROTATED_BYTES=1 << 20)
    stand_in(torch, randn=lambda shape, **_: torch.zeros(shape))
    gpu(get_device_name=lambda: "some GPU")
    found = list(bench.measure([3584], [32, 96], [1, 64]))
    assert counts == [[4, 4]] * 2 + [[2, 2]] * 2
    assert [(row["rank"], row["rows"], row["pieces"]) for row in found] == [
        (32, 1, 56),
        (32, 64, 56),
        (96, 1, 19),
        (96, 64, 19),
    ]
    assert {row["speedup"] for row in found} == {3.5} and found[3]["floor_us"] > found[0]["floor_us"] > 0


def test_a_table_keeps_the_rank_that_it_was_measured_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = decode_configs.cache_file("some GPU")
    first, second = Config(128, 16, 8, 3, 4, 3), Config(64, 8, 4, 2, 8, 2)
    decode_configs.write_table(path, {(64, 128): {16: first}}, lora_rank=32)
    decode_configs.write_table(path, {(64, 128): {8: second}})
    entries = json.loads(path.read_text())["64x128"]
    assert {size: entry["lora_rank"] for size, entry in entries.items()} == {"16": 32, "8": 0}
    assert decode_configs.table("some GPU") == {"64x128": {"16": first, "8": second}}
    decode_configs.table.cache_clear()
