"""Checks of the numbers that clipped algorithms have in common; no torch, so that specs can be built without it."""

from __future__ import annotations

from qerl_bench.checks import require


def require_clip(epsilon_low: float, epsilon_high: float, delta: float | None) -> None:
    """Raise ConfigError unless the clip widths make sense, and the cap on the ratio lies outside of them."""
    require(0 < epsilon_low < 1, f"algo.epsilon_low must be between 0 and 1, got {epsilon_low!r}")
    require(0 < epsilon_high < float("inf"), f"algo.epsilon_high must be positive, got {epsilon_high!r}")
    require(
        delta is None or 1 + epsilon_high < delta < float("inf"),
        f"algo.delta caps the ratio beyond the clip: it must be above 1 + epsilon_high = {1 + epsilon_high:g}, got "
        f"{delta!r}; for no cap use algo.delta=null",
    )


def require_advantage_eps(advantage_eps: float) -> None:
    """Raise ConfigError unless the number added to a standard deviation keeps the division defined."""
    require(
        0 < advantage_eps < float("inf"),
        f"algo.advantage_eps must be positive (it guards groups of nearly equal rewards), got {advantage_eps!r}",
    )
