"""The process behind task/grader/latex.py: a JSON object in each line of its input, one in each line of its output.

It reads gold, answer (an answer alone) or text (in which math-verify looks for the answer as it does by default), and
limit_s; it writes equal and canonical, the answer as SymPy writes it.

A script of its own that imports nothing of the project, so that it starts in the time that math-verify needs. It is
ended from outside: by the kernel's timer of CPU time, which also stops work inside one long instruction, or by memory.
"""

from __future__ import annotations

import json
import logging
import resource
import signal
import sys
from functools import lru_cache
from typing import Any

LONGEST = 200  # characters of a canonical form
NO_ALARM = 0  # of math-verify's own, which the kernel's timer makes needless


def main() -> None:
    gib = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_AS, (gib << 30, gib << 30))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    logging.disable(logging.CRITICAL)
    replies, sys.stdout = sys.stdout, sys.stderr  # whatever a package prints is no reply
    from math_verify import verify

    verify(parsed("\\frac{1}{2}"), parsed("0.5"), timeout_seconds=NO_ALARM)  # warm, outside of any limit
    print("ready", file=replies, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, request["limit_s"])  # its signal has no handler: it ends the process
        answer = request.get("answer")
        reply = compare(request["gold"], request["text"] if answer is None else answer, whole=answer is None)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(reply), file=replies, flush=True)


def compare(gold: str, answer: str, whole: bool) -> dict[str, Any]:
    """Whether math-verify takes `answer` (in a `whole` text: the one in it) for `gold`, and how SymPy writes it."""
    from math_verify import parse, verify

    try:
        found = parse(answer, parsing_timeout=NO_ALARM) if whole else parsed(answer)
        equal = verify(parsed(gold), found, timeout_seconds=NO_ALARM)
        canonical = str(found[0])[:LONGEST] if found else answer
    except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError, MemoryError, RecursionError):
        return {"equal": False, "canonical": answer}  # what SymPy raises on text that only looks like mathematics
    return {"equal": equal, "canonical": canonical}


@lru_cache(maxsize=1024)
def parsed(text: str) -> list[Any]:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    targets = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    return parse(f"\\boxed{{{text}}}", extraction_config=targets, parsing_timeout=NO_ALARM)


if __name__ == "__main__":
    main()
