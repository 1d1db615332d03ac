"""Who reads whose checkpoints: the table of docs/formats.md, of the programs that are installed here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.peers, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
pairs = pytest.importorskip("tests.models.pairs", reason="extras gguf and peers", exc_type=ImportError)
ALL = [*pairs.pairs()]


def _name(pair: pairs.Pair) -> str:
    return f"{pair.writer}, {pair.form}, {pair.reader}, {pair.words}"


@pytest.mark.parametrize("pair", ALL, ids=_name)
def test_the_table_says_what_happens(pair: pairs.Pair) -> None:
    missing = [program for program in (pair.writer, pair.reader) if not pairs.is_here(program)]
    if missing:
        pytest.skip(f"{' and '.join(missing)} is not installed")
    rows = pairs.stored_rows()
    if pair.key not in rows:
        pytest.skip(f"the table has no row of {pair.key}: python -m tests.models.pairs")
    assert pairs.outcome(pair) == rows[pair.key]


def test_the_table_has_every_pair_once_and_no_other() -> None:
    found = [(w.rpartition(" ")[0] or w, form, r.rpartition(" ")[0] or r, words)
             for w, form, r, words in pairs.stored_rows()]  # fmt: skip
    assert {*found} == {(pair.writer, pair.form, pair.reader, pair.words) for pair in ALL}
    assert {said.split(",")[0].split(":")[0] for said in pairs.stored_rows().values()} == {"equal", "refused"}


def test_one_weight_of_another_value_is_seen() -> None:
    """Four weights, one of them the next number of BF16; and a weight that the reader lacks ends it."""
    wanted = {"layer": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}
    other = {"layer": torch.tensor([[1.0, 2.0], [3.0, 4.0 + 2.0**-5]]), "more": torch.ones(1)}

    def pair(found: pairs.Weights) -> pairs.Pair:
        return pairs.Pair(pairs.OURS, "", pairs.OURS, "", lambda folder: (wanted, found))

    assert pairs.outcome(pair(wanted)) == "equal, 4"
    assert pairs.outcome(pair(other)) == "25.0% of 4 differ"
    with pytest.raises(AssertionError, match="layer"):
        pairs.outcome(pair({"more": torch.ones(1)}))


def test_a_refusal_has_no_paths(tmp_path: Path) -> None:
    def refuse(folder: Path) -> None:
        raise pairs.ConfigError(f"{folder}/out is packed by quark as int3; readable are others")

    assert pairs.outcome(pairs.Pair(pairs.OURS, "", pairs.OURS, "", refuse)) == "refused: is packed by quark as int3"
