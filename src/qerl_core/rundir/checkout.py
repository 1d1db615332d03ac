"""The checkout that this code runs from: what git says of it, and what no commit holds. Git of other folders, too."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from qerl_core.checks import require
from qerl_core.process.installation import CHECKOUT

NEW_MATTERS = ("src", "kernels", "conf")  # a file that git does not know changes runs only from here


def git(*words: str) -> str | None:
    """Output of a git command about this checkout; None if it fails, or if there is no checkout or no git."""
    return None if CHECKOUT is None else git_in(CHECKOUT, *words)


def git_in(folder: Path, *words: str) -> str | None:
    """Output of a git command in `folder`; None if it fails, or if there is no repository or no git."""
    done = _run(*words, folder=folder)
    return None if done is None or done.returncode else done.stdout.decode(errors="replace").strip()


def uncommitted(study: Path | None = None, results: Path | None = None) -> list[str] | None:
    """Files of this checkout that no commit holds as they are: changed ones, and new ones where they could change a
    run, which the file `study` can. What lies in `results` is left out. None if there is no commit to compare with."""
    within = [".", *_excluding(results)]
    changed = _names("diff", "--name-only", "--relative", "-z", "HEAD", "--", *within)
    new = _new_files(study, results)
    return None if changed is None or new is None else changed + new


def patch_of(study: Path, results: Path) -> bytes:
    """What `uncommitted` names, for `git apply` on the commit. Raises ConfigError if git makes no patch of a file."""
    changed = _run("diff", "--binary", "--relative", "HEAD", "--", ".", *_excluding(results))
    patch = b"" if changed is None else changed.stdout
    for name in _new_files(study, results) or []:
        done = _run("diff", "--binary", "--no-index", "--", "/dev/null", name)
        made = done is not None and done.returncode in (0, 1) and done.stdout != b""  # 1: they differ, or no such file
        said = b"" if done is None else done.stderr
        require(made, f"git makes no patch of {name} ({said.decode(errors='replace').strip()}); commit that file")
        patch += done.stdout if done is not None else b""
    return patch


def _new_files(study: Path | None, results: Path | None) -> list[str] | None:
    places = [*NEW_MATTERS, *([] if study is None else _inside(study))]
    return _names("ls-files", "--others", "--exclude-standard", "-z", "--", *places, *_excluding(results))


def _names(*words: str) -> list[str] | None:
    """The names that a git command with -z prints, which quotes none of them; None if it fails."""
    done = _run(*words)
    return None if done is None or done.returncode else [os.fsdecode(name) for name in done.stdout.split(b"\0") if name]


def _excluding(results: Path | None) -> list[str]:
    return [] if results is None else [f":(exclude,literal){path}" for path in _inside(results)]


def _inside(path: Path) -> list[str]:
    """`path` from this checkout on; nothing if it lies elsewhere."""
    inside = CHECKOUT is not None and path.resolve().is_relative_to(CHECKOUT)
    return [str(path.resolve().relative_to(CHECKOUT))] if inside and CHECKOUT else []


def _run(*words: str, folder: Path | None = None) -> subprocess.CompletedProcess[bytes] | None:
    """A git command in `folder`, or else in this checkout; None without that, or without git."""
    if (place := folder or CHECKOUT) is None:
        return None
    try:
        return subprocess.run(["git", "--no-optional-locks", *words], cwd=place, capture_output=True)
    except FileNotFoundError:
        return None
