"""Writes values.md, metrics.md and claims.md beside this file: `python docs/reference/write.py`, if a source changed.

values.md comes from the comments of conf/*.yaml, as `--explain` does, and from the checks of the options' classes;
metrics.md from qerl_core/metrics/definitions.py; claims.md from conf/claim/*.yaml and the tables of verdicts in
studies/*/results, which a test makes again.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from qerl_bench.experiment_spec import Experiment
from qerl_core.metrics.definitions import TABLES
from qerl_core.options.explain import AXES, SEVERAL, root_groups
from qerl_core.options.files import Field, option_fields
from qerl_core.options.suggestions import keys_of_axis
from qerl_core.process.installation import CONF_DIR
from qerl_studies.claims.claim import Claim
from qerl_studies.claims.registry import QERL, families
from qerl_studies.foreign.trl_names import ALIASES, UNLIKE

CONTRASTS = """A study may name contrasts of its own before its data, as `primary` of its study.yaml. They are judged by
its protocol, at the looks that it planned, in its own setting: that of claims, the model's default rate, is another."""
CONTRAST_HEADS = ("study", "contrast: claim", "measure, margin", "setting", "look", "effect, 95 %", "verdict (state)")
HERE = Path(__file__).resolve().parent
FEW = 4  # different defaults that a row shows
VALUES = """# All values

Made by `docs/reference/write.py` from the YAML files of `conf/` and the checks of their classes; `--explain KEY` prints
the same for the options that a command chooses. In brackets: the options that have a key, or this default of it. A
preset such as `model=qwen3-4b` has the keys of the option that it is made from. A value that is allowed here may still
not go with others: then it is [refused](../errors.md). How options are combined: [options](../options.md).
"""
METRICS = """# All metrics

Made by `docs/reference/write.py` from `src/qerl_core/metrics/definitions.py`. A mean is taken once over all tokens or
completions of a step, never over means of micro-batches. `env.json` of a run has the definitions that it was made with.
The files: [runs](../runs.md).
"""
TRL_NAMES = """## Under TRL's names

With [`logger.names=trl`](../wandb.md#trls-names), by `src/qerl_studies/foreign/trl_names.py`. The number is what TRL
logs of the same completions in one micro-batch on one process, with a line for each step of ours. In several, TRL takes
the mean of their means, ours stays the mean over all tokens.
"""
CLAIMS = """# All claims

Made by `docs/reference/write.py` from the files of `conf/claim/` and the committed verdicts. A claim is
[one file](../claims.md#a-claim-is-a-file): the paper's sentence, the contrast that tests it, the smallest effect that
matters, and what must hold before anything is said. Verdicts are of [committed studies](../../studies/README.md);
[what the words mean](../claims.md#verdicts). *No run yet*: no study has runs for it. `qerl-bench claims RUNS
papers=FAMILY` judges yours.
"""
FAMILIES = {
    QERL: "QeRL's own claims.",
    "literature": "Claims of later papers: [what the runs say](../literature.md).",
    "frontier": "Claims of 2026 about 8 bits, rounded activations, layers kept in 16 bits and adapters. No run was "
    "made here before they were named.",
    "rounded": "Claims about keys and values in few bits, and about MXFP8, each named before its runs: "
    "[a study](../../studies/kv-2026/README.md).",
}


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
    """metrics.md: a table for each of `TABLES`, under what makes a run write it."""
    parts = [METRICS]
    for when, table in TABLES.items():
        rows = [_row(f"`{name}`", metric.unit, metric.definition) for name, metric in table.items()]
        parts.append("\n".join([f"## {when}\n", "| metric | unit | definition |", "|---|---|---|", *rows, ""]))
    return "\n".join([*parts, *_names_of_trl()])


def _names_of_trl() -> Iterator[str]:
    """What `logger.names=trl` writes under which name, and what only looks like one of TRL's."""
    yield f"{TRL_NAMES}\n| metric | TRL's name | TRL's definition | written so with |\n|---|---|---|---|"
    for one in ALIASES:
        only = "; ".join(f"`{key}` {' or '.join(map(str, values))}" for key, values in one.only.items())
        names = (f"`{name.replace('*', 'NAME')}`" for name in (one.ours, one.theirs))
        yield _row(*names, one.text, only)
    yield "\nThese look like one of TRL's and differ:\n\n| metric | is not TRL's | since it is |\n|---|---|---|"
    yield from (_row(f"`{ours}`", f"`{theirs}`", why) for ours, (theirs, why) in UNLIKE.items())
    yield ""


def claims() -> str:
    """claims.md: a table for each family, a row for each claim."""
    found = verdicts()
    parts = [CLAIMS]
    for family, title in FAMILIES.items():
        heads = ("paper", "claim", "contrast", "measure, margin, gates", "verdict", "makes the runs")
        parts += [f"## `{family}`\n", f"{title}\n", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
        parts += [_row(*_claim_cells(claim, found.get(claim.title, {}))) for claim in families()[family]]
        parts.append("")
    return "\n".join([*parts, *_contrasts()])


def _claim_cells(claim: Claim, found: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    link = claim.address.replace("arXiv ", "https://arxiv.org/abs/")
    address = f"[{'page' if link == claim.address else claim.address}]({link})" if "://" in link else claim.address
    contrasts = "; ".join(one.label for one in claim.contrasts if one.votes)
    margin = claim.measure.size_text(claim.measure.margin)
    acts = any(not inspect.isfunction(gate) for gate in claim.gates)
    gates = [*(["acts"] if acts else []), *(gate.__name__ for gate in claim.gates if inspect.isfunction(gate))]
    said = "; ".join(f"{word}: {', '.join(studies)}" for word, studies in found.items()) or "no run yet"
    how = f"{claim.measure.name}, {margin}" + (f"; {', '.join(gates)}" if gates else "")
    return (
        f"{claim.paper} ({address})",
        f"{claim.title}{' (exploratory)' if claim.exploratory else ''}: {claim.expected}",
        contrasts,
        how,
        said,
        f"`{claim.command}`",
    )


@cache
def verdicts() -> dict[str, dict[str, list[str]]]:
    """By title of the claim and verdict, the studies whose committed tables say so; those without runs are left out."""
    found: dict[str, dict[str, list[str]]] = {}
    tables = [(file, file.parents[1].name) for file in sorted(HERE.parents[1].glob("studies/*/results/*.md"))]
    for file, study in [*tables, (HERE.parent / "literature.md", "tiny")]:
        for title, word in _said(file.read_text()):
            studies = found.setdefault(title, {}).setdefault(word, [])
            studies += [study] if word != "incomplete" and study not in studies else []
    for one in own_contrasts():
        for title in one["answers_to"]:
            found.setdefault(title, {}).setdefault(f"{told(one)}, of a released model", []).append(one["study"])
    return {title: {word: studies for word, studies in words.items() if studies} for title, words in found.items()}


def own_contrasts() -> list[dict[str, Any]]:
    """The records of claims.json that are of contrasts that studies named for themselves."""
    content = json.loads((HERE.parents[1] / "studies/claims.json").read_text())
    return [one for one in content["verdicts"] if one["look"]]


def told(record: Mapping[str, Any]) -> str:
    """The verdict with its state, and with what the gates of today say otherwise."""
    state = "" if record["word"] == record["verdict"] else f" ({record['word']})"
    return f"{record['verdict']}{state}" + (f"; {record['reason']}" if record["reason"] else "")


def _contrasts() -> Iterator[str]:
    """A table of the contrasts that studies of released models named for themselves, each with its setting."""
    yield from (f"## Contrasts of studies\n\n{CONTRASTS}\n", f"| {' | '.join(CONTRAST_HEADS)} |")
    yield "|---" * len(CONTRAST_HEADS) + "|"
    for one in own_contrasts():
        setting, look = one["setting"], one["look"]
        rate = " and ".join(f"{lr:g}" for lr in (setting["lr"] if isinstance(setting["lr"], list) else [setting["lr"]]))
        yield _row(
            one["study"],
            f"{one['contrast']}" + "".join(f": {title}" for title in one["answers_to"]),
            f"{one['measure']}, {one['margin']:g} {one['unit']}",
            f"rate {rate}, {setting['steps']} steps, {setting['quantizer']}, temperature {setting['temperature']:g}, "
            f"top-p {setting['top_p']:g}",
            f"{look['bases']} bases of {' and '.join(map(str, look['planned']))}, level {look['level']:g}",
            f"{one['effect']:+.2f} [{one['low']:+.2f}, {one['high']:+.2f}], questions fixed",
            told(one),
        )
    yield ""


def _said(text: str) -> Iterator[tuple[str, str]]:
    """The title and verdict in each row of a table, of QeRL's claims and of other families."""
    yield from re.findall(r"^\| \d+\. (.*): \*\*(.*?)\*\*(?: \([^|]*\))? \|", text, flags=re.M)
    yield from re.findall(r"^\| [^|]*\) \| ([^|]*) \| `[^|]*` \| \*\*(.*?)\*\*", text, flags=re.M)


FILES = {"values.md": values, "metrics.md": metric_tables, "claims.md": claims}

if __name__ == "__main__":
    for file, content in FILES.items():
        (HERE / file).write_text(content())
