"""How every program ends: a message in words on stderr, and an exit code (docs/runs.md lists them)."""

from __future__ import annotations

import atexit
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hydra.errors import OverrideParseException

from qerl_core.checks import ConfigError, RunLocked, TrainingStopped
from qerl_core.options.suggestions import unread
from qerl_core.process.arguments import printable, wrap_lines
from qerl_core.process.inherited import refuse_other_encoding
from qerl_core.process.out_of_memory import shortage
from qerl_core.process.terminal import lasting_output
from qerl_core.process.termination import Terminated, end_quietly, terminations_raise
from qerl_core.process.torchrun import ERROR_FILE, tell_torchrun
from qerl_core.rundir.disk_errors import deleted_folder, failure
from qerl_core.rundir.refusals import CODE as REFUSED
from qerl_core.rundir.refusals import REFUSALS


def guarded(main: Callable[[], None]) -> None:
    """Run the main function of a script as a command of the package is run."""
    with lasting_output(), exit_in_words("stopped"), one_line_warnings():
        main()


@contextmanager
def exit_in_words(stopped: str) -> Iterator[None]:
    """Exit with a message, not a traceback: code 2 for bad input, 1 for failed runs and disks.

    Ctrl-C gives code 130, SIGTERM 143, SIGHUP 129, with the note that the stop carries (`rundir/stops.py`), or with
    `stopped`; a run of another process 75.
    """
    report = os.environ.get(ERROR_FILE)  # now, because a rank removes what torchrun has set
    try:
        refuse_other_encoding()
        with terminations_raise():
            yield
    except RunLocked as error:
        message, code = explain(error), os.EX_TEMPFAIL
    except REFUSALS as error:
        message, code = explain(error), REFUSED
    except TrainingStopped as error:
        message, code = str(error), 1
    except KeyboardInterrupt as error:
        message, code = note_of(error, stopped), 128 + signal.SIGINT
    except Terminated as error:
        message, code = f"{error}: {note_of(error, stopped)}", 128 + error.signum
    except (SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # a panic of Rust is no Exception
        if reason := failure(error) or shortage(error):
            message, code = f"error: {reason}. When that is solved, repeat the command: it continues", 1
        elif reason := deleted_folder(error):
            message, code = f"error: {reason}", 1
        else:
            raise
    else:
        return
    finally:
        atexit.unregister(end_quietly)
        atexit.register(end_quietly)  # the last to be registered is the first to be called
    print(wrap_lines(message), file=sys.stderr)
    if report is not None and code == REFUSED:
        tell_torchrun(Path(report), wrap_lines(message))
    sys.exit(code)


def note_of(stop: BaseException, otherwise: str) -> str:
    return "; ".join(getattr(stop, "__notes__", [otherwise]))


@contextmanager
def one_line_warnings() -> Iterator[None]:
    """Print warnings as one line each, without the place in the code."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_place, **_more: print(printable(str(message)), file=sys.stderr)
        yield


def explain(error: Exception) -> str:
    """One message for the terminal: Hydra's errors without its advice to append keys and without its search path."""
    if isinstance(error, ConfigError):
        return f"error: {error}"
    if isinstance(error, OverrideParseException):
        return f"error: {unread(error.override)}"
    text = str(error).split("\nConfig search path:")[0].strip()
    if lost := re.match(r"Interpolation key '([^']+)' not found", text):
        return f"error: there is no {lost[1]}, which another key refers to; leave ~ overrides out"
    if unknown := re.search(r"Could not override '([^']+)'", text):
        return f"error: there is no option {unknown[1]}"
    return "error: " + " ".join(text.split())
