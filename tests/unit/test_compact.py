"""Figures as small SVG files: the drawing stays where it was."""

from __future__ import annotations

import re
from io import StringIO
from xml.etree import ElementTree

import numpy as np
from matplotlib.figure import Figure

from qerl_bench.studies.figures.compact import SVG, compact

NAMES = re.compile(r'(?:href="|url\()#([^")]+)')


def drawn() -> tuple[str, str]:
    figure = Figure(figsize=(3, 2))
    ax = figure.subplots()
    ax.plot(np.linspace(0, 1, 50) ** 2, "o-", alpha=0.5)
    ax.set_title("0.5 µm $x^2$")
    buffer = StringIO()
    figure.savefig(buffer, format="svg")
    return buffer.getvalue(), compact(buffer.getvalue())


def points(path: str) -> list[tuple[float, float]]:
    """The ends of the lines of a path, absolute or relative."""
    found, here = [], np.zeros(2)
    for command, numbers in re.findall(r"([MLml])([^MLmlz]*)", path):
        step = np.array(re.findall(r"-?(?:\d+\.?\d*|\.\d+)", numbers), float)
        here = step if command.isupper() else here + step
        found.append(tuple(here))
    return found


def lines(text: str) -> list[list[tuple[float, float]]]:
    paths = [element.get("d", "") for element in ElementTree.fromstring(text).iter(f"{SVG}path")]
    return [points(path) for path in paths if not re.search("[QCqcz]", path)]


def test_lines_stay_where_they_were_to_a_hundredth_of_a_point() -> None:
    whole, small = map(lines, drawn())
    assert [len(line) for line in whole] == [len(line) for line in small] and max(map(len, whole)) == 50
    for before, after in zip(whole, small, strict=True):
        np.testing.assert_allclose(after, before, atol=0.0051)


def test_it_is_half_as_large_and_every_name_is_defined() -> None:
    whole, small = drawn()
    assert len(small) < 0.55 * len(whole)
    assert {*NAMES.findall(small)} == {*re.findall(r' id="([^"]+)"', small)}
    assert {*re.findall(r'class="(\w+)"', small)} == {*re.findall(r"\.(s\w+)\{", small)} and "style=" not in small
    assert "<!-- 0.5 µm" in small and small.count("<!--") == whole.count("<!--")


def test_marks_and_letters_stay_where_they_were() -> None:
    whole, small = drawn()
    before, after = (
        [(float(x), float(y)) for x, y in re.findall(r'<use [^>]*x="([\d.-]+)" y="([\d.-]+)"', text)]
        for text in (whole, small)
    )
    assert len(after) >= 50
    np.testing.assert_allclose(after, before, atol=0.0051)
    moves = [float(x) for x in re.findall(r'<use [^>]*transform="translate\(([\d.]+) 0\)"', whole)]
    assert [round(x) for x in moves if x] == [
        int(x) for x in re.findall(r'<use href="#\w+" x="(\d+)"/>', small) if x != "0"
    ]


def test_a_path_of_closed_parts_and_curves() -> None:
    path = "M 1 1 \nL 2 1 \nQ 3 1 3 2 \nz\nM 4 4 \nL 4.5 3.25 \nz"
    text = f'<svg xmlns="{SVG.strip("{}")}"><path d="{path}" style="fill: none"/></svg>'
    assert 'd="m1 1l1 0q1 0 1 1zm3 3l.5-.75z"' in compact(text)
