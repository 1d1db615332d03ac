"""Paths of an SVG, written short: on a grid, as steps from point to point, in the fewest commands."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise

Point = tuple[int, int]
PART = re.compile(r"([MLQCz])([^MLQCz]*)")


def shorter(path: str, scale: float = 1.0, places: int = 2) -> str:
    """A path of absolute M, L, Q, C and z, as steps, `scale` times as large and rounded to `places` decimals."""
    parts: list[tuple[str, list[int]]] = []
    here, start, control = (0, 0), (0, 0), None
    for command, numbers in PART.findall(path):
        grid = [round(float(number) * scale * 10**places) for number in numbers.split()]
        points = [*zip(grid[::2], grid[1::2], strict=True)]
        if command == "Q":
            mirrored = None if control is None else (2 * here[0] - control[0], 2 * here[1] - control[1])
            if mirrored and max(abs(mirrored[axis] - points[0][axis]) for axis in (0, 1)) <= 2:
                parts.append(("t", _steps(here, points[1:])))
                control = mirrored
            else:
                parts.append(("q", _steps(here, points)))
                control = points[0]
        else:
            parts += [_line(here, points[0])] if command == "L" else [(command.lower(), _steps(here, points))]
            control = None
        here = points[-1] if points else start
        start = here if command == "M" else start
    return _written(parts, places)


def through(points: Sequence[Point], places: int) -> str:
    """A line from point to point; each is in units of the last of `places` decimals."""
    return _written([("m", [*points[0]]), *(_line(here, end) for here, end in pairwise(points))], places)


def decimal(units: int, places: int) -> str:
    """The shortest text of a number of units of the last of `places` decimals."""
    text = f"{units / 10**places:.9g}"
    return text.replace("0.", ".", 1) if abs(units) < 10**places else text


def _steps(here: Point, points: Iterable[Point]) -> list[int]:
    return [step for x, y in points for step in (x - here[0], y - here[1])]


def _line(here: Point, end: Point) -> tuple[str, list[int]]:
    along, up = _steps(here, [end])
    return ("h", [along]) if not up else ("v", [up]) if not along else ("l", [along, up])


def _written(parts: Iterable[tuple[str, list[int]]], places: int) -> str:
    """Commands and numbers; a command is left out after its own kind, a space before a sign or a second point."""
    text, last, number = "", "", ""
    for command, steps in parts:
        if command != last or command in "mz":
            text, last, number = text + command, {"m": "l"}.get(command, command), ""
        for step in steps:
            before, number = number, decimal(step, places)
            joined = not before or number[0] == "-" or (number[0] == "." and "." in before)
            text += number if joined else f" {number}"
    return text
