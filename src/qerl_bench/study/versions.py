"""Which runs may stand in one table: numbers of another code, or of another definition, are other numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from qerl_bench.checks import ConfigError, require

if TYPE_CHECKING:
    from qerl_bench.study.load import Run

SHOWN = 3  # runs named of each group


def refuse_mixed(runs: Sequence[Run], mixed_code: bool) -> None:
    """Raise ConfigError, naming the runs, if a name is there twice, or a metric is defined in several ways, or the runs
    come from several versions of the code and `mixed_code` does not say that this is known.

    A run's code is told by the digest of the sources in its env.json; for runs without it, by the commit.
    """
    by_name: dict[str, list[Run]] = {}
    by_code: dict[str, list[Run]] = {}
    by_definition: dict[str, dict[str, list[Run]]] = {}
    for run in runs:
        by_name.setdefault(run.name, []).append(run)
        by_code.setdefault(run.code, []).append(run)
        for metric, definition in run.environment.get("metrics", {}).items():
            by_definition.setdefault(metric, {}).setdefault(definition, []).append(run)
    for name, group in by_name.items():
        folders = " and ".join(str(run.path) for run in group)
        require(len(group) == 1, f"the run {name} is there twice, in {folders}: pass only one of them")
    mixed = {metric: groups for metric, groups in by_definition.items() if len(groups) > 1}
    for metric, groups in mixed.items():
        meant = "\n".join(f"  {meaning!r}: {named(run.name for run in group)}" for meaning, group in groups.items())
        raise ConfigError(
            f"{metric} means different things in these runs:\n{meant}\nLeave all but one group out"
            + (f" (the same holds for {', '.join(sorted(mixed.keys() - {metric}))})." if len(mixed) > 1 else ".")
        )
    versions = "\n".join(f"  code {code}: {named(run.name for run in group)}" for code, group in by_code.items())
    require(
        mixed_code or len(by_code) <= 1,
        f"these runs come from {len(by_code)} versions of the code:\n{versions}\nLeave all but one group out, or pass "
        "--mixed-code if what changed in between cannot have changed the numbers.",
    )


def named(names: Iterable[str]) -> str:
    """The first few of `names`, and how many more there are."""
    names = sorted(names)
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{', '.join(names[:SHOWN])}{more}"
