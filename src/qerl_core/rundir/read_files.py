"""Reads files of a run directory as data: nothing in them is executed, looked up or filled in; a damaged file is named.

A run directory may come from somebody else.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import yaml

from qerl_core.checks import ConfigError, require
from qerl_core.options.renamed_keys import require_current

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

T = TypeVar("T")
REMEDY = "Put back a copy of it, leave the run out, or delete its folder to run it again"


PART = re.compile(r"^[A-Za-z_]\w*:.*\n(?:[ -].*\n)*", re.MULTILINE)  # of a YAML mapping: a key and what is below it
MAX_BYTES = 2**25  # of a JSON file that is unpacked: the largest committed study has 0.2 MB


class _Loader(yaml.CSafeLoader):
    """PyYAML's parser in C, which reads 1e-5 as a number as OmegaConf does."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*\.[\d_]*([eE][-+]?\d+)?|\d[\d_]*[eE][-+]?\d+|\.\d[\d_]*([eE][-+]?\d+)?)$"),
    list("-+0123456789."),
)


def read_config(path: Path) -> dict[str, Any]:
    """The config of a run. Raises ConfigError for anything but plain values under keys of today."""
    try:
        text = _as_json(path.read_text())
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:  # ValueError: no UTF-8, or no such date
        reason = " ".join(str(error).split())
        raise ConfigError(f"{path} is not a resolved config: {reason}. {REMEDY}") from error
    config = json.loads(text)
    require("${" not in text, f"{path} is not a resolved config: it refers to other keys with ${{...}}. {REMEDY}")
    require(
        isinstance(config, dict) and bool(config),
        f"{path} must hold the run's config, but is empty or no mapping. {REMEDY}",
    )
    require_current(config, path.parent)
    return {str(key): value for key, value in config.items()}


def read_yaml(path: Path) -> Any:
    """What a YAML file of somebody holds, as plain values. Raises ConfigError for none, a large one, and for an alias,
    which may unfold without end."""
    require(path.stat().st_size <= MAX_BYTES, f"{path} has more than {MAX_BYTES // 2**20} MiB: leave it out")
    try:
        text = path.read_text(encoding="utf-8")
        aliased = "*" in text and any(
            isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, yaml.CSafeLoader)
        )
        require(not aliased, f"{path} has an alias (*name), which may unfold without end: leave it out")
        return yaml.load(text, yaml.CSafeLoader)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not YAML ({' '.join(str(error).split())[:200]})") from error


def _as_json(text: str) -> str:
    """The YAML `text` as JSON, which has no dates, sets and what refers to itself.

    YAML takes some milliseconds, and runs of a sweep differ in few parts of their configs: each part is parsed once,
    and the text as a whole where it is not made of such parts. Raises YAMLError for aliases, of which some lines make
    gigabytes, and which no config that a run wrote has.
    """
    parts = PART.findall(text)
    if text and "".join(parts) == text:
        with suppress(yaml.YAMLError, ValueError, TypeError, RecursionError):
            return f"{{{', '.join(map(_members, parts))}}}"
    return _parsed(text)


@lru_cache(maxsize=1024)
def _members(part: str) -> str:
    """A part with one key, without the braces. Raises ValueError for what is not one."""
    text = _parsed(part)
    if not text.startswith("{") or len(json.loads(text)) != 1:
        raise ValueError
    return text[1:-1]


def _parsed(text: str) -> str:
    if "*" in text and any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, _Loader)):
        raise yaml.YAMLError("it has an alias (*name)")
    return json.dumps(yaml.load(text, _Loader))


def read_object(path: Path, remedy: str) -> dict[str, Any]:
    """The object in a JSON file, or in gzip of it. Raises ConfigError, with `remedy`, if it holds anything else."""
    try:
        content = json.loads(_unpacked(path) if path.suffix == ".gz" else path.read_bytes())
    except (ValueError, RecursionError, gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ConfigError(f"{path} is not JSON ({error}). {remedy}") from error
    require(isinstance(content, dict), f"{path} must hold one JSON object. {remedy}")
    return content


def _unpacked(path: Path) -> bytes:
    """The content of a gzip file. Raises ValueError if it is larger than MAX_BYTES, before it is made."""
    with gzip.open(path) as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ValueError(f"it unpacks to more than {MAX_BYTES // 2**20} MiB")
    return content


def read_table(path: Path, columns: list[str] | None = None, optional: Sequence[str] = ()) -> pd.DataFrame:
    """A parquet file, or `columns` of it, and those that are `optional` if it has them. Raises ConfigError for one that
    is damaged or lacks a column."""
    import pandas as pd

    def read(wanted: list[str] | None) -> pd.DataFrame:
        return pd.read_parquet(path, columns=wanted, use_threads=False, pre_buffer=False)

    return _read(path, columns, optional, read)


def read_columns(path: Path, columns: list[str], optional: Sequence[str] = ()) -> pa.Table:
    """As `read_table`, in a tenth of the time, without pandas."""
    from pyarrow import parquet

    return _read(path, columns, optional, lambda wanted: parquet.ParquetFile(path).read(wanted, use_threads=False))


def _read(path: Path, columns: list[str] | None, optional: Sequence[str], read: Callable[[list[str] | None], T]) -> T:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        names = parquet.read_schema(path).names
        missing = sorted({*(columns or ())} - {*names})
        require(not missing, f"{path} has no column {', '.join(missing)}: leave the run out, or run it again")
        return read(columns and [*columns, *(name for name in optional if name in names)])
    except (ConfigError, MemoryError):  # pa.ArrowMemoryError is both
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        raise ConfigError(f"{path} is damaged ({error}): leave the run out, or run it again") from error
