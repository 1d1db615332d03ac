"""The run beside the untouched model: what the engine writes, and what transformers writes with `generate`.

Each kind of fault is planted where it once was, and must be refused in words that name the layer or the key.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from qerl_bench.config import build, compose
from qerl_bench.engine import hf_reference, reference_generation
from qerl_bench.engine.base import Sampling
from qerl_bench.engine.hf import HFEngine
from qerl_bench.engine.reference_generation import TOKENS, Written
from qerl_bench.engine.sampled_check import gap_of, sampled_check
from qerl_bench.engine.sampler import Sampler
from qerl_bench.experiment_spec import Experiment
from qerl_bench.model import check_cache, reference_model
from qerl_bench.model.context import context_of, require_one_rope, rope_switch
from qerl_bench.model.load import load_packed
from qerl_bench.model.policy import Policy
from qerl_bench.model.preflight import preflight
from qerl_bench.model.reference_model import Origin
from qerl_bench.model_setup import build_policy
from qerl_bench.quant.export import export
from qerl_bench.run_setup import set_up
from qerl_core.checks import ConfigError
from qerl_core.records import Prompt
from qerl_core.rundir.run_dir import RunDir
from tests.models import builds, cell

SMALL_STATE = {"state_size": 16, "time_step_rank": 16}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0],
}
OWN_SWITCH = LONGROPE | {"original_max_position_embeddings": 128}
FOREIGN: dict[str, dict[str, Any]] = {
    "mamba": SMALL_STATE,
    "falcon_mamba": SMALL_STATE,
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2, "chunk_size": 16},
    "jamba": {
        "mamba_d_state": 16,
        "mamba_dt_rank": 16,
        "num_experts": 2,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
    },
    "minimax": {"layer_types": ["linear_attention", "full_attention"], "num_local_experts": 4, "block_size": 16},
    "doge": {},
    "phi3_long": {"model_type": "phi3", "original_max_position_embeddings": 128, "rope_parameters": LONGROPE},
}
CALIBRATION = ("quantizer.calibration.samples=4", "quantizer.calibration.length=32")
CLOSE = 1e-4  # nats in FP32


@pytest.fixture(scope="module", autouse=True)
def foreign_architectures() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        for name, options in FOREIGN.items():
            patch.setitem(builds.ARCHITECTURES, name, deepcopy(options))  # transformers writes into them
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return functools.cache(lambda name: builds.build(name, root / name))


@pytest.fixture
def experiment(folder: Callable[[str], Path], tmp_path: Path) -> Callable[..., Experiment]:
    def make(name: str, *words: str) -> Experiment:
        return build(compose([*builds.WORDS, f"model.id={folder(name)}", f"root={tmp_path}", *words]))

    return make


class Checked:
    """A policy and its engine, to be compared with the untouched model of `source`."""

    def __init__(self, experiment: Experiment, source: Path | None) -> None:
        self.policy: Policy = build_policy(experiment, None, "cpu")
        self.engine = HFEngine(self.policy, max_num_seqs=8)
        self.source = Origin(source, trust_remote_code=False, rescaled=experiment.quantizer.rescales)

    def gaps(self) -> dict[str, Any]:
        return sampled_check(self.policy, self.engine, self.source, "model=M")


@pytest.fixture
def checked(experiment: Callable[..., Experiment], folder: Callable[[str], Path]) -> Callable[..., Checked]:
    return lambda name, *words: Checked(experiment(name, *words), folder(name))


# --- what is equal ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_moe", "qwen3_5_text"])
@pytest.mark.parametrize("quant", ["bf16", "nvfp4"])
def test_the_engine_writes_what_transformers_writes(checked: Callable[..., Checked], name: str, quant: str) -> None:
    in_float32 = checked(name, f"quant={quant}").gaps()
    assert in_float32["sampled_gap"] < CLOSE and in_float32["sampled_blocks"] == 2
    in_16_bits = checked(name, f"quant={quant}", "model.dtype=bfloat16").gaps()
    assert in_16_bits["sampled_gap_float32"] < CLOSE < in_16_bits["sampled_gap"] < 0.2


@pytest.mark.parametrize("name", ["gemma2", "gemma3_text", "gemma4_text"])
@pytest.mark.parametrize("from_files", [True, False])
def test_a_scale_that_is_no_16_bit_number_is_compared_as_rounded(
    experiment: Callable[..., Experiment], monkeypatch: pytest.MonkeyPatch, name: str, from_files: bool
) -> None:
    """Gemma multiplies embeddings by sqrt(width), in the dtype of the model; the square root of 64 is exact."""
    monkeypatch.setitem(builds.COMMON, "hidden_size", 192)
    one = experiment(name, "quant=bf16", "model.dtype=bfloat16")
    source = Path(one.model.id) if from_files else None  # type: ignore[attr-defined]
    checked = Checked(one, source)
    scale: Any = checked.policy.model.get_input_embeddings().embed_scale
    assert scale.dtype == torch.bfloat16 and float(scale) == 13.875 != 192**0.5
    assert checked.gaps()["sampled_gap_float32"] < 1e-5


@pytest.mark.parametrize("quant", ["bf16", "nvfp4"])
def test_weights_in_32_bits_are_compared_as_the_run_rounds_them(tmp_path: Path, quant: str) -> None:
    one = build_in_float32(tmp_path)
    words = [*builds.WORDS, f"model.id={one}", f"root={tmp_path}", f"quant={quant}", "model.dtype=bfloat16"]
    assert Checked(build(compose(words)), one).gaps()["sampled_gap_float32"] < 1e-5


def build_in_float32(root: Path) -> Path:
    """A checkpoint whose weights are no BF16 numbers."""
    folder = builds.build("llama", root / "float32")
    tensors = load_file(folder / "model.safetensors")
    moved = {name: tensor.float() * 1.0021 for name, tensor in tensors.items()}
    save_file(moved, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_recorded_step_is_compared_too(checked: Callable[..., Checked]) -> None:
    one = checked("llama")
    one.engine.sampler = Sampler(one.policy, one.engine.limits)
    assert one.gaps()["sampled_gap"] < CLOSE
    assert one.engine.sampler.kept is None  # what was recorded for this is not kept for the run


def written(logits: torch.Tensor, temperature: float, number: float = 0.5) -> Written:
    logprobs = torch.log_softmax(logits, -1).expand(TOKENS, -1)
    prompt = Prompt(id="p", messages=(), answer="", token_ids=(1,))
    chosen = int(logits.argmax()) if temperature == 0 else int((logprobs[0].exp().cumsum(0) > number).nonzero()[0])
    return Written(prompt, temperature, [chosen] * TOKENS, logprobs, torch.full((TOKENS,), number))


def test_texts_may_part_where_logits_tie_and_nowhere_else() -> None:
    tied = torch.tensor([2.0, 0.0, 2.0, 1.0])
    greedy, drawn = written(tied, 0.0), written(tied, 1.0)
    ours = greedy.logprobs[0].tolist()

    def gap(one: Written, *tokens: int) -> Any:
        return gap_of(one, (list(tokens), [ours[token] for token in tokens], [0.0] * len(tokens)))

    assert gap(greedy, 0, 0, 0).tie == 0 and gap(greedy, 0, 0, 0).of_tokens == [0, 0, 0]
    assert gap(greedy, 0, 2, 1).tie == 0 and len(gap(greedy, 0, 2, 1).of_tokens) == 2  # not compared from there on
    assert gap(greedy, 3).tie == pytest.approx(1.0)  # nats below the likeliest
    assert gap(drawn, drawn.ids[0]).tie == 0
    ends = drawn.logprobs[0].exp().cumsum(0)
    assert gap(drawn, 0).tie == pytest.approx(0.5 - float(ends[0]), abs=1e-6)  # of probability
    assert gap(replace(drawn, numbers=ends[0].expand(TOKENS)), 0).tie == pytest.approx(0, abs=1e-6)
    shifted = gap_of(greedy, ([0], [ours[0] - 0.25], [0.0]))
    assert shifted.of_tokens == [pytest.approx(0.25)]


# --- two matrices where config.json says one: https://github.com/huggingface/transformers/issues/42612 ---------------
# --- and https://github.com/huggingface/peft/issues/2777 -------------------------------------------------------------


@pytest.mark.parametrize("quant", ["bf16", "nvfp4"])
def test_a_weight_that_transformers_reads_otherwise_is_named(checked: Callable[..., Checked], quant: str) -> None:
    one = checked("qwen2", f"quant={quant}")
    head = one.policy.model.get_output_embeddings()
    head.weight = one.policy.model.get_input_embeddings().weight  # as if it were tied
    with pytest.raises(ConfigError, match=r"lm_head\.weight of model=M is not what transformers reads"):
        one.gaps()
    one = checked("qwen2", f"quant={quant}")
    one.policy.model.model.layers[1].input_layernorm.weight.data *= 1.01
    with pytest.raises(ConfigError, match=r"layers\.1\.input_layernorm\.weight of model=M .*1\.0%"):
        one.gaps()


@pytest.mark.parametrize("name", ["qwen2", "qwen3_moe"])
def test_a_packed_layer_with_the_weight_of_another_is_named(checked: Callable[..., Checked], name: str) -> None:
    one = checked(name, "quant=nvfp4", "lora.experts=false")
    first, second = (dict(layer.named_modules()) for layer in one.policy.model.model.layers)
    leaf = "mlp.down_proj.base_layer" if name == "qwen2" else "mlp.experts.down_proj"
    first[leaf]._buffers, second[leaf]._buffers = second[leaf]._buffers, first[leaf]._buffers
    if name == "qwen2":
        first[leaf].row_scales, second[leaf].row_scales = second[leaf].row_scales, first[leaf].row_scales
    with pytest.raises(ConfigError, match=r"layers\.0\.mlp\.\S*down_proj\S* of model=M is not what transformers reads"):
        one.gaps()


def test_a_rescaling_quantizer_is_compared_by_what_it_computes(checked: Callable[..., Checked]) -> None:
    words = ("quant=nvfp4", "quantizer=awq", *CALIBRATION)
    assert checked("llama", *words).gaps()["sampled_gap"] < CLOSE


def test_a_packed_folder_is_compared_with_its_dequantized_weights(
    experiment: Callable[..., Experiment], tmp_path: Path
) -> None:
    packed = tmp_path / "packed"
    made = experiment("llama", "quant=nvfp4")
    model, tokenizer, *_ = load_packed(made.model, made.quant, made.quantizer, made.task, None, "cpu")
    export(model, tokenizer, made.quant, packed)
    again = build(compose([*builds.WORDS, f"model.id={packed}", f"root={tmp_path}", "quant=nvfp4"]))
    assert Checked(again, packed).gaps()["sampled_gap"] < CLOSE


# --- caches of other names, layers whose weight is read: https://github.com/axolotl-ai-cloud/axolotl/issues/1498 -----
# --- https://github.com/axolotl-ai-cloud/axolotl/issues/3951, https://github.com/huggingface/transformers/issues/30849


@pytest.mark.parametrize("name", ["mamba", "falcon_mamba", "mamba2"])
def test_a_cache_of_another_name_is_kept_or_refused(
    checked: Callable[..., Checked], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    one = checked(name, "lora.targets=[in_proj]")
    assert one.gaps()["sampled_gap"] < CLOSE
    monkeypatch.setattr(hf_reference, "cache_name", lambda policy: "past_key_values")  # which the model swallows
    with pytest.raises(ConfigError, match=r"Each first token is right: what the model keeps .*Use another model"):
        one.gaps()


def test_what_a_model_raises_is_told_in_words(experiment: Callable[..., Experiment], tmp_path: Path) -> None:
    """Mamba 2 keeps its residual stream in FP32 and would round it before its head."""
    options = experiment("mamba2", "model.dtype=bfloat16")
    with (
        RunDir(tmp_path / "run", compose(["device=cpu"])) as run,
        pytest.raises(ConfigError, match=r"the trainer cannot compute model=\S+: .*dtype.*Use model\.dtype=float32"),
        set_up(options, options.engine, run, "cpu"),
    ):
        pass


def test_a_cache_that_a_model_makes_itself_is_refused(checked: Callable[..., Checked]) -> None:
    with pytest.raises(ConfigError, match=r"engine=hf cannot continue a text with model=M: .*cache.*Use another model"):
        checked("minimax").gaps()


@pytest.mark.parametrize(("name", "layer"), [("mamba", "mixer.dt_proj"), ("jamba", "mamba.dt_proj")])
def test_a_layer_whose_weight_is_read_is_neither_packed_nor_adapted(
    checked: Callable[..., Checked], experiment: Callable[..., Experiment], name: str, layer: str
) -> None:
    with pytest.raises(ConfigError, match=rf"layers\.0\.{layer}: .* reads the weight .*quant=nvfp4.*quant=bf16"):
        build_policy(experiment(name, "quant=nvfp4"), None, "cpu")
    adapted = checked(name, "quant=bf16").policy
    with pytest.raises(ConfigError, match=rf"{layer}.* no effect: .*lora\.targets=\[\S*in_proj") as refused:
        preflight(adapted, experiment(name).quant, "model=M")
    remedy = str(refused.value).rpartition("lora.targets=[")[2].partition("]")[0]
    others = checked(name, "quant=bf16", f"lora.targets=[{remedy}]")
    assert preflight(others.policy, experiment(name).quant, "model=M")["logprob_gap_float32"] < CLOSE
    assert others.gaps()["sampled_gap"] < CLOSE


def test_a_model_that_cannot_compute_a_packed_row_is_trained_with_padding(checked: Callable[..., Checked]) -> None:
    doge = checked("doge")
    assert not doge.policy.packing
    assert doge.gaps()["sampled_gap"] < CLOSE


# --- rotary factors by the longest sequence of a call: https://github.com/QwenLM/Qwen/issues/401 ---------------------
# --- https://github.com/huggingface/transformers/issues/25104, https://github.com/ggml-org/llama.cpp/issues/24875 ----


def test_sequences_beyond_a_switch_of_the_rotary_factors_are_refused(
    checked: Callable[..., Checked], experiment: Callable[..., Experiment], folder: Callable[[str], Path]
) -> None:
    one = checked("phi3_long")
    assert one.gaps()["sampled_gap"] < CLOSE
    prompt = Prompt(id="p", messages=(), answer="", token_ids=tuple(range(40)))
    one.engine.require_room([prompt], Sampling(samples=1, temperature=1.0, max_tokens=88, seed=0))
    with pytest.raises(ConfigError, match=r"longrope.* 128 tokens.*prompt has 40.* 89; .*task\.max_completion_tokens"):
        one.engine.require_room([prompt], Sampling(samples=1, temperature=1.0, max_tokens=89, seed=0))
    with pytest.raises(ConfigError, match=r"task\.max_completion_tokens must be at most 128"):
        experiment("phi3_long", "task.max_completion_tokens=129")
    require_one_rope(one.policy.model, [128], "a demonstration")
    with pytest.raises(ConfigError, match=r"a demonstration has 129 tokens, and above 128"):
        require_one_rope(one.policy.model, [12, 129], "a demonstration")


def test_a_run_across_a_switch_is_refused_before_its_first_step(folder: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="longrope"):
        cell.examine(folder("phi3_long"), tmp_path, "nvfp4", ["task.max_completion_tokens=120"])
    (run,) = (tmp_path / "runs").iterdir()
    assert not (run / "metrics.jsonl").exists() or '"train"' not in (run / "metrics.jsonl").read_text()


@pytest.mark.parametrize(
    ("config", "switch", "context"),
    [
        ({"max_position_embeddings": 512}, None, 512),
        ({"max_position_embeddings": 512, "rope_parameters": OWN_SWITCH}, 128, 128),
        (
            {
                "max_position_embeddings": 512,
                "original_max_position_embeddings": 64,
                "rope_scaling": {"type": "su", "long_factor": [1.0]},
            },
            64,
            64,
        ),
        (
            {"rope_parameters": {"full_attention": OWN_SWITCH, "sliding_attention": {"rope_type": "default"}}},
            128,
            128,
        ),
        ({"max_position_embeddings": 512, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, None, 512),
        ({"max_position_embeddings": 512, "rope_scaling": None}, None, 512),
        ({}, None, None),
    ],
)
def test_the_switch_is_read_of_configs_of_any_age(
    config: dict[str, Any], switch: int | None, context: int | None
) -> None:
    assert (rope_switch(config), context_of(config)) == (switch, context)


# --- other kinds of fault, planted -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "remedy"), [("float32", "another model"), ("bfloat16", "model.dtype=float32, or another model")]
)
def test_padding_that_is_seen_is_refused(
    checked: Callable[..., Checked], monkeypatch: pytest.MonkeyPatch, dtype: str, remedy: str
) -> None:
    """A short prompt beside a long one is padded on the left."""
    one = checked("llama", f"model.dtype={dtype}")
    ids_of = hf_reference.prefill

    def unmasked(policy: Policy, prompt_ids: list[list[int]]) -> Any:
        width = max(map(len, prompt_ids))
        return ids_of(policy, [[policy.pad_id] * (width - len(ids)) + ids for ids in prompt_ids])

    monkeypatch.setattr(hf_reference, "prefill", unmasked)
    with pytest.raises(ConfigError, match=rf"nats off on average .*greedy after 5 tokens.*Use {remedy}$"):
        one.gaps()


@pytest.mark.parametrize("fault", ["second best", "other numbers"])
def test_another_choice_of_tokens_is_refused(
    checked: Callable[..., Checked], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    one, draw = checked("llama"), hf_reference.draw

    def other(logits: torch.Tensor, temperature: float, uniform: torch.Tensor, **options: Any) -> Any:
        token, _, entropy = draw(logits, temperature, 1 - uniform, **options)
        if temperature == 0 and fault == "second best":
            token = logits.topk(2).indices[:, 1]
        logprob = torch.log_softmax(logits, -1).gather(1, token[:, None])[:, 0]
        return token, logprob, entropy

    monkeypatch.setattr(hf_reference, "draw", other)
    with pytest.raises(ConfigError, match="Its log-probabilities are right, and the tokens it chooses are not"):
        one.gaps()


def test_kernels_that_sample_something_else_are_refused(
    checked: Callable[..., Checked], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, generate = checked("llama", "model.dtype=bfloat16"), HFEngine.generate

    def wrong(engine: HFEngine, *args: Any) -> Any:
        return [replace(one, logprobs=[nats - 0.5 for nats in one.logprobs]) for one in generate(engine, *args)]

    monkeypatch.setattr(HFEngine, "generate", wrong)
    with pytest.raises(ConfigError, match=r"in torch\.bfloat16 .* 0\.[45]\d* nats .*Use kernel=torch"):
        one.gaps()


# --- a smaller copy of a large model ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "blocks", "count"), [("llama", 4, 2), ("gemma3_text", 6, 4), ("deepseek_v3", 5, 2)])
def test_a_large_model_is_compared_by_blocks_of_every_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, blocks: int, count: int
) -> None:
    """The first blocks, up to the first of the last kind: Gemma's fourth is its first with full attention."""
    options = dict(builds.ARCHITECTURES[name]) | {"num_hidden_layers": blocks}
    if "layer_types" in options:
        options["layer_types"] = [*["sliding_attention"] * 3, "full_attention", *["sliding_attention"] * 2]
    monkeypatch.setitem(builds.ARCHITECTURES, name, options)
    checkpoint = builds.build(name, tmp_path / name)
    made = build(compose([*builds.WORDS, f"model.id={checkpoint}", f"root={tmp_path}", "quant=nvfp4"]))
    one = Checked(made, checkpoint)
    before = {key: tensor.clone() for key, tensor in one.policy.model.state_dict().items()}
    config = one.policy.model.config.to_dict()
    whole = one.gaps()
    assert whole["sampled_blocks"] == blocks
    monkeypatch.setattr(reference_model, "MOST_BYTES", 0)
    assert reference_model.blocks_to_compare(one.policy) == count
    shrunk = one.gaps()
    assert shrunk["sampled_blocks"] == count and shrunk["sampled_gap"] < CLOSE
    assert one.policy.model.config.to_dict() == config
    assert all(torch.equal(tensor, before[key]) for key, tensor in one.policy.model.state_dict().items())
    one.policy.model.model.layers[0].input_layernorm.weight.data *= 1.5
    with pytest.raises(ConfigError, match=r"layers\.0\.input_layernorm"):
        one.gaps()


# --- remembered ------------------------------------------------------------------------------------------------------


@pytest.fixture
def runs(
    experiment: Callable[..., Experiment], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., dict[str, Any]]:
    """preflight.json of a new set-up, with a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    counter = iter(range(100))

    def run(options: Experiment) -> dict[str, Any]:
        path = tmp_path / f"run{next(counter)}"
        with RunDir(path, compose(["device=cpu"])) as opened, set_up(options, options.engine, opened, "cpu"):
            pass
        return json.loads((path / "preflight.json").read_text())

    return run


def cached(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "qerl_bench" / "preflight").glob("*"))


def test_a_comparison_is_made_once(
    runs: Callable[..., dict[str, Any]], experiment: Callable[..., Experiment], tmp_path: Path
) -> None:
    first = runs(experiment("llama", "quant=nvfp4"))
    again = runs(experiment("llama", "quant=nvfp4", "seed=7", "aqn=constant", "noise.where=adapters"))
    assert (first.pop("remembered"), again.pop("remembered")) == (False, True)
    assert {name: value for name, value in first.items() if "gap" in name} == {
        name: value for name, value in again.items() if "gap" in name
    }
    assert (
        len(first["norms_with_noise"]) == 4 and again["norms_with_noise"] == {}
    )  # what depends on the run is checked again
    assert len(cached(tmp_path)) == 1 and cached(tmp_path)[0].suffix == ".json"


@pytest.mark.parametrize("words", [("quant=mxfp4",), ("model.dtype=bfloat16",), ("lora.rank=8",), ("kernel=torch",)])
def test_another_option_is_another_comparison(
    runs: Callable[..., dict[str, Any]], experiment: Callable[..., Experiment], words: tuple[str, ...]
) -> None:
    runs(experiment("llama", "quant=nvfp4"))
    assert not runs(experiment("llama", "quant=nvfp4", *words))["remembered"]


def test_other_weights_config_code_packages_or_card_are_compared_again(
    runs: Callable[..., dict[str, Any]],
    folder: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checkpoint = builds.build("llama", tmp_path / "own")
    options = build(compose([*builds.WORDS, f"model.id={checkpoint}", f"root={tmp_path}", "quant=bf16"]))
    assert not runs(options)["remembered"] and runs(options)["remembered"]
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["model.norm.weight"] *= 1.1
    save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})
    assert not runs(options)["remembered"] and runs(options)["remembered"]
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    assert not runs(options)["remembered"] and runs(options)["remembered"]
    for name, value in {
        "code_digest": lambda: "other",
        "cpu_name": lambda: "other",
        "versions": lambda: {"torch": "0", "transformers": "0"},
    }.items():
        with monkeypatch.context() as patch:
            patch.setattr(check_cache, name, value)
            assert not runs(options)["remembered"], name


def test_where_a_part_of_the_key_is_missing_nothing_is_remembered(
    runs: Callable[..., dict[str, Any]],
    experiment: Callable[..., Experiment],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = experiment("llama")
    for name, value in {
        "cpu_name": lambda: None,
        "versions": lambda: {"torch": None, "transformers": "5"},
    }.items():
        with monkeypatch.context() as patch:
            patch.setattr(check_cache, name, value)
            assert not runs(options)["remembered"] and not runs(options)["remembered"], name
    monkeypatch.setattr("qerl_bench.run_setup.digest_of", lambda *_: None)
    assert not runs(options)["remembered"] and not runs(options)["remembered"]
    words = ("quant=nvfp4", "quantizer=gptq", *CALIBRATION)
    assert not runs(experiment("llama", *words))["remembered"]
    assert cached(tmp_path) == []


def test_a_failure_is_not_remembered_nor_hidden(
    runs: Callable[..., dict[str, Any]],
    experiment: Callable[..., Experiment],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = experiment("llama")
    with monkeypatch.context() as patch:
        patch.setattr(reference_generation, "SEED", 5)  # other draws than the engine's
        patch.setattr(
            reference_generation,
            "uniforms",
            lambda keys, count: torch.linspace(0, 0.9, count).double().expand(len(keys), -1).numpy(),
        )
        for _ in range(2):
            with pytest.raises(ConfigError, match="the tokens it chooses are not"):
                runs(options)
    assert cached(tmp_path) == []
    assert not runs(options)["remembered"]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"passed": {}}', '{"key": {}, "passed": {}}'])
def test_a_file_that_is_not_whole_counts_for_nothing(
    runs: Callable[..., dict[str, Any]], experiment: Callable[..., Experiment], tmp_path: Path, content: str
) -> None:
    runs(experiment("llama"))
    (file,) = cached(tmp_path)
    file.write_text(content)
    assert not runs(experiment("llama"))["remembered"]
    assert runs(experiment("llama"))["remembered"]  # written again


def test_a_cache_that_cannot_be_written_is_left_alone(
    runs: Callable[..., dict[str, Any]], experiment: Callable[..., Experiment], tmp_path: Path
) -> None:
    (tmp_path / "cache").write_text("a file")
    assert not runs(experiment("llama"))["remembered"] and not runs(experiment("llama"))["remembered"]
