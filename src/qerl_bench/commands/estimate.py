"""Say what a run or a sweep will take: GiB by phase, seconds a step, hours, dollars, disk.

    qerl-bench estimate model=qwen2.5-1.5b-instruct task=gsm8k quant=nvfp4 card=h100 per_hour=3
    qerl-bench estimate model=X.gguf task=gsm8k quant=bf16,nvfp4 seed=0,1 hydra.launcher.slots=2 -m

The words are those of `qerl-bench run`, and nothing is run. The numbers follow from committed runs and tables of
kernels, all of one H200; docs/estimate.md has their error. Lines below the table say where a number is from, and what
no table covers. Without `card=` the card is the one that is here. The length of completions decides most, and only a
run knows it: `tokens=` says it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from qerl_bench.estimate.cards import CARDS, MEASURED, card_of
from qerl_bench.estimate.estimate import RunEstimate
from qerl_bench.estimate.point import GivenLengths, of_point
from qerl_bench.estimate.words import ERROR, hours_s, lines, total
from qerl_bench.sweep.grid import grid
from qerl_bench.task.base import Task
from qerl_core.checks import ConfigError, check_fields, count, number, optional, require
from qerl_core.options.composer import Composer
from qerl_core.options.user_options import split_search_path
from qerl_core.process.arguments import KeyValueParser, wrap_lines
from qerl_core.process.cards import visible_gpus
from qerl_core.process.terminal import log_to_stderr

SWEEP = ("-m", "--multirun")


def parser() -> KeyValueParser:
    options = KeyValueParser(__doc__)
    options.add_argument(
        "words", nargs="*", help="options of a run, such as model=qwen2.5-1.5b-instruct task=gsm8k; with -m a sweep"
    )
    options.add_argument("--card", default=None, help=f"{', '.join(CARDS)} (default: the one that is here)")
    options.add_argument(
        "--cards", type=int, default=None, help="how many of them a sweep has (default: those here, or 1)"
    )
    options.add_argument("--per-hour", type=float, default=None, help="price of a card for an hour")
    options.add_argument("--tokens", type=float, default=None, help="mean tokens of a completion")
    options.add_argument("--prompt-tokens", type=float, default=None, help="mean tokens of a prompt")
    options.add_argument("--json", action="store_true", help="print objects instead of a table")
    return options


def main(arguments: list[str]) -> None:
    log_to_stderr()
    options, words, sweeps = parse_options(arguments)
    check_fields(options, "", cards=optional(count()), per_hour=optional(number(least=0)))
    check_fields(options, "", tokens=optional(number(above=0)), prompt_tokens=optional(number(above=0)))
    points, slots = grid(words) if sweeps else ([words], None)
    require(points != [], "this sweep has no point: give its keys values, as in seed=0,1,2")
    card = card_of(options.card)
    cards = options.cards or (max(1, len(visible_gpus())) if options.card is None else 1)
    slots = min(slots or cards, len(points))
    per_card = -(-slots // cards)
    composer, lengths = Composer(), GivenLengths(options.tokens, options.prompt_tokens)
    estimates: list[RunEstimate | list[str]] = []
    tasks: list[Task] = []
    for point in points:
        try:
            estimates.append(of_point(composer.tree(point), card, per_card, lengths, tasks))
        except ConfigError as error:
            raise ConfigError(f"{' '.join(point)}: {error}" if sweeps else str(error)) from error
    known = [one for one in estimates if isinstance(one, RunEstimate)]
    if options.json:
        objects = [asdict(one) if isinstance(one, RunEstimate) else {"no_estimate": one} for one in estimates]
        print(json.dumps(objects, indent=1))
        return
    print("\n".join(report(points, estimates, sweeps)))
    if sweeps:
        print(total(estimates, slots))
    if known and options.per_hour is not None:
        hours = hours_s(known, slots) / 3600
        used = min(cards, slots)
        print(f"price: {used * hours * options.per_hour:.2f}, {used} x {hours:.2f} h at {options.per_hour:g} an hour")
    if known:
        print(f"{ERROR}. All are of an {CARDS[MEASURED].model}.")


def report(points: Sequence[Sequence[str]], found: Sequence[RunEstimate | list[str]], sweeps: bool) -> list[str]:
    """The tables, one for equal estimates of a sweep."""
    told: dict[str, list[str]] = {}
    for point, one in zip(points, found, strict=True):
        none = "" if isinstance(one, RunEstimate) else wrap_lines(f"  no estimate: {'; '.join(one)}")
        text = "\n".join(lines(one)) if isinstance(one, RunEstimate) else none
        told.setdefault(text, []).append(" ".join(point))
    return [line for text, names in told.items() for line in ([*heads(names)] if sweeps else []) + [text]]


def heads(names: Sequence[str]) -> list[str]:
    return [wrap_lines(names[0] if len(names) == 1 else f"{names[0]}, and {len(names) - 1} like it")]


def parse_options(arguments: Sequence[str]) -> tuple[Any, list[str], bool]:
    """The options of this command, the words of a run, and whether they are those of a sweep."""
    sweeps = any(word in SWEEP for word in arguments)
    search_path, others = split_search_path([word for word in arguments if word not in SWEEP])
    reader = parser()
    own: list[str] = []
    rest: list[str] = []
    for word in others:
        takes = own and own[-1].startswith("--") and "=" not in own[-1] and own[-1] != "--json"
        (own if takes or word.startswith("-") or reader.is_own(word) else rest).append(word)
    pairs = [word for word in own if reader.is_own(word)]  # which go in front of flags
    return reader.parse_args([*pairs, *(word for word in own if word not in pairs)]), [*rest, *search_path], sweeps
