"""One architecture in one weight format through the whole path: what works, what is refused, what fails.

A cell is a run of two GRPO steps with noise on a random checkpoint of `builds`, evaluated before and after, and then
checks of what it did against plain transformers (`examine`). A refusal that names one of REMEDIES is followed by
another try with that option.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from transformers import AutoModelForCausalLM, PreTrainedModel

from qerl_bench.config import build, compose
from qerl_bench.engine import hf_reference
from qerl_bench.engine.adapter_check import check_completions
from qerl_bench.engine.base import Sampling
from qerl_bench.engine.recordable import eager_reason
from qerl_bench.engine.sampler import decode
from qerl_bench.experiment import run_steps
from qerl_bench.experiment_spec import Experiment
from qerl_bench.model.policy import Policy
from qerl_bench.model_setup import build_policy
from qerl_bench.quant.linear import PackedLinear
from qerl_bench.quant.matrices import PackedMatrices
from qerl_bench.quant.packed_share import packed_share
from qerl_bench.run_setup import prepare_device, set_up
from qerl_bench.train.batch import Batch, make_batch
from qerl_bench.train.trainer_state import load_checkpoint
from qerl_bench.train.update import make_optimizer
from qerl_core.checks import ConfigError, TrainingStopped
from qerl_core.options.fingerprint import as_dict
from qerl_core.rundir.run_dir import RunDir

NOISE = 0.05
REMEDIES = ("aqn=none", "train.packing=false", "quant.partial=true")
WORDS = (
    "model=hub",
    "model.id=CHECKPOINT",
    "model.dtype=float32",
    "model.lr=0.01",  # so that two steps change log-probabilities visibly
    "device=cpu",
    "task=even_characters",
    "task.template=chat",
    "task.max_completion_tokens=12",
    "steps=2",
    "save_every=2",
    "rollout.prompts_per_step=2",
    "rollout.group_size=4",
    "optim.warmup_steps=0",
    "lora.rank=4",
    "eval=quick",
    "eval.questions=2",
    "name=run",
)
CLOSE = 1e-4  # nats; FP32 rounds by less
ONLY_ON_A_CPU = ("a packed layer runs the reference", "the experts' module makes the host wait for the GPU")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One cell: `verdict` is works, refused (in words, by a ConfigError) or fails (any other exception)."""

    architecture: str
    quant: str
    verdict: str
    options: str = ""  # that refusals asked for, with spaces between them
    reason: str = ""  # of a refusal or failure
    norms: str = ""  # with noise / transformer blocks
    packed: str = ""  # share of the block weights
    padding: str = ""  # whether training skips it
    decoding: str = ""  # recorded, or why transformers decodes


def outcome(architecture: str, quant: str, checkpoint: Path, root: Path) -> Outcome:
    """Try the cell as a user would: with the defaults, then with what the refusals ask for."""
    options: list[str] = []
    while True:
        cell: dict[str, Any] = {"architecture": architecture, "quant": quant, "options": " ".join(options)}
        try:
            with tempfile.TemporaryDirectory(dir=root) as folder:
                return Outcome(**cell, verdict="works", **examine(checkpoint, Path(folder), quant, options))
        except (ConfigError, TrainingStopped) as error:
            remedy = next((word for word in REMEDIES if word in str(error) and word not in options), None)
            if remedy is None:
                return Outcome(**cell, verdict="refused", reason=first_sentence(error))
            options.append(remedy)
        except Exception as error:  # whatever an architecture makes the program run into
            return Outcome(**cell, verdict="fails", reason=f"{type(error).__name__}: {first_sentence(error)}")


def first_sentence(error: Exception) -> str:
    said = re.sub(r"^model\.id=\S+: ", "", " ".join(str(error).split()))  # whose folder is another one each time
    return re.split(r"[.;] ", said, maxsplit=1)[0][:200]


@cache
def composed(words: tuple[str, ...]) -> DictConfig:
    return compose([*WORDS, *words])


def examine(checkpoint: Path, root: Path, quant: str, options: list[str]) -> dict[str, str]:
    """Two steps with evaluations and a checkpoint, then every check. Returns the columns of a cell that works."""
    noise = () if "aqn=none" in options else ("aqn=constant", f"aqn.level={NOISE}")
    cfg = deepcopy(composed((f"quant={quant}", *noise, *options)))
    cfg.model.id, cfg.model.name, cfg.root = str(checkpoint), checkpoint.name, str(root)
    experiment = build(cfg)
    device = prepare_device(experiment.device, experiment.quant)
    with RunDir(experiment.run_dir, cfg) as run, set_up(experiment, experiment.engine, run, device) as setup:
        run_steps(setup, as_dict(cfg))
        policy = setup.policy
        check_training(run, bool(noise))
        check_adapter(experiment, policy, setup.engine)
        check_resume(experiment, run, policy)
        stock = stock_model(checkpoint, policy)
        check_logits(policy, stock)
        norms = check_noise(policy, stock) if noise else 0
        return {
            "norms": f"{norms}/{len(policy.structure.blocks)}",
            "packed": f"{packed_share(policy.model):.2f}",
            "padding": "skipped" if policy.packing else "computed",
            "decoding": check_recorded(policy) or "recorded",
        }


def check_training(run: RunDir, noise: bool) -> None:
    """The random model earned something, the gradient is not zero, and trainer and sampler agree."""
    steps = [record for record in run.metrics() if record["kind"] == "train"]
    assert [record["step"] for record in steps] == [1, 2]
    for record in steps:
        assert 0 < record["reward/mean"] < 1 and record["reward/frac_zero_std"] == 0
        assert record["grad_norm"] > 0, "no gradient"
        gap = record["mismatch/kernel_logp_abs_max" if noise else "mismatch/logp_abs_max"]
        assert gap < CLOSE, f"sampler and trainer differ by {gap:.3g} nats"
        if noise:
            assert abs(record["aqn/sigma_realised"] / NOISE - 1) < 0.25, record["aqn/sigma_realised"]
            assert record["mismatch/noise_logp_abs_max"] > 10 * CLOSE, "noise changes no log-probability"


def check_adapter(experiment: Experiment, policy: Policy, engine: Any) -> None:
    """Every B of the adapter was trained, and the engine's completions are those of the adapted policy."""
    untrained = [
        name for name, tensor in policy.adapter_state().items() if "lora_B" in name and not tensor.abs().max() > 0
    ]
    assert not untrained, f"no gradient reached {', '.join(untrained)}"
    rollouts = engine.generate(
        experiment.task.eval_prompts(2), Sampling(samples=2, temperature=1.0, max_tokens=8, seed=0)
    )
    effect = check_completions(policy, rollouts)["adapter_effect"]
    assert effect > 1e-3, f"two steps changed log-probabilities by {effect:.3g} nats"


def check_resume(experiment: Experiment, run: RunDir, policy: Policy) -> None:
    """A fresh policy that reads the checkpoint computes the same numbers."""
    fresh = build_policy(experiment, None, "cpu")
    untrained = token_scores(fresh)
    load_checkpoint(run.path, run, fresh, make_optimizer(fresh, experiment.optim))
    found, wanted = token_scores(fresh), token_scores(policy)
    assert not torch.equal(untrained, wanted)
    assert torch.equal(found, wanted), f"a resumed policy differs by {(found - wanted).abs().max():.3g} nats"


def probe_batch(policy: Policy) -> Batch:
    """Random sequences of 20 to 32 tokens; the first token of each is its prompt."""
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(0, 256, (length,), generator=generator).tolist() for length in (32, 20, 27, 25)]
    return make_batch([row[:1] for row in rows], [row[1:] for row in rows], policy.pad_id, policy.device)


def token_scores(policy: Policy) -> torch.Tensor:
    """(2, tokens): log-probabilities and entropies of the probe batch, as the trainer computes them."""
    batch = probe_batch(policy)
    with torch.no_grad():
        stats = policy.token_stats(batch.input_ids, batch.mask, 1.0)
    return torch.stack([stats.logprobs[batch.mask], stats.entropy[batch.mask]])


def stock_model(checkpoint: Path, policy: Policy) -> PreTrainedModel:
    """transformers' own model of the checkpoint in FP32, with the weights that the packed layers of `policy` hold.

    Its attention is the one that the architecture's authors wrote, called eager: SDPA leaves soft-capping out.
    """
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, weight in dequantized(policy.model):
            model.get_parameter(prefixed(model, name)).copy_(weight)
    return model


def dequantized(model: torch.nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    """The packed weights by the names of the parameters that they replaced."""
    for path, module in model.named_modules():
        name = path.replace(".base_layer", "")
        if isinstance(module, PackedLinear):
            yield f"{name}.weight", module.dequantized()
        elif isinstance(module, PackedMatrices):
            experts = torch.stack([module.dequantized(expert) for expert in range(module.experts)])  # (E, N, K)
            yield name, experts.transpose(1, 2) if module.transposed else experts


def prefixed(model: PreTrainedModel, name: str) -> str:
    """`name` in a multimodal model, whose text part is `model.language_model`."""
    multimodal = hasattr(getattr(model, "model", None), "language_model")
    return name.replace("model.", "model.language_model.", 1) if multimodal else name


def check_logits(policy: Policy, stock: PreTrainedModel) -> None:
    """The base as the trainer computes it is the stock model with the same weights, one sequence at a time."""
    batch = probe_batch(policy)
    wanted = []
    with torch.no_grad():
        for row, mask in zip(batch.input_ids, batch.mask, strict=True):
            ids = row[: int(mask.nonzero().max()) + 1]
            logprobs = stock(input_ids=ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)  # (T - 1, V)
            entropy = torch.special.entr(logprobs.exp()).sum(-1)
            wanted.append(torch.stack([logprobs.gather(1, ids[1:, None])[:, 0], entropy]))
    with policy.without_adapter():
        found = token_scores(policy)
    gap = (found - torch.cat(wanted, 1)).abs().max()
    assert gap < CLOSE, f"trainer and transformers differ by {gap:.3g} nats"


def check_noise(policy: Policy, stock: PreTrainedModel) -> int:
    """Noise is in each norm of a block that feeds a matrix, and nowhere else. Returns how many there are."""
    clean = {name: parameter.detach().clone() for name, parameter in policy.model.named_parameters()}
    with policy.noise.for_rollout(1, 0):
        noisy = {name.rpartition(".")[0] for name in clean if not same(policy.model, name, clean[name])}
    assert all(same(policy.model, name, scale) for name, scale in clean.items()), "noise was not taken out again"
    expected = feeding_norms(stock)
    found = {prefixed(stock, name) for name in noisy}
    missing, others = sorted(expected - found), sorted(found - expected)
    assert found == expected, f"no noise at {missing}, which feed a matrix, and noise at {others}, which feed none"
    return len(noisy)


def same(model: torch.nn.Module, name: str, value: torch.Tensor) -> bool:
    owner, _, leaf = name.rpartition(".")
    return torch.equal(model.get_submodule(owner)._parameters[leaf], value)  # type: ignore[arg-type]


def feeding_norms(model: PreTrainedModel) -> set[str]:
    """The norms whose parent is a block and whose output, up to a factor, is what a module with a matrix reads.

    Found by comparing the numbers, not by following the model's structure.
    """
    outputs: list[tuple[str, torch.Tensor]] = []
    found: set[str] = set()
    hooks = []

    def after(name: str) -> Any:
        return lambda module, inputs, output: outputs.append((name, output.flatten(0, -2).double()))

    def before(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                found.update(name for name, output in outputs if is_multiple(value.double(), output))

    for name, module in model.named_modules():
        matrices = [parameter for parameter in module.parameters(recurse=False) if parameter.ndim >= 2]
        if re.fullmatch(r"(model\.language_model|model)\.layers\.\d+\.\w+", name) and norm_like(module):
            hooks.append(module.register_forward_hook(after(name)))
        elif matrices and not isinstance(module, torch.nn.Embedding):
            hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))
    with torch.no_grad():
        model(input_ids=torch.arange(12)[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    return found


def norm_like(module: torch.nn.Module) -> bool:
    return "norm" in type(module).__name__.lower() and module._parameters.get("weight") is not None


def is_multiple(value: torch.Tensor, output: torch.Tensor) -> bool:
    """Whether `value` (..., H) is c * `output` (T, H) for one number c."""
    if value.shape[-1] != output.shape[-1] or value.numel() != output.numel():
        return False
    value = value.reshape(output.shape)
    factor = (value * output).sum() / output.square().sum()
    return torch.allclose(value, factor * output, rtol=1e-4, atol=1e-6)


def check_recorded(policy: Policy) -> str | None:
    """Why decoding cannot be recorded on a GPU; None if it can, and then its tokens are those of transformers."""
    policy.fused = True
    reason = eager_reason(policy)
    policy.fused = False
    formats = [module.weight_format for module in policy.model.modules() if isinstance(module, PackedLinear)]
    has_kernels = any(weight_format.kernel_layout is not None for weight_format in formats)
    if reason is not None and not (has_kernels and reason in ONLY_ON_A_CPU):
        return reason
    prompts = [[7, 8, 9, 10], list(range(20, 40)), [5]]
    sampling = Sampling(samples=2, temperature=1.0, max_tokens=16, seed=1)
    with torch.inference_mode():
        found, wanted = (how(policy, prompts, sampling, list(range(6))) for how in (decode, hf_reference.decode))
    assert [tokens for tokens, *_ in found] == [tokens for tokens, *_ in wanted], "recorded decoding draws other tokens"
    left, right = (torch.tensor([x for _, logprobs, _ in rows for x in logprobs]) for rows in (found, wanted))
    gap = (left - right).abs().max()
    assert gap < CLOSE, f"recorded decoding differs by {gap:.3g} nats"
    return None
