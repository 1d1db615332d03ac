"""Whether runs may be compared: names, models, definitions of metrics, versions of the code and of libraries."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import pandas as pd
import pyarrow as pa

from qerl_core.checks import ConfigError, require
from qerl_studies.runs.environments import attempts_of, codes_of, is_reported
from qerl_studies.runs.find import chosen_runs
from qerl_studies.runs.load import Run, tidy_rows
from qerl_studies.runs.parse import first_names
from qerl_studies.runs.readable import readable


def check_comparable(runs: Sequence[Run], mixed_code: bool) -> None:
    """Raise ConfigError, naming the runs, if two have one name, if two models do, if a metric has several definitions,
    or if the runs come from several versions of the code or of a user's own file, and `mixed_code` does not allow that.
    """
    _require_one_model_per_name(runs)
    by_name: dict[str, list[Run]] = {}
    by_code: dict[str, list[str]] = {}
    by_own_code: dict[str, dict[str, list[str]]] = {}
    by_definition: dict[str, dict[str, list[str]]] = {}
    by_definitions: dict[int, tuple[dict[str, str], list[str]]] = {}  # of all metrics, which runs share
    for run in runs:
        by_name.setdefault(run.name, []).append(run)
        for code in () if is_reported(run.environment) else codes_of(run.environment):
            by_code.setdefault(code, []).append(run.name)
        of_all = run.environment.get("metrics", {})
        by_definitions.setdefault(id(of_all), (of_all, []))[1].append(run.name)
        for attempt in attempts_of(run.environment):
            for file, version in (attempt.get("own_code") or {}).items():
                names = by_own_code.setdefault(file, {}).setdefault(version[:12], [])
                names += [] if run.name in names else [run.name]
    for of_all, names in by_definitions.values():
        for metric, definition in of_all.items():
            by_definition.setdefault(metric, {}).setdefault(definition, []).extend(names)
    for name, group in by_name.items():
        folders = " and ".join(str(run.path) for run in group)
        require(len(group) == 1, f"the run {name} was found twice, in {folders}: pass only one of them")
    mixed = {metric: groups for metric, groups in by_definition.items() if len(groups) > 1}
    for metric, groups in mixed.items():
        meanings = "\n".join(f"  {meaning!r}: {first_names(names)}" for meaning, names in groups.items())
        others = f" (and of {', '.join(sorted(mixed.keys() - {metric}))})" if len(mixed) > 1 else ""
        raise ConfigError(
            f"these runs have different definitions of {metric}{others}:\n{meanings}\nLeave all but one out"
        )
    versions = "\n".join(f"  code {code}: {first_names(names)}" for code, names in by_code.items())
    require(
        mixed_code or len(by_code) <= 1,
        f"these runs come from {len(by_code)} versions of the code:\n{versions}\nLeave all but one group out, or pass "
        "--mixed-code if what changed in between cannot have changed the numbers",
    )
    for file, groups in by_own_code.items():
        versions = "\n".join(f"  {version}: {first_names(names)}" for version, names in groups.items())
        require(
            mixed_code or len(groups) == 1,
            f"these runs were made with {len(groups)} versions of {file}:\n{versions}\nLeave all but one group out, or "
            "pass --mixed-code",
        )


def _require_one_model_per_name(runs: Sequence[Run]) -> None:
    """A model that is loaded has one base. One that is made from a seed may have many: repetitions of one kind.

    So may a GGUF file, of which model.dither draws copies.
    """
    by_model: dict[str, dict[str, list[str]]] = {}
    for run in runs:
        loaded = "id" in run.config.get("model", {})
        file = run.environment.get("gguf", {}).get("digest")
        whose = ", reported" if is_reported(run.environment) else ""
        weights = by_model.setdefault(f"{run.option('model.name')}{whose}", {})
        weights.setdefault(file or (run.base if loaded else "made from model.seed"), []).append(run.name)
    for name, weights in by_model.items():
        listed = "\n".join(f"  {base}: {first_names(names)}" for base, names in weights.items())
        require(
            len(weights) == 1,
            f"{len(weights)} models are called {name} in these runs:\n{listed}\nLeave all but one out. A folder with "
            "another name gives a model another name: model=hub model.id=DIR",
        )


def load_runs(
    folders: Iterable[str | os.PathLike[str]], mixed_code: bool = False, without: Sequence[str] = ()
) -> list[Run]:
    """The runs of `chosen_runs` that are `readable`, for a comparison. Raises ConfigError as these and
    `check_comparable` do."""
    runs, _ = readable(chosen_runs(folders, without))
    check_comparable(runs, mixed_code)
    return runs


def tidy(runs: Iterable[Run]) -> pd.DataFrame:
    """The long table of several runs: the columns IDENTITY, then MEASURED; text columns are categories.

    Raises ConfigError if two runs have one name, or if a metric has several definitions.
    """
    runs = list(runs)
    require(bool(runs), "no runs to put in a table: pass at least one")
    check_comparable(runs, mixed_code=True)
    return pa.concat_tables([tidy_rows(run) for run in runs]).unify_dictionaries().to_pandas()
