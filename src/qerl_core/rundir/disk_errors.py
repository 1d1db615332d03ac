"""Failures of a disk in words: full, over quota, read-only, broken, not permitted, or a folder that somebody has
deleted, whichever library met them.

Left out: which of several files was being written, where the library does not say.
"""

from __future__ import annotations

import errno
import os
import re
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

from qerl_core.checks import TrainingStopped
from qerl_core.rundir.checkpoints import last_checkpoint, step_of

REASONS = {
    errno.ENOSPC: "no space or no inode is left on the disk",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file would be larger than is allowed (ulimit -f)",
    errno.EROFS: "the file system is read-only",
    errno.EIO: "the disk does not answer (input/output error)",
    errno.ESTALE: "the network disk has lost the file",
    errno.EACCES: "permission denied",
    errno.EPERM: "the operation is not permitted",
    errno.ENAMETOOLONG: "the name is too long for this file system",
    errno.EMFILE: "too many files are open (ulimit -n)",
}
# safetensors: "I/O error: No space left on device (os error 28)"; pyarrow: "[errno 28] No space left on device".
CODE = re.compile(r"\((?:os error|errno) (\d+)\)|\[errno (\d+)\]", re.IGNORECASE)
TOLD = re.compile(r"strerror: ([\w /]+)")  # torch that cannot open a file: "strerror: No space left on device"
CODES = {os.strerror(code): code for code in errno.errorcode}
PARENT = re.compile("Parent directory .* does not exist|non-existent directory")  # torch, pandas
FEW_INODES = 1000  # more than a run makes files: they are not what it lacks
TORCH = re.compile("PytorchStreamWriter|unexpected pos|iostream error")  # torch.save drops the code of the error


def failure(error: BaseException) -> str | None:
    """Why reading or writing failed, and where if known, if a failure of the disk is behind `error`; else None."""
    for cause in chain(error):
        code = code_of(cause)
        if code in REASONS:
            place = getattr(cause, "filename", None)
            return REASONS[code] + (f": {place}" if isinstance(place, str) else "")
        if isinstance(cause, RuntimeError) and TORCH.search(str(cause)):
            return "a file of the checkpoint could not be written, as when the disk is full"
    return None


def code_of(error: BaseException) -> int | None:
    """The errno of an error, whichever library raised it; None if it has none."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    if found := CODE.search(str(error)):
        return int(found[1] or found[2])
    told = TOLD.search(str(error))
    return CODES.get(told[1]) if told else None


def deleted_folder(error: BaseException) -> str | None:
    """Which folder is gone, with the remedy, if `error` is that a file in it was not found; else None."""
    missing = [cause for cause in chain(error) if code_of(cause) == errno.ENOENT or PARENT.search(str(cause))]
    if missing and not _has_working_folder():
        return "the working folder has been deleted. Change to a folder that exists, and repeat the command there"
    names = [str(cause.filename) for cause in missing if isinstance(cause, OSError) and cause.filename is not None]
    gone = [folder for folder in (os.path.dirname(name) for name in names) if folder and not os.path.exists(folder)]
    return f"the folder {gone[0]} is gone. If it was deleted meanwhile, repeat the command" if gone else None


def _has_working_folder() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def chain(error: BaseException) -> Iterator[BaseException]:
    """`error` and the errors behind it."""
    seen: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and following not in seen:
        seen.append(following)
        yield following
        following = following.__cause__ or following.__context__


def room(path: Path, error: BaseException) -> str:
    """What is left on the disk that holds `path`; if `error` is about the size of a file, how large one may be."""
    if any(isinstance(cause, OSError) and cause.errno == errno.EFBIG for cause in chain(error)):
        return f"at most {resource.getrlimit(resource.RLIMIT_FSIZE)[0] / 2**20:,.3g} MiB a file"
    place = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    files = os.statvfs(place)
    inodes = f", {files.f_favail:,} inodes" if files.f_files and files.f_favail < FEW_INODES else ""
    return f"{shutil.disk_usage(place).free / 2**20:,.1f} MiB{inodes} free in {place}"


def size(folder: Path) -> int:
    """Bytes of all files below `folder`."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def stopped_by_disk(path: Path, error: Exception) -> TrainingStopped | None:
    """The message for a run in `path` that ends by `error`, if the disk is the reason: what it needs to continue."""
    reason = failure(error)
    if reason is None:
        return None
    newest = last_checkpoint(path)
    needs = "" if newest is None else f"; a checkpoint takes {size(newest) / 2**20:,.1f} MiB"
    return TrainingStopped(
        f"{path}: {reason} ({room(path, error)}{needs}). When that is solved, the same command continues from step "
        f"{0 if newest is None else step_of(newest)}"
    )
