"""Four checks of a policy before its run, on a few tokens: does it compute what the model does, and as configured?

1. The trainer's log-probabilities are those of the model as transformers runs it: one sequence at a time, without
   adapter, kernels or packing, with eager attention and dequantized weights. Over the whole vocabulary this is checked
   in FP32, in which rounding is a thousand times smaller than the errors it looks for; then on tokens, with the dtype
   and kernels of the run, with gradient and without. Where rounding changes the choice of experts, 16 bits are far from
   FP32 in plain PyTorch too, so the limit grows with that distance.
2. In the trainer's forward pass too, each norm that gets noise feeds the layers that the probe found behind it.
3. What stays in 16 bits under a format that packs is named, and is at most 5 % of the matrices in the blocks that the
   run does not keep so (`quant.keep_first`, `quant.keep_last`).
4. The model calls every layer that has an adapter.

Inputs of packed layers are not rounded here (`quant.activations`): which code is nearest may depend on the last bit,
so that two ways to compute the same would differ. No check draws from the run's random numbers or leaves a trace in the
model. Each needs a fresh adapter, whose B is 0.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from qerl_bench.model.block import without_fused_blocks
from qerl_bench.model.context import longest_context
from qerl_bench.model.float32 import in_float32, replace_forward
from qerl_bench.model.lm_head import decoder_of, hidden_states
from qerl_bench.model.policy import Policy
from qerl_bench.model.rounded import unrounded
from qerl_bench.model.structure import consumers_of, observed, probe_ids
from qerl_bench.quant.base import BlockFormat, WeightFormat
from qerl_bench.quant.experts import PackedExperts
from qerl_bench.quant.linear import PackedLinear
from qerl_bench.quant.packed_share import decoder_blocks, packed_share, unpacked_parameters, weights_of
from qerl_core.checks import require

log = logging.getLogger(__name__)

LENGTHS = (80, 33, 21)  # tokens of the sequences
QUANTILE = 0.999  # of the gaps between log-probabilities
MAX_GAP = 0.01  # nats, of that quantile in FP32
MAX_TOKEN_GAP = {"torch.float32": 1e-3, "16 bit": 0.2}  # nats from FP32, mean over tokens in the dtype of the run
OWN_GAPS = 2  # the limit is at least this many times the gap of plain PyTorch in the same dtype
MIN_PACKED_SHARE = 0.95


def preflight(
    policy: Policy, quant: WeightFormat, where: str, compared: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The results of all checks, as plain data. Raises ConfigError, which names the model `where`, if one fails.

    The first is not made again where its results, `compared`, are known.
    """
    devices = [policy.device] if policy.device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.no_grad(), unrounded(policy):
        check_adapters(policy, where)
        results = check_packed_share(policy, quant, where) | check_sites(policy)
        results |= check_logprobs(policy, where) if compared is None else compared
    if devices:
        torch.cuda.empty_cache()  # of the conversions to FP32
    return results


# --- 1: log-probabilities ------------------------------------------------------------------------------------------


def check_logprobs(policy: Policy, where: str) -> dict[str, Any]:
    ids, mask = probe_batch(policy)
    with in_float32(policy):
        with stock(policy):
            expected = stock_logits(policy, ids, mask)
        gap = gap_quantile(trainer_logits(policy, ids, mask, policy.packing), expected)
        if not gap <= MAX_GAP and policy.packing:
            unpacked = gap_quantile(trainer_logits(policy, ids, mask, packing=False), expected)
            require(
                not unpacked <= MAX_GAP,
                f"train.packing=true mixes the sequences of a batch with {where}: {1 - QUANTILE:.1%} of the trainer's "
                f"log-probabilities are {gap:.3g} nats or more from the model's own, {unpacked:.2g} without packing "
                f"(limit {MAX_GAP}). Use train.packing=false",
            )
    require(
        gap <= MAX_GAP,
        f"the trainer does not compute what {where} computes in transformers: {1 - QUANTILE:.1%} of its "
        f"log-probabilities are {gap:.3g} nats or more from those of its own forward pass (limit {MAX_GAP}). Use "
        f"{instead_of(policy)}",
    )
    exact = of_tokens(expected, ids, mask)
    with stock(policy):
        own_gap = gaps(of_tokens(stock_logits(policy, ids, mask), ids, mask), exact).mean().item()
    token_gap = max(gaps(trainer_logprobs(policy, ids, mask, grad), exact).mean().item() for grad in (True, False))
    limit = max(MAX_TOKEN_GAP.get(str(policy.model.dtype), MAX_TOKEN_GAP["16 bit"]), OWN_GAPS * own_gap)
    require(
        token_gap <= limit,
        f"the trainer's log-probabilities of {where} in {policy.model.dtype} are {token_gap:.3g} nats from FP32 on "
        f"average, those of plain PyTorch {own_gap:.2g} (limit {limit:.2g}). Use kernel=torch",
    )
    log.info(
        "trainer against plain transformers: %.2g nats in FP32; as it runs %.2g from FP32, plain transformers %.2g",
        gap,
        token_gap,
        own_gap,
    )
    return {"logprob_gap_float32": gap, "logprob_gap_tokens": token_gap, "logprob_gap_tokens_plain": own_gap}


def instead_of(policy: Policy) -> str:
    """What to use instead of a model that two programs compute differently in FP32."""
    other = "another model"
    return other if policy.model.dtype == torch.float32 else f"model.dtype=float32, or {other}"


def probe_batch(policy: Policy) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded token ids (B, T) of sequences of LENGTHS, and the mask (B, T) of all tokens but the first."""
    ordinary = probe_ids(policy.model, 256)
    drawn = torch.randint(len(ordinary), (len(LENGTHS), max(LENGTHS)), generator=torch.Generator().manual_seed(0))
    longest = longest_context(policy.model) or max(LENGTHS)
    lengths = torch.tensor([min(length, longest) for length in LENGTHS], device=policy.device)
    columns = torch.arange(max(LENGTHS), device=policy.device)
    real = columns < lengths[:, None]
    return ordinary[drawn.to(policy.device)].where(real, policy.pad_id), real & (columns > 0)


def real_tokens(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mask (B, T) of the tokens that are no padding."""
    first = torch.arange(ids.shape[1], device=ids.device) == 0
    return mask | first


def trainer_logits(policy: Policy, ids: torch.Tensor, mask: torch.Tensor, packing: bool) -> torch.Tensor:
    """Logits (M, V) of the training pass at every token, one sequence after the other."""
    policy.train_mode(True)
    hidden = hidden_states(policy.model, ids, mask, real_tokens(ids, mask), packing)
    policy.train_mode(False)
    return policy.head(hidden)


def trainer_logprobs(policy: Policy, ids: torch.Tensor, mask: torch.Tensor, grad: bool) -> torch.Tensor:
    """Log-probability of each token where `mask` is true, as in training; kernels are others without gradient."""
    policy.train_mode(True)
    with torch.set_grad_enabled(grad):
        found = policy.token_stats(ids, mask, 1.0).logprobs[mask].detach()
    policy.train_mode(False)
    return found


def of_tokens(logits: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The same from `logits` (M, V) of all tokens that are no padding."""
    predicts = mask.roll(-1, dims=1)[real_tokens(ids, mask)]
    return torch.log_softmax(logits.float(), -1)[predicts].gather(1, ids[mask][:, None])[:, 0]


def stock_logits(policy: Policy, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`trainer_logits` by the model's own forward pass of each sequence; for use inside `stock`."""
    sequences = [row[None, real] for row, real in zip(ids, real_tokens(ids, mask), strict=True)]
    return torch.cat([policy.model(input_ids=sequence, use_cache=False).logits[0] for sequence in sequences])


def gap_quantile(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """The QUANTILE of |difference| between the log-probabilities of both, over all tokens and the whole vocabulary."""
    left, right = torch.log_softmax(logits.float(), -1), torch.log_softmax(expected.float(), -1)
    all_gaps = gaps(left, right).flatten()
    return all_gaps.kthvalue(max(1, int(QUANTILE * len(all_gaps)))).values.item()


def gaps(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """|left - right|: 0 where both are -inf (ruled-out tokens) or NaN (which sampling reports), inf if only one is."""
    same = (left == right) | (left.isnan() & right.isnan())
    return torch.where(same, 0.0, (left - right).abs().nan_to_num(torch.inf))


@contextmanager
def stock(policy: Policy) -> Iterator[None]:
    """Context in which the model runs as transformers has it: see the first check."""
    decoder = decoder_of(policy.model)
    attention = decoder.config._attn_implementation or "eager"
    with ExitStack() as stack:
        stack.enter_context(policy.without_adapter())
        stack.enter_context(without_fused_blocks(policy.model))
        for module in policy.model.modules():
            if isinstance(module, PackedLinear):
                replace_forward(stack, module, _dequantized_linear(module))
            elif isinstance(module, PackedExperts):
                replace_forward(stack, module, _dequantized_experts(module))
        if decoder._can_set_attn_implementation():
            decoder.set_attn_implementation("eager")
            stack.callback(decoder.set_attn_implementation, attention)
        yield


def _dequantized_linear(layer: PackedLinear) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: torch.nn.functional.linear(x, layer.dequantized().to(x.dtype), layer.bias)


def _dequantized_experts(experts: PackedExperts) -> Callable[..., torch.Tensor]:
    """The forward pass of the experts' own class, with its parameters rebuilt for the call."""
    kind = next(kind for kind in type(experts).__mro__ if not issubclass(kind, PackedExperts))

    def forward(x: torch.Tensor, *args: Any) -> torch.Tensor:
        parameters = dict(experts._parameters)
        for name, matrices in experts.matrices().items():
            parameters[name] = matrices.parameter(x.dtype)  # type: ignore[assignment]
        modules = {name: child for name, child in experts._modules.items() if name not in parameters}
        plain: Any = object.__new__(kind)
        plain.__dict__ = experts.__dict__ | {"_parameters": parameters, "_modules": modules}
        return inspect.unwrap(kind.forward)(plain, x, *args)  # not transformers' choice of a faster one

    return forward


# --- 2: norm sites -------------------------------------------------------------------------------------------------


def check_sites(policy: Policy) -> dict[str, Any]:
    model, structure = policy.model, policy.structure
    ids, mask = probe_batch(policy)
    policy.train_mode(True)
    with without_fused_blocks(model), observed(model, structure.blocks) as reads:
        hidden = hidden_states(model, ids, mask, mask, policy.packing)
        policy.head(hidden)
    policy.train_mode(False)
    consumers = {name: consumers_of(read) for name, read in reads.items()}
    sites = {site.name: site for site in (*structure.sites, *([structure.final] if structure.final else []))}
    noisy = policy.noise.norms if policy.noise.spec.where == "norms" else {}
    for name in noisy:
        site = sites[name]
        wrong = set(site.consumers) ^ set(consumers.get(name, ()))
        require(
            not wrong,
            f"aqn: {name} gets noise because it feeds {', '.join(site.consumers)}, but in training it feeds "
            f"{', '.join(consumers.get(name, ())) or 'nothing'}. Use aqn=none",
        )
    left_out = {name: layers for name, layers in consumers.items() if layers and name not in noisy}
    if noisy:
        log.info("%d norms can get noise: %s", len(noisy), grouped_paths(noisy))
        for name, layers in left_out.items():
            log.debug("no noise on %s, which feeds %s", name, ", ".join(layers))
        if left_out:
            log.info("%d norms that feed layers get none: %s", len(left_out), grouped_paths(left_out))
    routers = [router for site in structure.sites for router in site.routers]
    return {
        "norms_with_noise": {name: sites[name].consumers for name in noisy},
        "norms_without_noise": left_out,
        "routers": routers,
    }


# --- 3 and 4: what is packed and adapted ------------------------------------------------------------------------------


def check_adapters(policy: Policy, where: str) -> None:
    adapted = {name for name, module in policy.model.named_modules() if hasattr(module, "base_layer")}
    without_effect = sorted(adapted.intersection(policy.structure.read))
    leaves, others = (sorted({name.rpartition(".")[2] for name in names}) for names in (without_effect, adapted))
    rest = [leaf for leaf in others if leaf not in leaves]
    require(
        not without_effect,
        f"an adapter on {grouped_paths(without_effect)} has no effect: {where} reads the weights of these layers "
        f"instead of calling them. Use lora.targets=[{','.join(rest)}]",
    )


def check_packed_share(policy: Policy, quant: WeightFormat, where: str) -> dict[str, Any]:
    if not isinstance(quant, BlockFormat):
        return {}
    share, unpacked = packed_share(policy.model), unpacked_parameters(policy.model)
    blocks = policy.structure.blocks
    wanted = tuple(f"{blocks[number]}." for number in quant.kept(len(blocks)))
    others = sum(size for name, size in unpacked.items() if not name.startswith(wanted))
    packed = sum(map(weights_of, decoder_blocks(policy.model)[1].modules()))
    if unpacked:
        log.info("%.2f %% of the blocks' weights stay in 16 bits: %s", 100 * (1 - share), grouped_paths(unpacked))
    require(
        others <= (1 - MIN_PACKED_SHARE) * (packed + others) or quant.partial,
        f"quant={quant.name} packs {share:.0%} of the weights in the blocks of {where}, less than "
        f"{MIN_PACKED_SHARE:.0%}; in 16 bits stay {grouped_paths(unpacked)}. Use quant.partial=true, or quant=bf16",
    )
    return {"packed_share": share, "unpacked": unpacked}


def grouped_paths(names: Any) -> str:
    """Module paths in short: those that differ in the number of the block alone count as one."""
    kinds = Counter(re.sub(r"\.\d+\.", ".*.", name) for name in names)
    return ", ".join(f"{kind} ({count})" if count > 1 else kind for kind, count in kinds.items())
