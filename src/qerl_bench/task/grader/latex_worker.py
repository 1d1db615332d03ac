"""The worker process of task/grader/latex.py: reads and writes one JSON object a line.

Input: gold, limit_s, and either answer (the answer alone) or text (math-verify looks for the answer in it, with its
default settings). Output: equal, and canonical, the answer as SymPy writes it.

The script imports nothing from this project, so it starts as fast as math-verify. The kernel ends it: with a CPU timer,
which also stops a single long instruction, or when it exceeds its memory.
"""

from __future__ import annotations

import json
import logging
import resource
import signal
import sys
from functools import lru_cache
from typing import Any

MAX_CANONICAL = 200  # characters of a canonical form
NO_ALARM = 0  # disables math-verify's own time limit; the kernel's timer replaces it


def main() -> None:
    gib = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_AS, (gib << 30, gib << 30))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    logging.disable(logging.CRITICAL)
    replies, sys.stdout = sys.stdout, sys.stderr  # keeps what packages print out of the replies
    from math_verify import verify

    verify(
        parse_answer("\\frac{1}{2}"), parse_answer("0.5"), timeout_seconds=NO_ALARM
    )  # warm up outside the time limit
    print("ready", file=replies, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, request["limit_s"])  # its signal ends the process
        answer = request.get("answer")
        reply = compare(request["gold"], request["text"] if answer is None else answer, whole=answer is None)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(reply), file=replies, flush=True)


def compare(gold: str, answer: str, whole: bool) -> dict[str, Any]:
    """Whether `answer` equals `gold`, and how SymPy writes it. If `whole`, it is a text that contains the answer."""
    from math_verify import parse, verify

    try:
        expressions = parse(answer, parsing_timeout=NO_ALARM) if whole else parse_answer(answer)
        equal = verify(parse_answer(gold), expressions, timeout_seconds=NO_ALARM)
        canonical = str(expressions[0])[:MAX_CANONICAL] if expressions else answer
    except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError, MemoryError, RecursionError):
        return {"equal": False, "canonical": answer}  # raised by SymPy for text that only looks like mathematics
    return {"equal": equal, "canonical": canonical}


@lru_cache(maxsize=1024)
def parse_answer(text: str) -> list[Any]:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    targets = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    return parse(f"\\boxed{{{text}}}", extraction_config=targets, parsing_timeout=NO_ALARM)


if __name__ == "__main__":
    main()
