"""What a run that is stopped has saved, in words: the last line that its user reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from qerl_core.process.termination import STOPS
from qerl_core.rundir.checkpoints import is_finished, last_checkpoint, step_of


@contextmanager
def note_at_stop(words: Callable[[], str]) -> Iterator[None]:
    """A signal that ends this block carries `words()` as its note, unless something inside has given it one."""
    try:
        yield
    except STOPS as stop:
        if not hasattr(stop, "__notes__"):
            stop.add_note(words())
        raise


def stop_line(run_dir: Path, whose: str | None = None) -> str:
    """What a stop leaves of the run in this folder, which is `whose`, and what goes on with it."""
    if is_finished(run_dir):
        return f"stopped; {whose or 'the run'} is finished"
    of_it = "" if whose is None else f" of {whose}"
    goes_on = "begins again" if last_checkpoint(run_dir) is None else "goes on from there"
    return f"stopped; {saved_step(run_dir)}{of_it} is saved, and the same command {goes_on}"


def saved_step(run_dir: Path) -> str:
    """The last step that is saved."""
    last = last_checkpoint(run_dir)
    return "no step" if last is None else f"step {step_of(last)}"
