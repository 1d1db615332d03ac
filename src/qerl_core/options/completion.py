"""Completion of the command line by a shell: commands, keys, and options, which are files.

Left out: values that are no files, and the names of figures and runs.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from qerl_core.options.explain import AXES, FLAGS, root_groups
from qerl_core.options.files import options_of, read_option
from qerl_core.process.installation import CONF_DIR

SCRIPT = Path(__file__).with_name("completion.sh")


def script(commands: Sequence[str], composing: Sequence[str]) -> str:
    """The text that a shell reads once; `composing` are the commands that take options of runs.

    Keys are those of this version. Which options there are is looked up at each use.
    """
    found = {
        "CONF": shlex.quote(str(CONF_DIR)),
        "COMMANDS": " ".join(commands),
        "FLAGS": " ".join(dict.fromkeys(re.findall(r"(?<!\S)--?[a-z][a-z-]*", FLAGS))),
        "COMPOSING": " | ".join(f'*" {name} "*' for name in composing),
        "KEYS": " ".join(f"{key}=" for key in keys()),
    }
    return re.sub(r"@([A-Z]+)@", lambda place: found[place[1]], SCRIPT.read_text())


def keys() -> list[str]:
    """Axes, and the dotted key of every value that run.yaml or an option has; sorted."""
    found = {*AXES, *(key for group in root_groups() for key in group.fields)}
    for axis in AXES:
        for file in options_of([CONF_DIR], axis).values():
            found |= {f"{axis}.{field.key}" for field in read_option(file).fields if field.target}
    return sorted(key for key in found if not key.endswith(".name"))
