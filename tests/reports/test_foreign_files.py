"""Files that another program wrote, or that are not what their name says: read alike, or refused in words."""

from __future__ import annotations

import math
import shutil
import struct
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from qerl_bench.model.gguf.architecture import config_of
from qerl_bench.model.gguf.header import Header, Tensor, read_header
from qerl_core.checks import ConfigError
from qerl_studies.publish.folder import check_private
from qerl_studies.runs.committed import read_study
from qerl_studies.runs.private import Private

STUDY = Path(__file__).parents[2] / "community/example-smoke"
TABLES = ("tidy.parquet", "answers.parquet")

# --- tables of a study that another program wrote again: https://github.com/apache/arrow/issues/1688 and --------------
# https://github.com/rapidsai/cudf/issues/12497


def texts_as(kind: pa.DataType, indices: pa.DataType | None = None) -> Callable[[pa.Table], pa.Table]:
    """What leaves numbers as they are and texts in another type."""

    def column(values: pa.ChunkedArray) -> pa.ChunkedArray:
        if not pa.types.is_dictionary(values.type):
            return values
        plain = values.cast(pa.string()).cast(kind)
        return plain if indices is None else plain.dictionary_encode().cast(pa.dictionary(indices, kind))

    return lambda table: pa.table({name: column(table[name]) for name in table.column_names})


def by_pandas(table: pa.Table) -> pa.Table:
    frame = table.to_pandas()
    categories = frame.select_dtypes("category").columns
    return pa.Table.from_pandas(frame.astype(dict.fromkeys(categories, "str")))


WRITERS = {
    "DuckDB": texts_as(pa.string()),
    "pandas": by_pandas,
    "Polars": texts_as(pa.large_string()),
    "Polars with categories": texts_as(pa.string(), pa.uint32()),
    "DataFusion": texts_as(pa.string_view()),
}


def rewritten(folder: Path, change: Callable[[pa.Table], pa.Table]) -> Path:
    shutil.copytree(STUDY, folder)
    for name in TABLES:
        parquet.write_table(change(parquet.read_table(STUDY / name)), folder / name)
    return folder


@pytest.mark.parametrize("writer", WRITERS)
def test_a_study_says_the_same_whoever_wrote_its_tables(tmp_path: Path, writer: str) -> None:
    ours, theirs = read_study(STUDY), read_study(rewritten(tmp_path / "study", WRITERS[writer]))
    for read, expected in ((theirs.metrics, ours.metrics), (theirs.answers, ours.answers)):
        assert read.keys() == expected.keys() and len(expected) == 9
        for run, table in expected.items():
            pd.testing.assert_frame_equal(read[run], table)


@pytest.mark.parametrize(("name", "value"), [("run", None), ("step", 0.5)])
def test_a_table_that_lost_values_or_has_others_is_refused_by_column(tmp_path: Path, name: str, value: object) -> None:
    def changed(table: pa.Table) -> pa.Table:
        return table.set_column(table.column_names.index(name), name, [pa.array([value] * len(table))])

    with pytest.raises(ConfigError, match=rf"parquet: {name} .*qerl-bench collect"):
        read_study(rewritten(tmp_path / "study", changed))


Change = Callable[[pa.Table], pa.Table]


def column(name: str, of: Callable[[pa.ChunkedArray], Any]) -> Change:
    return lambda table: table.set_column(table.column_names.index(name), name, of(table[name]))


def order(table: pa.Table) -> pa.Table:
    return table.take(pa.array([*range(1, len(table), 2), *range(0, len(table), 2)]))


def columns(table: pa.Table) -> pa.Table:
    return table.select([*reversed(table.column_names)]).append_column("x", table[0])


def twice(table: pa.Table) -> pa.Table:
    return pa.concat_tables([table, table.slice(len(table) // 2, 1)])


SAME: list[tuple[int, Change]] = [  # to metrics, 0, or answers, 1
    *((which, change) for which in (0, 1) for change in (order, columns)),
    *((0, column("step", lambda one, to=to: one.cast(to))) for to in (pa.float64(), pa.int16(), pa.string())),
    *((1, column("correct", lambda one, to=to: one.cast(to))) for to in (pa.float64(), pa.int64(), pa.uint8())),
]
LOST = "lacks steps of finished runs"


def lost(rows: str) -> Change:
    return lambda table: pa.Table.from_pandas(table.to_pandas().query(f"not ({rows})"), preserve_index=False)


OTHER: list[tuple[int, Change, str]] = [
    *((which, twice, "has .* twice") for which in (0, 1)),
    *((0, lost(f"step == {step}"), LOST) for step in (1, 2, 6)),
    *((0, lost(rows), LOST) for rows in ("kind == 'eval' and step == 6", "seed == 1", "index > 800")),
    (0, column("step", lambda one: pa.array([-step for step in one.to_pylist()])), "step is below 0"),
    *(
        (1, column(name, lambda one, n=n: pa.array([n] * len(one))), "0 to samples")
        for name, n in (("samples", 0), ("correct", -1))
    ),
]


@pytest.mark.parametrize("case", [*SAME, *OTHER])
def test_rows_that_were_written_again_are_all_rows_once_or_refused(tmp_path: Path, case: tuple[Any, ...]) -> None:
    which, change, *said = case
    ours, folder = read_study(STUDY), shutil.copytree(STUDY, tmp_path / "study")
    parquet.write_table(change(parquet.read_table(STUDY / TABLES[which])), folder / TABLES[which])
    if said:
        with pytest.raises(ConfigError, match=rf"{TABLES[which]}.*{said[0]}.*qerl-bench collect"):
            read_study(folder)
        return
    theirs = read_study(folder)
    for run in ours.runs:
        for read, table in ((theirs.metrics[run], ours.metrics[run]), (theirs.answers[run], ours.answers[run])):
            rows = [sorted(one.astype("str").to_numpy().tolist()) for one in (read, table)]
            assert rows[0] == rows[1]


NO_TABLE = {
    "empty": b"",
    "a pointer of Git LFS": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n",
    "cut short": (STUDY / "tidy.parquet").read_bytes()[:-40],
}


@pytest.mark.parametrize("kind", NO_TABLE)
@pytest.mark.parametrize("name", TABLES)
def test_a_table_that_is_none_is_refused_by_its_name(tmp_path: Path, name: str, kind: str) -> None:
    shutil.copytree(STUDY, tmp_path / "study")
    (tmp_path / "study" / name).write_bytes(NO_TABLE[kind])
    with pytest.raises(ConfigError, match=rf"{name} is no Parquet file .*qerl-bench collect"):
        read_study(tmp_path / "study")


def test_private_texts_are_found_in_any_type_of_text_and_no_file_passes_unread(tmp_path: Path) -> None:
    private = Private("alice", "node-17.example.org")
    for number, kind in enumerate((pa.string(), pa.large_string(), pa.string_view())):
        folder = tmp_path / str(number)
        folder.mkdir()
        parquet.write_table(pa.table({"note": pa.array(["/home/alice/x"], kind)}), folder / "tidy.parquet")
        with pytest.raises(ConfigError, match=r"tidy\.parquet would show"):
            check_private(folder, private)
    (tmp_path / "b").mkdir()
    (tmp_path / "b/settings.json").write_bytes(b"\x1f\x8b\x08\x00")
    with pytest.raises(ConfigError, match=r"settings\.json is no text"):
        check_private(tmp_path / "b", private)


# --- GGUF headers: https://github.com/ollama/ollama/issues/18130 and https://github.com/ggml-org/llama.cpp/issues/24988


@pytest.mark.parametrize("alignment", [0, 7, 12])
def test_an_alignment_that_places_no_tensor_is_refused(tmp_path: Path, alignment: int) -> None:
    key = b"general.alignment"
    file = tmp_path / "model.gguf"
    file.write_bytes(struct.pack("<4sIQQQ17sII", b"GGUF", 3, 0, 1, len(key), key, 4, alignment))
    with pytest.raises(ConfigError, match=rf"general\.alignment={alignment} is no multiple of 8"):
        read_header(file)


NAMED = [  # keys, tensors with their places, each of eight F32 numbers, and what is said
    *(("ab", "x0 y32", ""), ("", "y64 x0", ""), ("aba", "", "the key a twice"), ("", "x0 x32", "the tensor x twice")),
    *(("", f"x0 {other}", f"tensor {other[0]} begins .* inside of x") for other in ("x0", "y0", "y16", "y31")),
    *(("", "x16 y0", "tensor x begins .* inside of y"), ("", "x0 y128", "is cut short: tensor y")),
]


@pytest.mark.parametrize(("keys", "tensors", "said"), NAMED)
def test_no_key_or_tensor_stands_for_another(tmp_path: Path, keys: str, tensors: str, said: str) -> None:
    named = b"".join(struct.pack("<QcII", 1, key.encode(), 4, 32) for key in keys)
    places = [(one[:1].encode(), int(one[1:])) for one in tensors.split()]
    listed = b"".join(struct.pack("<QcIQIQ", 1, name, 1, 8, 0, place) for name, place in places)
    header = struct.pack("<4sIQQ", b"GGUF", 3, len(places), len(keys)) + named + listed
    (tmp_path / "model.gguf").write_bytes(header + bytes(-len(header) % 32 + 96))
    with pytest.raises(ConfigError, match=said) if said else nullcontext():
        assert {*read_header(tmp_path / "model.gguf").tensors} == {name.decode() for name, _ in places}


SIZES: dict[str, Any] = {
    "embedding_length": 64, "block_count": 1, "feed_forward_length": 128, "attention.head_count": 2,
    "context_length": 128, "attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 1e4,
}  # fmt: skip


def header(**changes: Any) -> Header:
    metadata = {f"llama.{key}": value for key, value in (SIZES | changes).items()}
    metadata |= {"general.architecture": "llama", "tokenizer.ggml.tokens": ["a", "b"]}
    shapes = {"token_embd": (2, 64), "output_norm": (64,), "blk.0.attn_norm": (64,), "blk.0.ffn_norm": (64,)}
    shapes |= dict.fromkeys((f"blk.0.attn_{part}" for part in ("q", "k", "v", "output")), (64, 64))
    shapes |= {"blk.0.ffn_gate": (128, 64), "blk.0.ffn_up": (128, 64), "blk.0.ffn_down": (64, 128)}
    tensors = {f"{name}.weight": Tensor("F32", shape, 0, 4 * math.prod(shape)) for name, shape in shapes.items()}
    return Header(Path("model.gguf"), metadata, tensors)


@pytest.mark.parametrize("key", SIZES)
@pytest.mark.parametrize("value", ["64", 0, -1, math.nan, math.inf, [1, 2], True])
def test_a_size_that_is_no_number_above_zero_is_refused_by_name(key: str, value: object) -> None:
    assert config_of(header())["rms_norm_eps"] == 1e-5
    with pytest.raises(ConfigError, match=rf"llama\.{key}=.*no single number"):
        config_of(header(**{key: value}))


def test_more_blocks_than_tensors_are_refused_before_they_are_listed() -> None:
    with pytest.raises(ConfigError, match=r"llama\.block_count=1000000000000000000 is more than its 11 tensors"):
        config_of(header(block_count=10**18))


@pytest.mark.parametrize("number", [-1, 2, "a", 0.5])
def test_a_special_token_that_is_none_of_the_vocabulary_is_refused(number: object) -> None:
    from qerl_bench.model.gguf.vocabulary import _special

    plain = header()
    given = replace(plain, metadata={**plain.metadata, "tokenizer.ggml.eos_token_id": number})
    with pytest.raises(ConfigError, match=rf"eos_token_id={number} is none of the 2 tokens"):
        _special(given)


# --- a time that its reader took for another, or not at all: https://github.com/mlcommons/croissant/issues/826 --------


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")  # of mlcroissant itself
def test_mlcroissant_reads_committed_studies_with_their_dates() -> None:
    from datetime import datetime

    mlc = pytest.importorskip("mlcroissant", reason="pip install mlcroissant")
    read = mlc.Dataset(str(STUDY / "croissant.json"))
    assert read.metadata.data_collection_timeframe == [datetime(2026, 11, 22)]
    assert [len([*read.records(table.uuid)]) for table in read.metadata.record_sets] == [1620, 288]
