"""TRL, verl and ours on the same answers, rewards and first adapter: what each computes, and which definitions differ.

    python benchmarks/beside_trainers.py [--page docs/algorithms/peers.md] [--out FILE.csv]

On a CPU, in a minute. Without verl (`peer_trainers.py` says what it needs) its rows are left out, and the page is not
written. Exit code 1 if ours, given a peer's options, has another gradient than that peer.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from equal_data import Numbers, Ours, apart
from peer_trainers import trl, verl

MARKS = ("<!-- table of benchmarks/beside_trainers.py: {} -->\n", "<!-- end of table -->")
PAGE = Path(__file__).resolve().parents[1] / "docs" / "algorithms" / "peers.md"
TOLERANCE = 1e-5  # of the norm of a gradient in FP32
EQUAL = [0.7] * 8 + [1.0, 0.0] * 4  # two groups of eight, the first of equal rewards that are no sum of powers of two
PEERS: dict[str, Callable[..., Numbers]] = {"TRL": trl, "verl": verl}


@dataclass(frozen=True)
class Setting:
    """The same intention in the words of each, and the further words that make ours the peer's."""

    ours: tuple[str, ...]
    fields: dict[str, dict[str, Any]]  # by peer: fields of its config, and what `peer_trainers.py` adds
    matching: dict[str, tuple[str, ...]] = field(default_factory=dict)


AS_VERL = ("algo.advantage_eps=1e-6", "algo.delta=3")
TOKEN_MEAN = ("algo=dapo", "algo.max_resampling_rounds=0", "algo.overlong_share=0", "algo.epsilon_high=0.2")
SETTINGS = {
    "GRPO": Setting(
        ("algo=grpo", "kl.coef=0.04"),
        {
            "TRL": {"loss_type": "grpo", "beta": 0.04},
            "verl": {"loss_agg_mode": "seq-mean-token-mean", "use_kl_loss": True, "kl_loss_coef": 0.04},
        },
        {"TRL": (), "verl": (*AS_VERL, "kl.ratio_weighted=false")},
    ),
    "Dr. GRPO": Setting(
        ("algo=dr_grpo",),
        {
            "TRL": {"loss_type": "dr_grpo", "scale_rewards": "none"},
            "verl": {"loss_agg_mode": "seq-mean-token-sum-norm", "normalized": False},
        },
        {"TRL": (), "verl": ("algo.delta=3",)},
    ),
    "DAPO": Setting(
        ("algo=dapo", "algo.overlong_share=0.25"),
        {
            "TRL": {"loss_type": "dapo", "epsilon_high": 0.28, "soft_overlong": 3},
            "verl": {"clip_ratio_high": 0.28, "clip_ratio_c": 10.0, "buffer": 3, "filtered": True},
        },
        {"TRL": ("algo.max_resampling_rounds=0",), "verl": ("algo.advantage_eps=1e-6", "algo.delta=10")},
    ),
    "defaults": Setting((), {"TRL": {}, "verl": {}}, {"TRL": TOKEN_MEAN, "verl": (*TOKEN_MEAN, *AS_VERL)}),
}
PARTS = 4


class Comparison:
    """The numbers of every setting and trainer, each computed once."""

    def __init__(self, folder: Path, peers: Sequence[str]) -> None:
        self.peers = peers
        self.model = Ours(folder)
        self.answers = self.model.answers()
        self.of_ours = cache(partial(self.model.numbers, self.answers))
        self.peer = cache(self._peer)

    def _peer(self, name: str, setting: str, parts: int = 1, **more: Any) -> Numbers:
        """A peer's in a setting, with `more` fields of its config."""
        return PEERS[name](self.model, self.answers, SETTINGS[setting].fields[name] | more, parts)

    def ours(self, setting: str, parts: int = 1) -> Numbers:
        return self.of_ours(SETTINGS[setting].ours, parts)

    def matched(self, name: str, setting: str) -> float:
        """How far apart the gradients of a peer and of ours with its options are, the larger of two."""
        words = (*SETTINGS[setting].ours, *SETTINGS[setting].matching[name])
        pair = self.peer(name, setting).gradient, self.of_ours(words).gradient
        return max(apart(one, other) for one, other in zip(*pair, strict=True))

    def rows(self) -> list[dict[str, Any]]:
        found = []
        for setting in SETTINGS:
            for name in (*self.peers, "ours"):
                one, split = (
                    self.ours(setting, parts) if name == "ours" else self.peer(name, setting, parts)
                    for parts in (1, PARTS)
                )
                found.append({
                    "setting": setting, "trainer": name, "advantage": max(map(abs, one.advantages)),
                    "loss": one.loss[0], "gradient": one.norm[0], "moved_loss": one.loss[1],
                    "moved_gradient": one.norm[1], "clipped": one.clipped, "entropy": one.entropy, "kl": one.kl,
                    "dead": one.dead, "tokens": one.tokens, "split": apart(split.gradient[0], one.gradient[0]),
                    "matched": 0.0 if name == "ours" else self.matched(name, setting),
                })  # fmt: skip
        return found

    def terms(self) -> list[tuple[str, str, str, str, str]]:
        """Term, the definitions of TRL, verl and ours, and what the difference is on these answers."""
        first: Callable[[Numbers], torch.Tensor] = lambda one: one.gradient[0]  # noqa: E731
        default, dapo = self.peer("TRL", "defaults"), self.peer("TRL", "DAPO")
        masked = self.peer("TRL", "DAPO", mask_truncated_completions=True)
        unweighted = self.peer("TRL", "GRPO", use_bias_correction_kl=False)
        uncapped = self.peer("verl", "defaults", clip_ratio_c=1e9)
        capped = self.peer("verl", "defaults")
        continued = trl(self.model, self.answers, {"beta": 0.04}, continued=True)
        equal = self.equal()
        means = {mode: self.peer("verl", "defaults", loss_agg_mode=mode) for mode in MODES}
        size = max(map(abs, default.advantages))
        return [
            ("standard deviation of a group", "+ 1e-4", "+ 1e-6", "+ `algo.advantage_eps`, 1e-4",
             f"advantages of verl {max(map(abs, capped.advantages)) / size - 1:.3%} larger"),
            ("equal rewards in a group (here eight of 0.7)", "the rounding error of their mean is divided",
             "likewise", "advantage 0, by comparison",
             "; ".join(f"{name}: {value:.1e}, {dead} of 2 groups dead" for name, (value, dead) in equal.items())),
            ("mean of the loss, by default", "tokens (`loss_type=dapo`)", "tokens (`token-mean`)",
             "tokens of each answer, then answers (`algo=grpo`)",
             f"gradients {apart(first(self.ours('defaults')), first(default)):.0%} apart"),
            ("length in Dr. GRPO", "`max_completion_length`",
             "longest answer of a micro-batch, unless `loss_scale_factor`", "`algo.length_limit`",
             f"verl in {PARTS} micro-batches: gradient "
             f"{apart(first(self.peer('verl', 'Dr. GRPO', PARTS)), first(self.peer('verl', 'Dr. GRPO'))):.0%} off"),
            ("dead groups in DAPO", "kept, and their tokens counted", "replaced (`filter_groups`)",
             "replaced (`algo.max_resampling_rounds`)",
             f"gradient of TRL x{dapo.norm[0] / self.ours('DAPO').norm[0]:.2f}, "
             f"{dapo.tokens} tokens for {self.ours('DAPO').tokens}"),
            ("truncated answers", "trained on; `mask_truncated_completions` takes their tokens out",
             "trained on", "trained on",
             f"the option of TRL: {dapo.tokens - masked.tokens} tokens fewer, gradient "
             f"{apart(first(masked), first(dapo)):.0%} off; the answer still counts in its group's mean"),
            ("bound of the ratio where A < 0", "none; `delta`", "`clip_ratio_c=3`", "none; `algo.delta`",
             f"none in the first update; after the move verl's gradient is {capped.norm[1]:.3g} with its bound, "
             f"{uncapped.norm[1]:.3g} without"),
            ("KL penalty", "k3 x ratio (`use_bias_correction_kl`)", "k3 (`low_var_kl`)",
             "k3 x ratio (`kl.ratio_weighted`)",
             f"gradient with and without the ratio {apart(first(unweighted), first(self.peer('TRL', 'GRPO'))):.2%} "
             "apart"),
            ("what the KL is from", "the base; the first adapter, if the model that it is given has one",
             "the base (`disable_adapter`)", "the base",
             f"TRL: {self.peer('TRL', 'GRPO').kl:.3f}, with the adapter given {continued.kl:.3f}"),
            ("entropy that is reported", "mean over tokens, of each micro-batch", "by `loss_agg_mode`",
             "mean over tokens (`entropy_clean`)",
             f"{default.entropy:.3f} in TRL, {self.ours('defaults').entropy:.3f} in ours; verl: "
             + ", ".join(f"{one.entropy:.3f} by `{mode}`" for mode, one in means.items())),
            ("KL that is reported", "mean over tokens", "by `loss_agg_mode`", "mean over tokens (`kl`)",
             f"{self.peer('TRL', 'GRPO').kl:.3f}, {self.peer('verl', 'GRPO').kl:.3f}, {self.ours('GRPO').kl:.3f}"),
        ]  # fmt: skip

    def equal(self) -> dict[str, tuple[float, str]]:
        """The largest advantage in a group of equal rewards, and how many groups are called dead."""
        answers = self.model.answers(EQUAL, group=8)
        found = {name: PEERS[name](self.model, answers, {}) for name in PEERS}
        found["ours"] = self.model.numbers(answers, ["algo=grpo"])
        counts = {name: "-" if math.isnan(one.dead) else f"{2 * one.dead:g}" for name, one in found.items()}
        return {name: (max(map(abs, one.advantages[:8])), counts[name]) for name, one in found.items()}


MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm")
HEADINGS = {
    "setting": "setting", "trainer": "trainer", "advantage": "largest advantage", "loss": "loss",
    "gradient": "gradient", "moved_loss": "loss, moved", "moved_gradient": "gradient, moved", "clipped": "clipped",
    "entropy": "entropy", "kl": "KL", "dead": "dead groups", "tokens": "tokens",
    "split": f"{PARTS} micro-batches", "matched": "from ours, matched",
}  # fmt: skip


def shown(key: str, value: Any) -> str:
    if isinstance(value, str | int):
        return str(value)
    if math.isnan(value):
        return "-"
    if key in ("split", "matched"):
        return "equal" if value < TOLERANCE else f"{value:.1%}"
    return f"{value:.0%}" if key in ("clipped", "dead") else f"{value + 0.0:.4f}".replace("-0.0000", "0.0000")


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def number_table(rows: Sequence[dict[str, Any]]) -> str:
    return table([*HEADINGS.values()], [[shown(key, row[key]) for key in HEADINGS] for row in rows])


def term_table(terms: Sequence[Sequence[str]]) -> str:
    heads = ["term", f"TRL {version('trl')}", f"verl {version('verl')}", "ours", "on these answers"]
    return table(heads, terms)


def between(page: str, name: str, text: str) -> str:
    """`page` with `text` in the place of what stands behind the mark `name`."""
    start = page.index(MARKS[0].format(name)) + len(MARKS[0].format(name))
    return page[:start] + text + page[page.index(MARKS[1], start) :]


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--page", type=Path, nargs="?", const=PAGE, help="write the tables into this page")
    parser.add_argument("--out", type=Path, help="CSV file to write")
    options = parser.parse_args(words)
    torch.use_deterministic_algorithms(True)
    peers = [name for name in PEERS if find_spec(name.lower())]
    if options.page and len(peers) < len(PEERS):
        parser.error("the page has rows of TRL and verl, which are not both installed: see benchmarks/peer_trainers.py")
    with tempfile.TemporaryDirectory() as folder:
        comparison = Comparison(Path(folder), peers)
        rows = comparison.rows()
        terms = comparison.terms() if len(peers) == len(PEERS) else []
    print(number_table(rows), *([term_table(terms)] if terms else ["without verl: " + str(peers)]), sep="\n")
    if options.page:
        page = between(options.page.read_text(), "numbers", number_table(rows))
        options.page.write_text(between(page, "terms", term_table(terms)))
    if options.out:
        with options.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, [*HEADINGS])
            writer.writeheader()
            writer.writerows(rows)
    if wrong := [f"{row['setting']}, {row['trainer']}" for row in rows if row["matched"] > TOLERANCE]:
        sys.exit(f"gradients of ours with the peer's options differ: {'; '.join(wrong)}")


if __name__ == "__main__":
    main()
