"""A precision budget: a policy with each subset of its parts in few bits, a cell, on the same texts and on its own.

Parts are what a 4-bit model may round: weights of packed layers, their inputs, keys, values, the head's matrix and the
scales of norms. One policy serves all cells; what a part rounds is put in its place for as long as a cell is measured.
The texts are the answers of the cell in which nothing is rounded. Left out: mixtures of experts, quantizers that move
scales between layers, and fused kernels, which know nothing of cells.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain, combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qerl_bench.config import build, compose
from qerl_bench.experiment_spec import Experiment
from qerl_bench.model.digest import digest_of, name_of_base
from qerl_bench.model.lm_head import decoder_of
from qerl_bench.model.policy import Policy
from qerl_bench.model_setup import base_checkpoint, build_policy
from qerl_bench.probe.answers import AnswerSet, sample_answers
from qerl_bench.probe.one_model import UNTOLD, probe_plan
from qerl_bench.probe.parts import Keep, Parts, kept_answers
from qerl_bench.probe.scoring import acceptance, entropy, kl, passes, scores
from qerl_bench.quant.base import ACTIVATIONS, KEYS_AND_VALUES, BlockFormat
from qerl_bench.quant.linear import PackedLinear
from qerl_bench.run_setup import prepare_device
from qerl_core.checks import require
from qerl_core.options.names import format_words
from qerl_core.process.arguments import unwritable
from qerl_core.process.progress import bar, phase
from qerl_core.records import Prompt, Rollout
from qerl_core.rundir.environment import environment
from qerl_core.rundir.locks import wait_for_lock
from qerl_core.rundir.stops import note_at_stop
from qerl_kernels.activations import round_blocks
from qerl_studies.probes.budget import KEYS, MEASURES, cell_name

Matrices = Mapping[tuple[torch.nn.Module, str], torch.Tensor]  # by module and name of its parameter


def experiments_of(words: Sequence[str], formats: Sequence[str], parts: Collection[str]) -> tuple[Experiment, ...]:
    """The experiment of each of two formats. Raises ConfigError where a part cannot be in the second.

    The first is of unpacked weights.
    """
    require(len(formats) == 2, f"budget compares two formats, formats=bf16,nvfp4 say, got {','.join(formats)}")
    plain, few = (build(compose([*words, *format_words(name), "kernel=torch"])) for name in formats)
    kind = few.quant.name
    require(
        plain.quant.bits_per_weight is None and isinstance(few.quant, BlockFormat),
        f"budget goes from unpacked weights to packed ones, formats=bf16,nvfp4 say, got {','.join(formats)}",
    )
    require(
        plain.engine.name == "hf",
        f"a budget swaps weights of the policy that samples, which engine={plain.engine.name} has a copy of: use "
        "engine=hf",
    )
    require(
        not few.quantizer.rescales,
        f"formats={formats[1]} moves scales between layers and norms, which are parts of their own in a budget. Use "
        "a quantizer that does not: rtn, mse or gptq",
    )
    for part, known in {"inputs": ACTIVATIONS, "keys": KEYS_AND_VALUES, "values": KEYS_AND_VALUES}.items():
        require(
            part not in parts or kind in known,
            f"budget={part} rounds them to {kind}, and there is {', '.join(known)}. Leave {part} out, or choose "
            "another second format",
        )
    if KEYS & {*parts}:
        plain = build(compose([*words, *format_words(formats[0]), "kernel=torch", f"train.kv={kind}"]))
    return plain, few


class Cells:
    """The policy of a base in unpacked weights, `policy`, and what each of `parts` puts in its place."""

    def __init__(self, plain: Experiment, few: Experiment, parts: Sequence[str], device: str) -> None:
        base = base_checkpoint(plain.model, plain.task, plain.root)
        self.policy = build_policy(plain, base, device)
        self.kind, self.parts = few.quant.name, parts
        model = self.policy.model
        require(not self.policy.experts, "budget rounds linear layers, and the model has experts. Choose a dense model")
        packed = _packed_weights(build_policy(few, base, device))
        self.layers = [model.get_submodule(name) for name in packed]
        places: dict[str, Callable[[], Matrices]] = {
            "weights": lambda: {(model.get_submodule(name), "weight"): values for name, values in packed.items()},
            "head": lambda: _rounded(few.quant, [(_head(model), "weight")]),
            "norms": lambda: _rounded(few.quant, _norm_scales(model)),
        }
        self.switches: dict[str, Callable[[], Any]] = {
            **{part: partial(swapped, of()) for part, of in places.items() if part in parts},
            "inputs": self._rounding_inputs,
            **{part: partial(self._rounding_attention, part) for part in KEYS},
        }
        self.policy.kv.parts = frozenset()

    @contextmanager
    def cell(self, rounded: Collection[str]) -> Iterator[None]:
        """Context in which the parts `rounded` are in few bits."""
        with ExitStack() as stack:
            for part in rounded:
                stack.enter_context(self.switches[part]())
            yield

    @contextmanager
    def _rounding_inputs(self) -> Iterator[None]:
        def rounded(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            return (round_blocks(inputs[0], self.kind), *inputs[1:])

        handles = [layer.register_forward_pre_hook(rounded) for layer in self.layers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def _rounding_attention(self, part: str) -> Iterator[None]:
        kv, before = self.policy.kv, self.policy.kv.parts
        kv.parts = before | {part}
        try:
            yield
        finally:
            kv.parts = before


@contextmanager
def swapped(matrices: Matrices) -> Iterator[None]:
    """Context in which these parameters have other values."""
    before = {place: place[0]._parameters[place[1]] for place in matrices}
    try:
        for (module, name), values in matrices.items():
            module._parameters[name] = torch.nn.Parameter(values, requires_grad=False)
        yield
    finally:
        for (module, name), parameter in before.items():
            module._parameters[name] = parameter


def _packed_weights(policy: Policy) -> dict[str, torch.Tensor]:
    layers = {name: module for name, module in policy.model.named_modules() if isinstance(module, PackedLinear)}
    return {name: layer.dequantized().to(policy.model.dtype) for name, layer in layers.items()}


def _head(model: Any) -> torch.nn.Module:
    """The module of the output matrix, which may be tied to the embedding."""
    head = model.get_output_embeddings()
    require(
        isinstance(head, torch.nn.Linear), "budget=head rounds an output matrix, and the model has none. Leave it out"
    )
    return head


def _norm_scales(model: torch.nn.Module) -> list[tuple[torch.nn.Module, str]]:
    """The scales of all norms of a decoder, as they are stored."""
    named = decoder_of(model).named_modules()  # type: ignore[arg-type]
    return [(module, "weight") for name, module in named if "norm" in name and "weight" in module._parameters]


def _rounded(few: Any, places: Sequence[tuple[torch.nn.Module, str]]) -> Matrices:
    """Each parameter in the format `few`, to nearest; a vector is a matrix of one row."""
    found = {}
    for module, name in places:
        weight = module.get_parameter(name).detach()
        rows = weight.view(-1, weight.shape[-1])
        few.check_width(f"{type(module).__name__}.{name}", rows.shape[1])
        packed = few.pack(rows)
        shape = (rows.shape[0], rows.shape[1])
        values = few.operand(packed, shape, torch.float32) * few.output_scale(packed)
        found[module, name] = values.view(weight.shape).to(weight.dtype)
    return found


def subsets(parts: Sequence[str]) -> list[tuple[str, ...]]:
    """All subsets of `parts`, the empty one first."""
    return list(chain.from_iterable(combinations(parts, size) for size in range(len(parts) + 1)))


@torch.inference_mode()
def measure_copy(
    plain: Experiment, few: Experiment, options: Any, device: str, prompts: Sequence[Prompt], keep: Keep
) -> dict[str, dict[str, float]]:
    """The numbers of each cell, by its name: on the texts, and on its own samples, means over tokens in nats.

    `texts_kl` is KL(unrounded || cell), `own_kl` KL(cell || unrounded), both over the whole vocabulary at temperature
    1; `texts_acceptance` is of a token that the cell drafts for the unrounded policy; `right` is by the last number of
    an answer where the task has one, else by its format. The policies are given back at the end, so that another copy
    has their memory.
    """
    cells = Cells(plain, few, options.budget, device)
    engine = plain.engine.build(cells.policy)

    def asked() -> AnswerSet:
        return sample_answers(plain.task, engine, prompts, 1.0, options.samples, "answers")

    texts = kept_answers(keep, "texts", plain.task, engine, prompts, 1.0, options.samples, "answers", device).rollouts
    found = {}
    for parts in bar(subsets(cells.parts), "measuring cells", 2 ** len(cells.parts), "cells"):
        name = cell_name(parts)
        found[name] = keep(name, partial(_numbers, cells, parts, asked, texts))
    engine.close()
    return found


def _numbers(
    cells: Cells, parts: Collection[str], asked: Callable[[], AnswerSet], texts: Sequence[Rollout]
) -> dict[str, float]:
    with cells.cell(parts):
        own = asked()
    texts_kl, _, texts_entropy, accepted = compared(cells, parts, texts)
    _, own_kl, own_entropy, _ = compared(cells, parts, own.rollouts)
    right = [row["correct"] if row["lenient"] is None else row["lenient"] for row in own.rows]
    return {
        "texts_kl": texts_kl,
        "texts_entropy": texts_entropy,
        "texts_acceptance": accepted,
        "own_kl": own_kl,
        "own_entropy": own_entropy,
        "right": sum(map(float, right)) / len(right),
        "tokens": float(sum(len(one.token_ids) for one in own.rollouts)),
    }


def compared(cells: Cells, parts: Collection[str], rollouts: Sequence[Rollout]) -> list[float]:
    """KL(unrounded || cell), KL(cell || unrounded), the entropy of the cell in nats, and the acceptance of its drafts.

    Means over all tokens. A pass is scored twice and given back before the next, so memory does not grow with them.
    """
    sums = np.zeros(4)
    for one in passes(rollouts):
        unrounded = scores(cells.policy, one)
        with cells.cell(parts):
            rounded = scores(cells.policy, one)
        there, back = kl(unrounded, rounded), kl(rounded, unrounded)
        sums += there, back, entropy(rounded), acceptance(unrounded, rounded)
    return (sums / sum(len(one.token_ids) for one in rollouts)).tolist()


def budget_of(options: Any, words: Sequence[str]) -> tuple[dict[str, Any], Path, Parts]:
    """The record of a budget, its folder, and the parts that it is of, to be deleted when it is written.

    With `options.copy` the record has that copy alone, and is no budget yet.
    """
    copies = [[f"model.dither={copy}"] for copy in range(options.copies)] or [[]]
    require(
        options.copies == 0 or hasattr(build(compose([*words])).model, "dither"),
        "copies draw anew what the rounding of a GGUF file has lost: give one, model=FILE.gguf, or leave copies out",
    )
    each = [experiments_of([*words, *more], options.formats, options.budget) for more in copies]
    plain, _ = each[0]
    plain.model.check_files()
    plain.task.check()
    device = prepare_device(plain.device, plain.quant)
    out = options.out or Path(plain.root) / "probes" / f"{plain.model.name}-{plain.task.name}"
    reason = unwritable(out)
    require(reason is None, f"cannot write to {out}: {reason}; give another folder, out=DIR")
    prompts = probe_plan(options).prompts_of(plain.task)
    digest = digest_of(plain.model, base_checkpoint(plain.model, plain.task, plain.root))
    asked = options.budget, options.samples, options.copies, digest, each, prompts
    parts = Parts(out, repr((asked, [*MEASURES])))
    record: dict[str, Any] = {
        "model": name_of_base(plain.model),
        "task": plain.task.name,
        "words": [*words],
        "parts": options.budget,
        "formats": options.formats,
        "questions": options.questions,
        "samples": options.samples,
        "max_completion_tokens": plain.task.max_completion_tokens,
        "environment": {key: value for key, value in environment(device).items() if key not in UNTOLD},
        "copies": {},
    }
    with note_at_stop(parts.stop_line):
        for number, (one, few) in enumerate(each):
            if options.copy not in (None, number):
                continue
            whose = f"copy {number}"
            lock = wait_for_lock(parts.folder / f"{whose}.lock", f"the measuring of {whose}")
            with phase(f"copy {number + 1} of {len(each)}"), lock:
                measured = known_copy(options.budget, parts, whose) or measure_copy(
                    one, few, options, device, prompts, parts.of(whose)
                )
            record["copies"][str(number) if options.copies else "file"] = measured
    return record, out, parts


def known_copy(budget: Sequence[str], parts: Parts, whose: str) -> dict[str, dict[str, float]]:
    """The numbers of each cell of a copy, if all are kept, else none: then nothing has to be built for it."""
    files = {cell_name(subset): f"{whose} {cell_name(subset)}" for subset in subsets(budget)}
    return {name: parts(file, dict) for name, file in files.items()} if all(map(parts.has, files.values())) else {}
