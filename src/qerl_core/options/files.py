"""Reads the YAML files of options as their authors wrote them: fields, defaults, and the comments that explain them.

A field's comment begins behind its value and may go on in the lines below, in the same column, or stands above it. A
comment before the first key is about the whole file. A field without one means what it means in another file of the
same class.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from qerl_core.process.installation import CONF_DIR

SET_BY_FILE = ("_target_", "defaults", "hydra")  # keys that are no values of an option
LINE = 90  # characters, of alternatives in a message
_Loader: type[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True, kw_only=True)
class Field:
    """One value of an option: its dotted key in the file, its default as written there, its comment, its class."""

    key: str
    default: str
    meaning: str
    target: str


@dataclass(frozen=True, kw_only=True)
class OptionFile:
    """What a YAML file says: its first comment, its values, the comments of its groups, and what it builds on.

    `bases` are the options from which it takes other values, such as hub, or /aqn@schedule: exp, as (place, option).
    """

    summary: str
    fields: tuple[Field, ...]
    groups: dict[str, str]
    bases: tuple[tuple[str, str], ...]


@cache
def read_option(file: Path) -> OptionFile:
    """The content of a YAML file of conf/."""
    lines = file.read_text().splitlines()
    tree = yaml.compose("\n".join(lines), _Loader)
    fields: list[Field] = []
    groups: dict[str, str] = {}
    bases: list[tuple[str, str]] = []
    if tree is not None:
        _collect(tree, "", lines, fields, groups)
        bases = [base for key, value in tree.value if key.value == "defaults" for base in _bases(value)]
    return OptionFile(summary=_first_comment(lines), fields=tuple(fields), groups=groups, bases=tuple(bases))


@cache
def plain_keys() -> frozenset[str]:
    """The top-level keys of conf/run.yaml that have a value, and no keys of their own: steps, seed and others."""
    tree = yaml.load((CONF_DIR / "run.yaml").read_text(), _Loader)
    return frozenset(key for key, value in tree.items() if not isinstance(value, (dict, list)))


def _collect(node: Any, prefix: str, lines: list[str], fields: list[Field], groups: dict[str, str]) -> None:
    values = {key.value: value for key, value in node.value}
    target = values["_target_"].value if "_target_" in values else ""
    for key, value in node.value:
        name = f"{prefix}{key.value}"
        if key.value in SET_BY_FILE:
            continue
        if isinstance(value, yaml.MappingNode) and not value.flow_style:
            groups[name] = _comment(lines, key.end_mark.line, key.end_mark.column + 1)
            _collect(value, f"{name}.", lines, fields, groups)
        else:
            start, end = value.start_mark, value.end_mark
            text = " ".join(_between(lines, start, end).split())
            meaning = _comment(lines, end.line, end.column) or _comment_above(lines, key.start_mark)
            fields.append(Field(key=name, default=text, meaning=meaning, target=target))


def _between(lines: list[str], start: Any, end: Any) -> str:
    inside = lines[start.line : end.line + 1]
    inside[-1] = inside[-1][: end.column]
    inside[0] = inside[0][start.column :]
    return "\n".join(inside)


def _comment(lines: list[str], line: int, column: int) -> str:
    """The comment behind a value that ends there, with its lines below; empty without."""
    found = lines[line][column:].lstrip() if line < len(lines) else ""
    if not found.startswith("#"):
        return ""
    at = len(lines[line]) - len(found)
    parts = [found]
    for later in lines[line + 1 :]:
        if later[:at].strip() or not later[at:].startswith("#"):
            break
        parts.append(later[at:])
    return " ".join(part.lstrip("# ").strip() for part in parts)


def _comment_above(lines: list[str], mark: Any) -> str:
    """The comment that ends in the line above a key, in its column; none at the top of the file."""
    kept: list[str] = []
    for line in reversed(lines[: mark.line]):
        if not line.startswith(f"{' ' * mark.column}#"):
            return " ".join(kept)
        kept.insert(0, line.strip().lstrip("# "))
    return ""


def _first_comment(lines: list[str]) -> str:
    kept = []
    for line in lines:
        if not line.startswith("#"):
            break
        if "@package" not in line and not line.startswith("#  "):  # commands are indented
            kept.append(line.lstrip("# ").strip())
    return " ".join(kept)


def _bases(defaults: Any) -> Iterator[tuple[str, str]]:
    """(place, option) for `hub`, which is ("", "hub"), and for `/aqn@schedule: exp`. Left out: `override ...`."""
    for entry in defaults.value:
        if isinstance(entry, yaml.ScalarNode) and entry.value != "_self_":
            yield "", entry.value
        elif isinstance(entry, yaml.MappingNode):
            pairs: Any = entry.value
            yield from ((key.value, value.value) for key, value in pairs if not key.value.startswith("override "))


def option_fields(folders: Sequence[Path], group: str, option: str) -> dict[str, Field]:
    """Every field of an option by its dotted key in the file, those that it takes from other options included.

    `folders` are searched in this order, as Hydra does; the first is conf/.
    """
    file = find_option(folders, group, option)
    content = read_option(file)
    fields: dict[str, Field] = {}
    for place, base in content.bases:
        folder, _, inside = place.lstrip("/").partition("@")
        same = Path(option).parent / base if not place else Path(base)
        found = option_fields(folders, folder or group, str(same))
        prefix = f"{inside or folder}." if place else ""
        fields |= {f"{prefix}{key}": replace(field, key=f"{prefix}{key}") for key, field in found.items()}
    for field in content.fields:
        inherited = fields[field.key].meaning if field.key in fields else ""
        fields[field.key] = replace(field, meaning=_meaning(field, content) or inherited or _of_class(field, folders))
    return fields


def find_option(folders: Sequence[Path], group: str, option: str) -> Path:
    """The YAML file of an option, or of the root config (group "")."""
    files = [folder / group / f"{option}.yaml" for folder in folders]
    return next((file for file in files if file.is_file()), files[0])


def alternatives(axis: str, options: Sequence[str]) -> str:
    """`axis=a|b|c`; if that is longer than a line, the first options, and what lists all."""
    whole = f"{axis}={'|'.join(options)}"
    kept = whole[:LINE].rpartition("|")[0]
    return f"{kept}|... (all of them: --explain {axis})" if kept and len(whole) > LINE else whole


def options_of(folders: Sequence[Path], group: str) -> dict[str, Path]:
    """The YAML file of every option in a folder of conf/, and of the folders below it, by the option's name."""
    found: dict[str, Path] = {}
    for folder in folders:
        for file in sorted((folder / group).rglob("*.yaml")):
            found.setdefault(str(file.relative_to(folder / group).with_suffix("")), file)
    return found


def same_value(default: str, value: Any) -> bool:
    """Whether `value`, of a composed config, is what `default` says, the text of a field in a YAML file."""
    return OmegaConf.to_container(OmegaConf.create(f"value: {default}"), resolve=False) == {"value": value}


def _meaning(field: Field, content: OptionFile) -> str:
    """Its own comment, or that of its group, if that is no option of its own."""
    return field.meaning or ("" if field.target else content.groups.get(field.key.rpartition(".")[0], ""))


def _of_class(field: Field, folders: Sequence[Path]) -> str:
    known = (_comments(folder).get((field.target, _last(field.key)), "") for folder in folders)
    return next(filter(None, known), "")


@cache
def _comments(folder: Path) -> dict[tuple[str, str], str]:
    """The comment of a field by its class and name, from the first file below `folder` that explains it.

    A file of which another says "NAME.yaml explains the keys" comes first.
    """
    contents = {file: read_option(file) for file in sorted(folder.rglob("*.yaml"))}
    named = {name for one in contents.values() for name in re.findall(r"(\S+\.yaml) explains the keys", one.summary)}
    known: dict[tuple[str, str], str] = {}
    for file in sorted(contents, key=lambda file: file.name not in named):
        for field in contents[file].fields:
            if field.meaning and field.target:
                known.setdefault((field.target, _last(field.key)), field.meaning)
    return known


def _last(key: str) -> str:
    return key.rpartition(".")[2]
