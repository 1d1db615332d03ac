"""Writes a committed study (committed.py) of more runs than fit in memory, run by run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as parquet

from qerl_core.checks import require
from qerl_core.options.fingerprint import fingerprint
from qerl_core.rundir.durable import atomically
from qerl_studies.runs.committed import ANSWERS, ANSWERS_SCHEMA, KEPT_OF_DONE, NOT_KEPT, SETTINGS, TIDY, nested
from qerl_studies.runs.comparable import check_comparable
from qerl_studies.runs.cost import Cost, total_cost
from qerl_studies.runs.environments import is_reported
from qerl_studies.runs.load import SCHEMA, Run, load_run, tidy_rows
from qerl_studies.runs.parse import first_names
from qerl_studies.runs.private import Private

ROWS_IN_MEMORY = 300_000  # written together; memory holds at most the rows of one more run
SMALLEST = {"compression": "brotli", "compression_level": 11, "max_rows_per_page": 2**31, "data_page_size": 2**30}
CSV = "tidy.csv"
KEPT_WITH_RUN = ("name", "seed")  # config keys that are listed with the run, not with its setting
PRIVATE = ("argv", "base", "inputs")  # of env.json; the base is listed with the run
# What claims, figures and the terminal table read, and what shows whether an arm did what it was meant to.
STUDY_METRICS = (
    "reward/mean",
    "reward/frac_zero_std",
    "accuracy",
    "entropy",
    "entropy_clean",
    "entropy/top20",
    "entropy/rest",
    "loss",
    "lr",
    "completions/tokens",
    "completions/mean_length",
    "completions/truncated_frac",
    "dynamic/refills",
    "mismatch/kl",
    "mismatch/ess",
    "merge/update_kept",
    "kl_to_base",
    "aqn/sigma",
    "aqn/sigma_realised",
    "aqn/entropy_target",
    "aqn/saturated",
    "router/changed_frac",
    "train/micro_batches",
    "train/taught_frac",
    "updates_skipped",
    "time/rollout_s",
    "time/train_s",
    "time/step_s",
    "speed/rollout_tok_s",
    "memory/peak_gib",
)
STUDY_PREFIXES = ("eval/", "validation/")  # every number of an evaluation is kept too


class StudyFiles(NamedTuple):
    """What `write_study` has written."""

    runs: int
    unfinished: int
    rows: int
    cost: Cost


def write_study(
    paths: Sequence[Path],
    out: Path,
    mixed_code: bool,
    metrics: Sequence[str] = (),
    with_csv: bool = False,
    private: Private | None = None,
) -> StudyFiles:
    """Write settings.json, tidy.parquet and, if answers were kept, answers.parquet of the runs `paths` to `out`.

    `metrics` are the names to write, all if empty; "study" stands for STUDY_METRICS and the evaluations. What is
    `private` is hidden, and the fingerprints are then those of the configs that are written. Files are replaced only
    when all are written. Raises ConfigError as `load_run` and `check_comparable` do, or if `out` holds the runs.
    """

    def read(path: Path, metrics: bool) -> Run:
        run = load_run(path, metrics)
        if private is None:
            return run
        return replace(run, config=private.hidden(run.config), environment=private.hidden(run.environment))

    heads = [read(path, metrics=False) for path in paths]
    require(bool(heads), "no runs to put in a table: pass at least one")
    others = [run.name for run in heads if is_reported(run.environment)]
    require(
        not others,
        f"{first_names(others)} were made by others: leave them out. What can be committed of them is the study that "
        "qerl-bench import wrote",
    )
    check_comparable(heads, mixed_code)
    inside = [path.name for path in paths if path.is_dir() and out.resolve() in path.resolve().parents]
    require(
        not inside,
        f"{out} holds the runs themselves ({first_names(inside)}): a study there would be read in their place, and "
        "runs added later would be ignored. Choose another folder: --out DIR",
    )
    settings = settings_text(heads)
    out.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        writing = {name: stack.enter_context(atomically(out / name)) for name in (SETTINGS, CSV, ANSWERS, TIDY)}
        with (
            TableWriter(writing[TIDY], SCHEMA, writing[CSV] if with_csv else None) as tidy_table,
            TableWriter(writing[ANSWERS], ANSWERS_SCHEMA) as answers,
        ):
            for path in paths:
                run = read(path, metrics=True)
                tidy_table.append(tidy_rows(_with_metrics(run, metrics)))
                answers.append(_answer_rows(run))
        if answers.rows == 0:
            writing[ANSWERS].unlink()
        writing[SETTINGS].write_text(settings)
        for name, file in writing.items():
            if not file.exists():  # nor that of an earlier study
                (out / name).unlink(missing_ok=True)
    cost = total_cost((run.done, run.environment) for run in heads)
    return StudyFiles(len(heads), sum(not run.finished for run in heads), tidy_table.rows, cost)


class TableWriter:
    """Appends tables to a parquet file, and to a CSV file if `csv_path` is given, ROWS_IN_MEMORY rows at a time.

    It packs quickly, or with `smallest` as small as Parquet can.
    """

    def __init__(self, path: Path, schema: pa.Schema, csv_path: Path | None = None, smallest: bool = False) -> None:
        self.rows = 0
        self._pending: list[pa.Table] = []
        self._plain = pa.schema([(field.name, _plain(field.type)) for field in schema])
        numbers = [field.name for field in schema if pa.types.is_floating(field.type)]
        encoding: dict[str, Any] = {  # first bytes of all numbers, then second bytes: a fifth smaller
            "column_encoding": dict.fromkeys(numbers, "BYTE_STREAM_SPLIT"),
            "use_dictionary": [name for name in schema.names if name not in numbers],
        }
        encoding |= SMALLEST if smallest else {"compression": "zstd"}
        self._parquet = parquet.ParquetWriter(path, schema, write_statistics=False, **encoding)
        self._csv = csv.CSVWriter(csv_path, self._plain) if csv_path else None

    def __enter__(self) -> TableWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._flush()
        self._parquet.close()
        if self._csv:
            self._csv.close()

    def append(self, table: pa.Table) -> None:
        self.rows += len(table)
        self._pending.append(table)
        if sum(map(len, self._pending)) >= ROWS_IN_MEMORY:
            self._flush()

    def _flush(self) -> None:
        if self._pending:
            table = pa.concat_tables(self._pending).unify_dictionaries()
            self._parquet.write_table(table)
            if self._csv:
                self._csv.write_table(table.cast(self._plain))
        self._pending = []


def _plain(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if isinstance(kind, pa.DictionaryType) else kind


def _with_metrics(run: Run, metrics: Sequence[str]) -> Run:
    if not metrics:
        return run
    written = run.metrics["metric"]
    wanted = written.isin([*metrics, *(STUDY_METRICS if "study" in metrics else ())])
    if "study" in metrics:
        wanted |= written.astype("str").str.startswith(STUDY_PREFIXES)
    return replace(run, metrics=run.metrics[wanted])


def _answer_rows(run: Run) -> pa.Table:
    counts = run.answer_counts()
    if counts is None:
        return ANSWERS_SCHEMA.empty_table()
    columns = counts.assign(run=run.name).reindex(columns=ANSWERS_SCHEMA.names)
    return pa.Table.from_pandas(columns, preserve_index=False).cast(ANSWERS_SCHEMA)


def settings_text(runs: Sequence[Run]) -> str:
    """The text of settings.json. Raises ConfigError for a config that could not be read again."""
    settings: dict[str, dict[str, Any]] = {}
    environments: list[dict[str, Any]] = []
    entries: dict[str, dict[str, Any]] = {}
    for run in sorted(runs, key=lambda run: run.name):
        digest, environment = fingerprint(run.config), public(run.environment)
        if digest not in settings:
            kept = {key: part for key, part in run.config.items() if key not in (*KEPT_WITH_RUN, *NOT_KEPT)}
            settings[digest] = dotted(kept)
            require(
                fingerprint(nested(settings[digest])) == digest,
                f"the config of {run.path} cannot be kept: one of its keys has a dot in its name",
            )
        if environment not in environments:
            environments.append(environment)
        entries[run.name] = {
            "fingerprint": digest,
            "seed": run.option("seed"),
            "environment": environments.index(environment),
            "finished": run.finished,
            **({"base": run.environment["base"]} if run.environment.get("base") else {}),
            **{key: run.done[key] for key in KEPT_OF_DONE if run.done.get(key) is not None},
        }
    config, settings_left = _split_shared([settings[digest] for digest in sorted(settings)])
    environment, environments_left = _split_shared(environments)
    return json_text(
        {
            "config": config,
            "settings": dict(zip(sorted(settings), settings_left, strict=True)),
            "environment": environment,
            "environments": environments_left,
            "runs": entries,
        }
    )


def json_text(content: Mapping[str, Any]) -> str:
    """JSON for people: a line for each setting and each run."""
    sections = []
    for name, section in content.items():
        if name in ("settings", "runs"):
            lines = (f"  {json.dumps(key)}: {json.dumps(entry)}" for key, entry in section.items())
            text = "{\n" + ",\n".join(lines) + "\n }"
        else:
            text = json.dumps(section, indent=1).replace("\n", "\n ")
        sections.append(f" {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(sections) + "\n}\n"


def dotted(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one with dotted keys; like `rundir.flat`, but an empty mapping is a value."""
    items: dict[str, Any] = {}
    for key, value in tree.items():
        items |= dotted(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return items


def _split_shared(trees: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The entries that all of `trees` have, and the rest of each; 1, 1.0 and true are three values."""
    shared = {
        key: value
        for key, value in trees[0].items()
        if all(key in other and json.dumps(other[key]) == json.dumps(value) for other in trees[1:])
    }
    return shared, [{key: value for key, value in tree.items() if key not in shared} for tree in trees]


def public(environment: Mapping[str, Any]) -> dict[str, Any]:
    """`environment` without the command line, and with only the last two parts of the paths to kernel tables."""
    kept = {key: value for key, value in environment.items() if key not in PRIVATE}
    if "kernel_tables" in kept:
        tables = kept["kernel_tables"].items()
        kept["kernel_tables"] = {"/".join(Path(table).parts[-2:]): digest for table, digest in tables}
    return kept
