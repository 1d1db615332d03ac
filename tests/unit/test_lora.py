"""A LoRA rank above the width of a layer is refused: from the config where that is known, or else from the layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from qerl_core.checks import ConfigError


@pytest.mark.parametrize(
    ("targets", "rank", "refused"),
    [
        (["q_proj", "down_proj"], 32, None),
        (["q_proj", "down_proj"], 33, "q_proj of model=tiny has 32, got 33"),
        (["down_proj"], 64, None),
        (["down_proj"], 65, "down_proj of model=tiny has 64, got 65"),
    ],
)
def test_the_rank_is_at_most_the_input_width(
    make_experiment: Callable[..., Any], targets: list[str], rank: int, refused: str | None
) -> None:
    experiment = make_experiment()  # widths 32 and 64
    lora = replace(experiment.lora, targets=targets, rank=rank)
    model, _ = experiment.model.load(None, "cpu")
    for check in (
        lambda: lora.check_with("model=tiny", experiment.model.config()),
        lambda: lora.target_modules(model, "model=tiny"),
    ):
        if refused is None:
            check()
        else:
            with pytest.raises(
                ConfigError, match=f"at most the input width .*{refused}.* Use a smaller one, or lora=none"
            ):
                check()


def test_a_width_that_is_not_known_yet_is_left_to_the_layers(make_experiment: Callable[..., Any]) -> None:
    lora = replace(make_experiment().lora, rank=10_000)
    lora.check_with("model=x", {})
    lora.check_with("model=x", {"intermediate_size": 10_000})
    with pytest.raises(ConfigError, match="down_proj of model=x has 9999"):
        lora.check_with("model=x", {"intermediate_size": 9_999})
