"""Writes values.md and metrics.md beside this file: `python docs/reference/write.py`, after a change of either source.

values.md comes from the comments of conf/*.yaml, as `--explain` does, and from the checks of the options' classes;
metrics.md from the definitions in qerl_bench/metrics.py.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from qerl_bench import metrics
from qerl_bench.experiment_spec import Experiment
from qerl_bench.options.explain import AXES, SEVERAL, root_groups
from qerl_bench.options.files import Field, option_fields
from qerl_bench.options.suggestions import keys_of_axis
from qerl_bench.process.installation import CONF_DIR

HERE = Path(__file__).resolve().parent
FEW = 4  # different defaults that a row shows
VALUES = """# All values

Made by `docs/reference/write.py` from the YAML files of `conf/` and the checks of their classes; `--explain KEY` prints
the same for the options that a command chooses. In brackets: the options that have a key, or this default of it. A
preset such as `model=qwen3-4b` has the keys of the option that it is made from. A value that is allowed here may still
not go with others: then it is [refused](../errors.md). How options are combined: [options](../options.md).
"""
METRICS = """# All metrics

Made by `docs/reference/write.py` from `src/qerl_bench/metrics.py`. A mean is taken once over all tokens or completions
of a step, never over means of micro-batches. `env.json` of a run has the definitions that it was made with. The files:
[runs](../runs.md).
"""


def values() -> str:
    """values.md: a table for the values of conf/run.yaml, and one for each axis whose options have values."""
    root = {key: [("", field)] for place in root_groups() for key, field in place.fields.items()}
    parts = [VALUES, "## `conf/run.yaml`\n", *_table(root)]
    for axis in (one for one in AXES if one not in SEVERAL):
        keys: dict[str, list[tuple[str, Field]]] = {}
        for key, options in keys_of_axis(axis, [CONF_DIR]).items():
            inside = key.partition(".")[2]
            keys[key] = [(option, option_fields([CONF_DIR], axis, option)[inside]) for option in options]
        parts += [f"\n## `{axis}`\n", *_table(keys)] if keys else []
    return "\n".join(parts) + "\n"


def _table(keys: Mapping[str, Sequence[tuple[str, Field]]]) -> Iterator[str]:
    """One row for each key, meaning and limit, with its defaults and the options that have them."""
    yield from ("| key | default | allowed | meaning |", "|---|---|---|---|")
    for key, entries in keys.items():
        rows: dict[tuple[str, str], dict[str, list[str]]] = {}
        for option, field in entries:
            limit = allowed(field.target).get(field.key.rpartition(".")[2], "")
            rows.setdefault((limit, field.meaning), {}).setdefault(field.default, []).append(option)
        for (limit, meaning), defaults in rows.items():
            shown = "; ".join(_default(*one) for one in defaults.items()) if len(defaults) <= FEW else "by option"
            yield _row(f"`{key}`", shown, limit, meaning)


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("*", "\\*") for cell in cells) + " |"


def _default(default: str, options: Sequence[str]) -> str:
    named = " ".join(f"`{one}`" for one in options) if len(options) <= 2 * FEW else f"{len(options)} options"
    return f"`{default}` ({named})" if any(options) else f"`{default}`"


@cache
def allowed(target: str) -> dict[str, str]:
    """What the class `target` (of Experiment if empty) allows for each field by itself, from its `check_fields`.

    Left out: fields whose checks are made from others at run time.
    """
    module, _, name = target.rpartition(".")
    chosen: Any = getattr(importlib.import_module(module), name) if target else Experiment
    found: dict[str, str] = {}
    for owner in reversed(chosen.__mro__):
        if "__post_init__" not in vars(owner):
            continue
        names = vars(importlib.import_module(owner.__module__))
        for call in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(owner.__post_init__)))):
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "check_fields":
                found |= _limits(call, names)
    return found


def _limits(call: ast.Call, names: dict[str, Any]) -> dict[str, str]:
    known = [one for one in call.keywords if one.arg and _names(one.value) <= names.keys()]
    checks = {str(one.arg): eval(ast.unparse(one.value), names) for one in known}
    return {key: check.what for key, check in checks.items() if hasattr(check, "what")}


def _names(value: ast.expr) -> set[str]:
    return {node.id for node in ast.walk(value) if isinstance(node, ast.Name)}


def metric_tables() -> str:
    """metrics.md: a table for each of `metrics.TABLES`, under what makes a run write it."""
    parts = [METRICS]
    for when, table in metrics.TABLES.items():
        rows = [_row(f"`{name}`", metric.unit, metric.definition) for name, metric in table.items()]
        parts.append("\n".join([f"## {when}\n", "| metric | unit | definition |", "|---|---|---|", *rows, ""]))
    return "\n".join(parts)


FILES = {"values.md": values, "metrics.md": metric_tables}

if __name__ == "__main__":
    for file, content in FILES.items():
        (HERE / file).write_text(content())
