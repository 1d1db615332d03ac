"""`qerl-bench probe budget=`: cells against policies with the same options, Shapley shares by hand."""

from __future__ import annotations

import csv
import gc
import itertools
import json
import math
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qerl_bench.commands.probe import main
from qerl_bench.config import build, compose
from qerl_bench.model_setup import build_policy
from qerl_bench.probe import budget, scoring
from qerl_bench.probe.budget import Cells, compared, experiments_of, subsets
from qerl_bench.probe.scoring import acceptance, entropy, kl, passes, scores
from qerl_core.checks import ConfigError
from qerl_core.records import Rollout
from qerl_core.rundir.locks import lock
from qerl_kernels import nvfp4
from qerl_studies.probes import budget_page
from qerl_studies.probes.budget import (
    MEASURES,
    NAMES,
    NOTHING,
    alone,
    cell_name,
    last,
    measures_of,
    over_copies,
    shapley,
    whole,
)
from tests.models import gguf_files

IDS = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26]
WORDS = (
    "task=arithmetic",
    "device=cpu",
    "model=tiny_untrained",
    "model.hidden_size=64",
    "model.heads=2",
    "model.layers=2",
)


# --- shares -----------------------------------------------------------------------------------------------------------


def _cells(parts: tuple[str, ...], value: Callable[[frozenset[str]], float]) -> dict[str, dict[str, float]]:
    return {cell_name(chosen): dict.fromkeys(MEASURES, value(frozenset(chosen))) for chosen in subsets(parts)}


def test_shares_sum_to_the_whole_and_are_the_mean_over_all_orders() -> None:
    draw = random.Random(0)
    drawn: dict[frozenset[str], float] = {}
    cells = _cells(NAMES, lambda chosen: drawn.setdefault(chosen, draw.gauss(0, 1)))
    assert len(cells) == 64
    found = shapley(cells, NAMES, "texts_kl")
    assert math.fsum(found.values()) == pytest.approx(drawn[frozenset(NAMES)] - drawn[frozenset()], abs=1e-12)
    rises: dict[str, list[float]] = {part: [] for part in NAMES}
    for order in itertools.permutations(NAMES):
        for place, part in enumerate(order):
            rises[part].append(drawn[frozenset(order[: place + 1])] - drawn[frozenset(order[:place])])
    for part in NAMES:
        assert found[part] == pytest.approx(math.fsum(rises[part]) / len(rises[part]), abs=1e-12)


def test_parts_that_add_up_have_what_each_brings_and_a_pair_halves_what_it_brings_together() -> None:
    brings = dict(zip(NAMES, (5.0, -1.0, 0.0, 2.5, 0.25, 1e-3), strict=True))
    cells = _cells(NAMES, lambda chosen: 7 + sum(brings[part] for part in chosen))
    for of in (shapley, alone, last):
        assert of(cells, NAMES, "own_kl") == pytest.approx(brings, abs=1e-12)
    cells = _cells(NAMES, lambda chosen: 4.0 * ({"keys", "values"} <= chosen))
    assert shapley(cells, NAMES, "own_kl") == pytest.approx(dict.fromkeys(NAMES, 0) | {"keys": 2, "values": 2})
    assert set(alone(cells, NAMES, "own_kl").values()) == {0} and last(cells, NAMES, "own_kl")["keys"] == 4


def test_intervals_are_over_copies_and_a_table_that_was_written_gives_the_page_again() -> None:
    parts = ("weights", "keys")
    copies = {}
    for copy in range(3):
        cells = _cells(parts, lambda chosen, copy=copy: len(chosen) * (1 + copy))
        copies[str(copy)] = {name: {**one, "tokens": 9.0} for name, one in cells.items()}
    record = {
        "parts": parts,
        "copies": copies,
        "model": "m",
        "formats": ["bf16", "nvfp4"],
        "questions": 2,
        "samples": 1,
    }
    record |= {"task": "t", "max_completion_tokens": 3, "environment": {"gpu": None, "cpu": "a CPU"}}
    share = over_copies(record, shapley, "texts_kl")["keys"]
    assert (share.value, share.n) == (2.0, 3) and share.half_width == pytest.approx(4.303 / math.sqrt(3), rel=1e-3)
    assert whole(record, "texts_kl").value == 4.0
    again = record | {"copies": budget_page.read_table(budget_page.table(record))}
    assert budget_page.markdown(again) == budget_page.markdown(record)
    earlier = "\n".join(",".join(row[:4] + row[5:]) for row in csv.reader(budget_page.table(record).splitlines()))
    assert MEASURES.keys() - measures_of(budget_page.read_table(earlier)) == {"texts_acceptance"}
    assert "| keys | +2.0000 [-0.4841, +4.4841] | 50% |" in budget_page.markdown(record)


# --- cells ------------------------------------------------------------------------------------------------------------


def _scores(policy: Any) -> torch.Tensor:
    rollouts = rollouts_of((4, 12), (2, 9))
    with torch.inference_mode():
        longer, shorter = scores(policy, rollouts)
        for rollout, found in zip(rollouts, (longer, shorter), strict=True):  # whatever stands beside it
            torch.testing.assert_close(scores(policy, [rollout])[0], found, rtol=0, atol=1e-4)
    return longer


def test_each_cell_computes_what_the_options_of_a_run_compute() -> None:
    plain, few = experiments_of(WORDS, ("bf16", "nvfp4"), NAMES)
    cells = Cells(plain, few, NAMES, "cpu")
    arms = {
        (): ("quant=bf16",),
        ("weights",): ("quant=nvfp4",),
        ("weights", "inputs"): ("quant=nvfp4", "quant.activations=nvfp4"),
        ("keys", "values"): ("quant=bf16", "train.kv=nvfp4"),
        ("weights", "inputs", "keys", "values"): ("quant=nvfp4", "quant.activations=nvfp4", "train.kv=nvfp4"),
    }
    start = _scores(cells.policy)
    for parts, words in arms.items():
        policy = build_policy(build(compose([*WORDS, *words])), None, "cpu")
        with cells.cell(parts):
            torch.testing.assert_close(_scores(cells.policy), _scores(policy), rtol=0, atol=2e-4)
            assert not parts or (_scores(cells.policy) - start).abs().max() > 0.01
        assert torch.equal(_scores(cells.policy), start)  # and nothing is left of it
    found = {}
    for parts in subsets(("keys", "values", "inputs", "weights", "head")):
        with cells.cell(parts):
            found[parts] = _scores(cells.policy)
    pairs = itertools.combinations(found.values(), 2)
    assert not any(torch.equal(left, right) for left, right in pairs)  # each part acts in each cell


def test_head_and_norms_are_rounded_to_nearest_and_the_embedding_is_not() -> None:
    plain, few = experiments_of(WORDS, ("bf16", "nvfp4"), ("head", "norms"))
    cells = Cells(plain, few, ("head", "norms"), "cpu")
    model: Any = cells.policy.model
    with torch.no_grad():
        for number, layer in enumerate(model.model.layers):
            layer.input_layernorm.weight.copy_(torch.linspace(0.5, 1.7 + number, 64))
    cells = _again(cells, few)
    embedding, scale = model.get_input_embeddings().weight.clone(), model.model.layers[1].input_layernorm.weight.clone()
    with cells.cell(("head", "norms")):
        for given, found in (
            (embedding, model.lm_head.weight),
            (scale[None], model.model.layers[1].input_layernorm.weight[None]),
        ):
            dtype = torch.bfloat16  # of the format's scales
            packed = nvfp4.encode(given.to(dtype), dtype, nvfp4.scales(given.to(dtype), dtype))
            operand = nvfp4.operand(packed["weight_packed"], packed["weight_scale"], torch.float32)
            torch.testing.assert_close(found, operand / packed["weight_global_scale"], rtol=1e-2, atol=1e-4)
            assert not torch.equal(found, given)
        assert torch.equal(model.get_input_embeddings().weight, embedding)
    assert torch.equal(model.lm_head.weight, embedding)
    assert torch.equal(model.model.layers[1].input_layernorm.weight, scale)


def _again(cells: Cells, few: Any) -> Cells:
    """Cells of a policy whose norms were changed after it was built."""
    places = budget._rounded(few.quant, budget._norm_scales(cells.policy.model))
    cells.switches["norms"] = lambda: budget.swapped(places)
    return cells


def test_kl_and_entropy_are_those_of_the_definition() -> None:
    p, q = (torch.log_softmax(torch.randn(5, 7, generator=torch.Generator().manual_seed(seed)), -1) for seed in (0, 1))
    by_hand = sum(
        math.exp(a) * (a - b) for x, y in zip(p.tolist(), q.tolist(), strict=True) for a, b in zip(x, y, strict=True)
    )
    assert kl([p[:2], p[2:]], [q[:2], q[2:]]) == pytest.approx(by_hand, rel=1e-5)
    assert entropy([p[:2], p[2:]]) == pytest.approx(-sum(math.exp(a) * a for x in p.tolist() for a in x), rel=1e-5)


def rollouts_of(*cuts: tuple[int, int]) -> list[Rollout]:
    """Prompts of IDS to the first number, completions to the second."""
    fields: Any = {"prompt": None, "sample": 0, "logprobs": [], "entropies": [], "text": "", "finished": True}
    return [Rollout(prompt_ids=IDS[:cut], token_ids=IDS[cut:end], **fields) for cut, end in cuts]


def test_a_pass_has_as_many_rollouts_as_memory_allows_and_numbers_do_not_depend_on_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rollouts = rollouts_of((4, 12), (2, 9), (3, 12), (1, 3))
    plain, few = experiments_of(WORDS, ("bf16", "nvfp4"), ("weights",))
    cells = Cells(plain, few, ("weights",), "cpu")
    found = []
    for tokens, sizes in ((48, [4]), (24, [2, 2]), (1, [1, 1, 1, 1])):
        monkeypatch.setattr(scoring, "TOKENS", tokens)
        assert [len(one) for one in passes(rollouts)] == sizes
        with torch.inference_mode():
            found.append(compared(cells, ("weights",), rollouts))
    with torch.inference_mode():
        before = scores(cells.policy, rollouts)
        with cells.cell(("weights",)):
            after = scores(cells.policy, rollouts)
    tokens = sum(len(one.token_ids) for one in rollouts)
    both = kl(before, after), kl(after, before)
    expected = [total / tokens for total in (*both, entropy(after), acceptance(before, after))]
    assert expected[0] > 0.001 and all(one == pytest.approx(expected, rel=1e-4) for one in found)


def test_the_policies_of_a_copy_are_given_back_before_the_next_is_built(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two 1.5B's would not fit where one does."""
    alive: list[Any] = []
    counts = []
    built = budget.build_policy

    def counted(*arguments: Any) -> Any:
        gc.collect()
        counts.append(sum(one() is not None for one in alive))
        policy = built(*arguments)
        alive.append(weakref.ref(policy))
        return policy

    monkeypatch.setattr(budget, "build_policy", counted)
    plain, few = experiments_of(WORDS, ("bf16", "nvfp4"), ("weights",))
    options: Any = SimpleNamespace(budget=("weights",), samples=1)
    for _ in range(2):
        budget.measure_copy(plain, few, options, "cpu", [], lambda name, make: make() if name == "texts" else {})
    assert counts == [0, 1, 0, 1]  # that of packed weights beside the other


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("budget=weights,heads", "each of budget must be one of weights, .*got 'heads'"),
        ("budget=keys,keys", "budget=keys,keys names one twice"),
        ("budget=keys formats=bf16", "budget compares two formats.*got bf16"),
        ("budget=keys formats=nvfp4,bf16", "from unpacked weights to packed ones"),
        ("budget=keys formats=bf16,nf4", "budget=keys rounds them to nf4.*Leave keys out"),
        ("budget=inputs formats=bf16,int4", "budget=inputs rounds them to int4.*Leave inputs out"),
        ("budget=weights formats=bf16,nvfp4+awq", "nvfp4.awq moves scales .*rtn, mse or gptq"),
        ("copies=2", "copies are of a budget"),
        ("copy=0", "copy is one of copies, from 0: copy=0 with copies=0 is none"),
        ("budget=weights formats=bf16,nvfp4 copies=2 copy=2", "copy=2 with copies=2 is none"),
        ("budget=weights formats=bf16,nvfp4 copies=2", "give one, model=FILE.gguf, or leave copies out"),
        ("budget=weights formats=bf16,nvfp4 copies=2 model.dither=7", "leave model.dither out"),
        ("budget=keys formats=bf16,nvfp4 rollout.kv=none", r"takes no rollout\.kv"),
        ("budget=weights formats=bf16,nvfp4 train.kv=fp8", r"takes no train\.kv: .*budget=keys,values"),
        ("budget=weights formats=bf16,nvfp4 aqn.sigma_start=0.5", "takes no aqn: a budget has no noise"),
        ("budget=weights formats=bf16,nvfp4 temperatures=1 rise=0", "leave out temperatures, rise"),
        ("budget=keys formats=bf16,nvfp4 engine=vllm", "engine=vllm has a copy of: use engine=hf"),
    ],
)
def test_what_cannot_be_measured_is_refused(words: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        main([*WORDS, *words.split(), f"out={tmp_path}"])


def test_the_command_writes_the_page_of_what_it_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one go, under a lock, for a process that measured the same writes it too."""
    found: list[bool] = []

    @contextmanager
    def locked(path: Path, _: str) -> Iterator[None]:
        found.append((path.parent / "budget.json").exists())
        yield
        found.append((path.parent / "budget.svg").exists() and not [*tmp_path.glob("parts-*")])

    monkeypatch.setattr("qerl_bench.commands.probe.wait_for_lock", locked)
    words = (*WORDS, "task.max_completion_tokens=5", "formats=bf16,nvfp4", "questions=2", "samples=1")
    main([*words, "budget=weights,keys", f"root={tmp_path}", f"out={tmp_path}"])
    assert found == [False, True]
    record = json.loads((tmp_path / "budget.json").read_text())
    (cells,) = record["copies"].values()
    assert set(cells) == {NOTHING, "weights", "keys", "weights+keys"}
    accepted = {name: one["texts_acceptance"] for name, one in cells.items()}
    assert accepted[NOTHING] == pytest.approx(1, abs=1e-6) and 0.5 < accepted["weights"] < 0.9999
    assert cells[NOTHING]["texts_kl"] == pytest.approx(0, abs=1e-9) and cells["weights+keys"]["texts_kl"] > 0
    assert cells[NOTHING]["own_entropy"] == cells[NOTHING]["texts_entropy"]  # the texts are its own samples
    page = (tmp_path / "budget.md").read_text()
    assert page == budget_page.markdown(record) and page in capsys.readouterr().out
    assert budget_page.read_table((tmp_path / "budget.csv").read_text()).keys() == record["copies"].keys()
    assert (tmp_path / "budget.svg").stat().st_size > 1000 and not [*tmp_path.glob("parts-*")]


def test_copies_that_processes_measure_are_gathered_without_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One of the two was stopped behind its texts, and goes on with these. The other is waited for."""
    file = gguf_files.write(tmp_path / "mini.gguf", gguf_files.model_of("qwen2"), "Q4_1")
    words = [f"model={file}", "task=arithmetic", "device=cpu", "task.max_completion_tokens=5", f"root={tmp_path}"]
    words += ["formats=bf16,nvfp4", "questions=2", "samples=1", "copies=2", "budget=weights,keys"]
    main([*words, f"out={tmp_path / 'one'}"])
    side_by_side = [*words, f"out={tmp_path / 'two'}"]
    main([*side_by_side, "copy=1"])
    assert "the same command without copy= writes the page" in capsys.readouterr().out
    numbers = budget._numbers
    with monkeypatch.context() as stopped:
        stopped.setattr(budget, "_numbers", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            main([*side_by_side, "copy=0"])
    texts = next((tmp_path / "two").glob("parts-*/copy 0 texts.json"))
    kept = texts.read_text()
    seen: list[Any] = []
    monkeypatch.setattr(budget, "_numbers", lambda *given: seen.append(given[-1]) or numbers(*given))
    main([*side_by_side, "copy=0"])
    assert texts.read_text() == kept
    told = json.loads(kept)["rollouts"]
    assert len(seen) == 4 and all(
        [one.token_ids for one in texts] == [one["token_ids"] for one in told] for texts in seen
    )
    assert not (tmp_path / "two" / "budget.json").exists()
    monkeypatch.setattr(budget, "build_policy", None)
    cell = texts.with_name("copy 1 weights+keys.json")
    last, other = cell.read_text(), lock(texts.with_name("copy 1.lock"))
    assert other is not None  # a process that has yet to measure this cell
    cell.unlink()
    ends = threading.Timer(0.5, lambda: (cell.write_text(last), other.close()))
    ends.start()
    main(side_by_side)
    ends.join()
    one, two = (json.loads((tmp_path / name / "budget.json").read_text()) for name in ("one", "two"))
    assert one["copies"] == two["copies"] and [*two["copies"]] == ["0", "1"]
    assert one["copies"]["0"] != one["copies"]["1"] and not [*(tmp_path / "two").glob("parts-*")]
