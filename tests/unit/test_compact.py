"""Figures as small SVG files: the drawing stays where it was."""

from __future__ import annotations

import re
from collections.abc import Iterator
from io import StringIO
from itertools import pairwise
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.figure import Figure

from qerl_studies.figures.compact import LINK, SVG, compact
from qerl_studies.figures.style import paper_style
from qerl_studies.figures.svg_path import shorter

NAMES = re.compile(r'(?:href="|url\()#([^")]+)')
Place = tuple[float, ...]


@pytest.fixture(scope="module")
def drawn() -> tuple[str, str]:
    figure = Figure(figsize=(3, 2))
    with paper_style():
        ax = figure.subplots()
        ax.plot(np.linspace(0, 1, 50) ** 2, "o-", alpha=0.5)
        ax.plot([0, 10, 20], [0.5, 0.4, 0.7], "s")
        ax.set_title("0.5 µm $x^2$")
        ax.set_ylabel("a label that is turned", color="red")
        ax.text(10, 0.8, "turned and clipped", rotation=30, clip_on=True, fontsize=6)
        buffer = StringIO()
        figure.savefig(buffer, format="svg")
    return buffer.getvalue(), compact(buffer.getvalue())


def points(path: str) -> list[Place]:
    """The ends of the lines of a path, absolute or relative."""
    found, here = [], np.zeros(2)
    for command, text in re.findall(r"([MLmlhv])([^MLmlhvz]*)", path):
        numbers = [float(number) for number in re.findall(r"-?(?:\d+\.?\d*|\.\d+)", text)]
        steps = [(x, 0.0) for x in numbers] if command == "h" else [(0.0, y) for y in numbers]
        for step in steps if command in "hv" else zip(numbers[::2], numbers[1::2], strict=True):
            here = step if command.isupper() else np.add(here, step)
            found.append(tuple(here))
    return found


def styled(root: ElementTree.Element, element: ElementTree.Element) -> str:
    sheet = "".join(root.itertext())
    of_class = re.search(rf"\.{element.get('class')}{{(.*?)}}", sheet)
    return element.get("style", of_class[1] if of_class else "")


def lines(text: str) -> list[list[Place]]:
    root = ElementTree.fromstring(text)
    paths = [path for path in root.iter(f"{SVG}path") if path.get("d") and "marker:" not in styled(root, path)]
    return sorted(points(path.get("d", "")) for path in paths if not re.search("[QCTqctz]", path.get("d", "")))


def transformed(transform: str) -> np.ndarray:
    """The matrix (3, 3) of a transform."""
    matrix = np.eye(3)
    for kind, text in re.findall(r"(\w+)\(([^)]*)\)", transform):
        one, (first, *second) = np.eye(3), map(float, text.split())
        if kind == "translate":
            one[:2, 2] = first, second[0]
        elif kind == "scale":
            one[0, 0], one[1, 1] = first, second[0] if second else first
        else:
            cos, sin = np.cos(np.radians(first)), np.sin(np.radians(first))
            one[:2, :2] = (cos, -sin), (sin, cos)
        matrix = matrix @ one
    return matrix


def repeats(text: str) -> list[Place]:
    """Of each letter and each point, by `use` or as a marker: its first corner in the figure, in points."""
    root = ElementTree.fromstring(text)
    named = {f"#{element.get('id')}": element for element in root.iter() if element.get("id")}

    def corners(element: ElementTree.Element, outer: np.ndarray) -> Iterator[Place]:
        if element.tag in (f"{SVG}defs", f"{SVG}marker"):
            return
        inner = outer @ transformed(element.get("transform", ""))
        marker = re.search(r"marker:url\((#\w+)\)", styled(root, element))
        if element.tag == f"{SVG}use":
            drawing = named[element.get("href") or element.get(LINK, "")]
            yield from corner(drawing, inner, (float(element.get("x", 0)), float(element.get("y", 0))))
        elif marker:
            (drawing,) = named[marker[1]]
            shown = named[drawing.get("href", "")] if drawing.tag == f"{SVG}use" else drawing
            for place in points(element.get("d", "")):
                yield from corner(shown, inner, place)
        for child in element:
            yield from corners(child, inner)

    def corner(drawing: ElementTree.Element, matrix: np.ndarray, place: Place) -> Iterator[Place]:
        of_letter = transformed(drawing.get("transform", ""))
        for start in points(drawing.get("d", ""))[:1]:
            yield tuple((matrix @ (np.array([*place, 0.0]) + of_letter @ [*start, 1.0]))[:2])

    return [*corners(root, np.eye(3))]


def test_lines_stay_where_they_were_to_a_hundredth_of_a_point(drawn: tuple[str, str]) -> None:
    whole, small = map(lines, drawn)
    assert [len(line) for line in whole] == [len(line) for line in small] and max(map(len, whole)) == 50
    for before, after in zip(whole, small, strict=True):
        np.testing.assert_allclose(after, before, atol=0.0051)


def test_points_and_letters_stay_where_they_were(drawn: tuple[str, str]) -> None:
    whole, small = map(repeats, drawn)
    assert len(whole) == len(small) > 100
    apart = np.linalg.norm(np.array(whole)[:, None] - np.array(small), axis=-1)
    assert apart.min(0).max() < 0.02 and apart.min(1).max() < 0.02


def test_it_is_a_third_as_large_and_every_name_is_defined(drawn: tuple[str, str]) -> None:
    whole, small = drawn
    assert len(small) < 0.4 * len(whole)
    assert {*NAMES.findall(small)} == {*re.findall(r' id="([^"]+)"', small)}
    assert {*re.findall(r'class="(\w+)"', small)} == {*re.findall(r"\.(\w+)\{", small)} and "style=" not in small
    assert "<!-- 0.5 µm" in small and small.count("<!--") == whole.count("<!--")


def test_a_clipped_text_stays_clipped(drawn: tuple[str, str]) -> None:
    root = ElementTree.fromstring(drawn[1])
    (clipped,) = (group for group in root if group.get("clip-path") and any("rotate" in str(g.attrib) for g in group))
    assert re.findall(r"rotate\(-30\) ?scale\(0?\.006 -0?\.006\)", str([group.attrib for group in clipped]))


def test_a_path_of_closed_parts_and_curves() -> None:
    path = "M 1 1 \nL 2 1 \nL 2.5 1 \nQ 3 1 3 2 \nQ 3 3 4 3 \nQ 4 4 5 4 \nz\nM 4 4 \nL 4.5 3.25 \nL 4.75 3.75 \nz"
    assert shorter(path) == "m1 1h1 .5q.5 0 .5 1t1 1q0 1 1 1zm3 3 .5-.75.25.5z"
    text = f'<svg xmlns="{SVG.strip("{}")}"><path d="{path}" style="fill: none"/></svg>'
    assert f'd="{shorter(path)}"' in compact(text)


def test_a_curve_goes_on_as_it_came_only_if_it_did() -> None:
    assert (
        shorter("M 0 0 \nQ 1 0 1 1 \nQ 1 2 2 2 \nQ 3 2 3 3 \nL 4 4 \nQ 5 5 6 6", places=0)
        == "m0 0q1 0 1 1t1 1 1 1l1 1q1 1 2 2"
    )
    assert shorter("M 0 0 \nQ 10 0 10 10 \nQ 10 15 20 20", places=0) == "m0 0q10 0 10 10 0 5 10 10"
    assert all(a != b for a, b in pairwise(re.findall("[a-z]", shorter("M 0 0 \nL 1 1 \nL 2 3 \nL 3 3 \nL 4 3"))))
