"""The checkout that this code runs from: what git says of it, and what no commit holds."""

from __future__ import annotations

import subprocess
from pathlib import Path

from qerl_bench.installation import CHECKOUT

NEW_MATTERS = ("src", "kernels", "conf")  # a file that git does not know changes runs only from here


def git(*words: str) -> str | None:
    """Output of a git command about this checkout; None if it fails, or if there is no checkout or no git."""
    done = _run(*words)
    return None if done is None or done.returncode else done.stdout.decode(errors="replace").strip()


def uncommitted(study: Path | None = None, results: Path | None = None) -> list[str] | None:
    """Files of this checkout that no commit holds as they are: changed ones, and new ones where they could change a
    run, which the file `study` can. What lies in `results` is left out. None if there is no commit to compare with."""
    within = [".", *_excluding(results)]
    changed = git("diff", "--name-only", "--relative", "HEAD", "--", *within)
    new = _new_files(study, results)
    return None if changed is None or new is None else changed.splitlines() + new


def patch_of(study: Path, results: Path) -> bytes:
    """What `uncommitted` names, for `git apply` on the commit."""
    changed = ["diff", "--binary", "--relative", "HEAD", "--", ".", *_excluding(results)]
    new = [["diff", "--binary", "--no-index", "--", "/dev/null", name] for name in _new_files(study, results) or []]
    return b"".join(done.stdout for words in (changed, *new) if (done := _run(*words)) is not None)


def _new_files(study: Path | None, results: Path | None) -> list[str] | None:
    places = [*NEW_MATTERS, *([] if study is None else _inside(study))]
    found = git("ls-files", "--others", "--exclude-standard", "--", *places, *_excluding(results))
    return None if found is None else found.splitlines()


def _excluding(results: Path | None) -> list[str]:
    return [] if results is None else [f":(exclude,literal){path}" for path in _inside(results)]


def _inside(path: Path) -> list[str]:
    """`path` from this checkout on; nothing if it lies elsewhere."""
    inside = CHECKOUT is not None and path.resolve().is_relative_to(CHECKOUT)
    return [str(path.resolve().relative_to(CHECKOUT))] if inside and CHECKOUT else []


def _run(*words: str) -> subprocess.CompletedProcess[bytes] | None:
    if CHECKOUT is None:
        return None
    try:
        return subprocess.run(["git", "--no-optional-locks", *words], cwd=CHECKOUT, capture_output=True)
    except FileNotFoundError:
        return None
