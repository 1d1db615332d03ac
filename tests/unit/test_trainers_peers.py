"""TRL, verl and ours on the same answers: numbers by hand, equal gradients, and the page. Needs the extra `peers`.

verl, which wants an older transformers than ours, is in no extra: `benchmarks/peer_trainers.py` says how to install it
beside it. Without it its tests are skipped.
"""

from __future__ import annotations

import importlib
import math
import warnings
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.peers, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
ROOT = Path(__file__).resolve().parents[2]
WANTED = {"TRL": "1.16.0", "verl": "0.9.1"}


@pytest.fixture(autouse=True)
def _as_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def require(peer: str) -> None:
    try:
        found = version(peer.lower())
    except PackageNotFoundError:
        found = "missing"
    if found != WANTED[peer]:
        pytest.skip(f"{peer} {WANTED[peer]} is {found}: benchmarks/peer_trainers.py says how to install it")


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    require("TRL")
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of libraries
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield importlib.import_module("beside_trainers")


@pytest.fixture(scope="module")
def found(bench: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    peers = [name for name in WANTED if importlib.util.find_spec(name.lower())]
    return bench.Comparison(tmp_path_factory.mktemp("adapters"), peers)


@pytest.mark.parametrize("setting", ["GRPO", "Dr. GRPO", "DAPO", "defaults"])
@pytest.mark.parametrize("peer", WANTED)
def test_ours_with_the_options_of_a_peer_is_the_peer(bench: Any, found: Any, peer: str, setting: str) -> None:
    require(peer)
    theirs, chosen = found.peer(peer, setting), bench.SETTINGS[setting]
    ours = found.of_ours((*chosen.ours, *chosen.matching[peer]))
    assert found.matched(peer, setting) < bench.TOLERANCE and min(theirs.norm) > 0.1
    assert ours.loss == pytest.approx(theirs.loss, abs=1e-6)
    assert ours.advantages == pytest.approx(theirs.advantages, abs=1e-6)
    assert ours.tokens == theirs.tokens


@pytest.mark.parametrize("setting", ["GRPO", "Dr. GRPO"])
def test_what_is_written_under_a_name_of_trl_is_what_trl_logs(bench: Any, found: Any, setting: str) -> None:
    from qerl_bench.config import compose
    from qerl_core.options.fingerprint import as_dict
    from qerl_studies.foreign.trl_names import trl_names

    words = bench.SETTINGS[setting].ours
    name, theirs = trl_names(as_dict(compose([*words]))), found.peer("TRL", setting).logged
    ours = {name(one): value for one, value in found.of_ours(words).logged.items()}
    common = ours.keys() & theirs.keys()
    expected = {
        "reward",
        "reward_std",
        "frac_reward_zero_std",
        "entropy",
        "clip_ratio/low_mean",
        "clip_ratio/high_mean",
    }
    expected |= {"completions/mean_length", "completions/clipped_ratio"} | ({"kl"} if setting == "GRPO" else set())
    assert common == expected
    assert {key: ours[key] for key in common} == pytest.approx({key: theirs[key] for key in common}, abs=1e-5)


@pytest.mark.parametrize(
    ("peer", "setting", "word"),
    [
        ("verl", "GRPO", "algo.delta=3"),
        ("verl", "GRPO", "algo.advantage_eps=1e-6"),
        ("verl", "GRPO", "kl.ratio_weighted=false"),
        ("verl", "Dr. GRPO", "algo.delta=3"),
        ("TRL", "DAPO", "algo.max_resampling_rounds=0"),
        ("TRL", "defaults", "algo.epsilon_high=0.2"),
    ],
)
def test_each_matching_option_is_needed(bench: Any, found: Any, peer: str, setting: str, word: str) -> None:
    require(peer)
    chosen = bench.SETTINGS[setting]
    assert word in chosen.matching[peer]
    words = [one for one in (*chosen.ours, *chosen.matching[peer]) if one != word]
    pairs = zip(found.of_ours((*words,)).gradient, found.peer(peer, setting).gradient, strict=True)
    assert max(bench.apart(ours, theirs) for ours, theirs in pairs) > 10 * bench.TOLERANCE


@pytest.mark.parametrize("name", ["ours", *WANTED])
def test_numbers_are_those_by_hand(found: Any, name: str) -> None:
    """Rewards 1 0 0 1, 1 1 1 1, 0 1/4 1 0, 0 0 0 1; 3 5 4 8, 6 2 7 5, 12 4 9 3 and 10 6 5 7 tokens, of at most 12."""
    if name != "ours":
        require(name)
    settings = ("GRPO", "Dr. GRPO", "DAPO")
    grpo, centered, dapo = (found.ours(one) if name == "ours" else found.peer(name, one) for one in settings)
    eps = 1e-6 if name == "verl" else 1e-4
    first, last = 0.5 / (math.sqrt(1 / 3) + eps), 0.75 / (0.5 + eps)
    assert grpo.advantages[:8] == pytest.approx([first, -first, -first, first, 0, 0, 0, 0], abs=1e-6)
    assert grpo.advantages[15] == pytest.approx(last, abs=1e-6)
    assert centered.advantages[8:12] == pytest.approx([-0.3125, -0.0625, 0.6875, -0.3125])
    # groups by advantages and lengths: (3 - 5 - 4 + 8) / 2 = 1; -3.75 - 0.25 + 6.1875 - 0.9375 = 1.25; 0.75 (7 - 7) = 0
    assert centered.loss[0] == pytest.approx(-(1 + 1.25 + 0) / (16 * 12), abs=1e-7)
    # a penalty of the last 3 tokens: 1 for 12 tokens, 1/3 for 10
    rewards = torch.tensor([-1 / 3, 0.0, 0.0, 1.0])
    penalized = (rewards - rewards.mean()) / (rewards.std() + eps)
    assert dapo.advantages[-4:] == pytest.approx(penalized.tolist(), abs=1e-6)
    assert (grpo.tokens, dapo.tokens) == (96, 96 if name == "TRL" else 76)
    assert name == "verl" or (grpo.dead, dapo.dead) == (0.25, 0.25 if name == "TRL" else 0.0)


def test_verl_divides_by_the_longest_answer_of_a_micro_batch(bench: Any, found: Any) -> None:
    """Groups of four have answers of up to 8, 7, 12 and 10 tokens; their sums are 1, 0, 1.25 and 0."""
    require("verl")
    assert bench.PARTS == 4
    split = found.peer("verl", "Dr. GRPO", 4)
    assert split.loss[0] == pytest.approx(-(1 / 8 + 1.25 / 12) / 16, abs=1e-7)
    whole = found.peer("verl", "Dr. GRPO", 4, loss_scale_factor=12)
    assert whole.loss[0] == pytest.approx(-2.25 / (16 * 12), abs=1e-7)
    plain = found.peer("verl", "defaults")
    assert found.peer("verl", "Dr. GRPO").entropy == pytest.approx(plain.entropy * 96 / (16 * 12), rel=1e-6)


def test_equal_rewards_teach_nothing_here_alone(found: Any) -> None:
    """Eight of 0.7 in FP32: their mean is 2^-24 above, of which the divisor makes 6e-4 or 0.056."""
    for peer in WANTED:
        require(peer)
    equal = found.equal()
    gap, spread = 2.0**-24, 2.0**-24 * math.sqrt(8 / 7)
    assert equal["ours"] == (0.0, "1")
    assert equal["TRL"] == (pytest.approx(gap / (spread + 1e-4), rel=1e-3), "0")
    assert equal["verl"][0] == pytest.approx(gap / (spread + 1e-6), rel=1e-3)


def test_the_page_shows_these_numbers(bench: Any, found: Any) -> None:
    page = (ROOT / "docs" / "algorithms" / "peers.md").read_text()
    lines = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in page.splitlines() if line[:1] == "|"]
    shown = {(cells[0], cells[1]): cells for cells in lines if len(cells) == len(bench.HEADINGS)}
    assert len(shown) == 2 + 12  # the heading and its rule
    assert all(f"{peer} {wanted}" in page for peer, wanted in WANTED.items())
    for row in found.rows():
        cells = shown[row["setting"], row["trainer"]]
        for key, cell in zip(bench.HEADINGS, cells, strict=True):
            now = bench.shown(key, row[key])
            if key in ("setting", "trainer", "split", "matched") or "-" in (cell, now):
                assert cell == now, (row["setting"], row["trainer"], key)
            else:
                values = [float(one.strip("%")) for one in (cell, now)]
                assert values[0] == pytest.approx(values[1], abs=1.01 if "%" in cell else 1.1e-4), (row["trainer"], key)
