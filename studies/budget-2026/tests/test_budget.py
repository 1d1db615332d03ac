"""The page of precision budgets: its shares, its figure, and keys that are rounded without their biases."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qerl_bench.config import build, compose
from qerl_bench.model_setup import base_checkpoint, build_policy
from qerl_core.checks import ConfigError
from tests.scripts import ROOT, script

PLACE = "studies/budget-2026"
PAGE, KEYS = script(f"{PLACE}/budget.py"), script(f"{PLACE}/key_biases.py")


@pytest.mark.parametrize("name", PAGE.MODELS)
def test_shares_sum_to_the_rise_with_and_without_keys(name: str) -> None:
    record = PAGE.read(ROOT / PLACE / "data" / name)
    assert len(record["copies"]) == 3
    for cells in record["copies"].values():
        for _, parts in PAGE.SETTINGS:
            for measure in PAGE.measures_of(record["copies"]):
                rise = cells[PAGE.cell_name(parts)][measure] - cells["none"][measure]
                assert sum(PAGE.shapley(cells, parts, measure).values()) == pytest.approx(rise, abs=1e-9)


def test_the_pages_are_those_of_the_data(tmp_path: Path) -> None:
    records = {name: PAGE.read(ROOT / PLACE / "data" / name) for name in PAGE.MODELS}
    assert PAGE.page(records) == (ROOT / PLACE / "results" / "shares.md").read_text()
    first, second = PAGE.figure({name: records[name] for name in PAGE.DRAWN}).axes[:2]
    assert first.get_ylim() == second.get_ylim()


def test_a_copy_that_lacks_cells_is_refused(tmp_path: Path) -> None:
    for name in ("record.json", "budget.csv"):
        lines = (ROOT / PLACE / "data" / "05b" / name).read_text().splitlines()
        (tmp_path / name).write_text("\n".join(lines if name == "record.json" else lines[:-1]))
    with pytest.raises(ConfigError, match="copies 2 have not 64 cells"):
        PAGE.read(tmp_path)


@pytest.fixture
def policy(tmp_path: Path) -> Any:
    """A small model with a bias of its keys that is far larger than they are."""
    words = [
        "experiment=smoke",
        "device=cpu",
        "train.kv=nvfp4",
        "model.dtype=float32",
        "kernel=torch",
        f"root={tmp_path}",
    ]
    experiment: Any = build(compose(words))
    base = base_checkpoint(experiment.model, experiment.task, experiment.root)
    policy: Any = build_policy(experiment, base, "cpu")
    draw = torch.Generator().manual_seed(0)
    for name, module in policy.model.named_modules():
        if name.endswith("k_proj"):
            module.bias.data = 30 * torch.randn(module.bias.shape, generator=draw)
    return policy


def keys_of(policy: Any, biases: dict[int, Any] | None) -> list[torch.Tensor]:
    """What each layer would round, in a pass over two rows."""
    seen: list[torch.Tensor] = []

    def attended(layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(key)
        return key, value

    policy.kv.attended = attended
    ids = torch.arange(2, 26).view(2, 12)
    with torch.inference_mode():
        if biases is None:
            policy.model(input_ids=ids, use_cache=False)
        else:
            with KEYS.biases_apart(policy, biases):
                policy.model(input_ids=ids, use_cache=False)
    return seen


def test_what_is_rounded_is_the_key_without_its_bias(policy: Any) -> None:
    biases = KEYS.biases_of(policy.model)
    apart = keys_of(policy, biases)
    whole = keys_of(policy, None)
    for name, module in policy.model.named_modules():
        if name.endswith("layers.0.self_attn.k_proj"):
            module.bias.data.zero_()
    without = keys_of(policy, None)
    assert len(apart) == len(whole) == len(biases)
    torch.testing.assert_close(
        apart[0], without[0], atol=1e-4, rtol=1e-4
    )  # of the first layer, whose input is the same
    assert (apart[0] - whole[0]).abs().max() > 10


def test_rounding_without_biases_keeps_more_of_the_keys(policy: Any) -> None:
    from qerl_bench.probe.scoring import kl, scores

    text: Any = type("Text", (), {"prompt_ids": [*range(2, 10)], "token_ids": [*range(10, 26)]})
    policy.kv.kind, policy.kv.parts = "nvfp4", frozenset({"keys"})
    with torch.inference_mode():
        with policy.kv.off():
            known = scores(policy, [text])
        whole = kl(known, scores(policy, [text]))
        with KEYS.biases_apart(policy, KEYS.biases_of(policy.model)):
            apart = kl(known, scores(policy, [text]))
    assert 0 < apart < whole / 3


def test_a_model_without_biases_is_refused() -> None:
    model: Any = torch.nn.ModuleDict({"k_proj": torch.nn.Linear(4, 4, bias=False)})
    model.config = SimpleNamespace(hidden_size=4, num_attention_heads=1)
    with pytest.raises(ConfigError, match="have no biases"):
        KEYS.biases_of(model)
