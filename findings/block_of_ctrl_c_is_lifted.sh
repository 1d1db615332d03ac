#!/usr/bin/env bash
# CPython 3.11.7, 3.12.1 and 3.13.0, no package: a thread blocks SIGINT and starts a process by multiprocessing's `spawn`. The first
# one starts Python's resource tracker, which lifts the block of the thread that starts it, before the child is made:
# the child is not deaf, and the thread no longer either. Behind a tracker that runs already the block stays.
# Guessed before: the mask of a thread is inherited by what it starts, as for fork and exec, and nobody changes it.
# So what: to keep Ctrl-C from workers, as those of vLLM, call resource_tracker.ensure_running() before the block.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/masks.py" <<'END'
import multiprocessing
import signal
import sys
from multiprocessing import resource_tracker


def blocked():
    return signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def tell():
    sys.exit(int(blocked()))


if __name__ == "__main__":
    if sys.argv[1] == "before":
        resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    child = multiprocessing.get_context("spawn").Process(target=tell)
    child.start()
    child.join()
    print(child.exitcode == 1, blocked())
END
python3 --version
first=$(python3 "$folder/masks.py" first)
before=$(python3 "$folder/masks.py" before)
echo "child and parent block SIGINT; tracker started by it: $first; tracker running before: $before"
test "$first" = "False False" && test "$before" = "True True"
