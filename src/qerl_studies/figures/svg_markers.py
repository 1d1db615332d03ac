"""Draws what an SVG repeats, letters and points, as markers of a path: a few bytes each, where a `use` has thirty.

Letters come last, so that nothing covers them.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from itertools import groupby
from xml.etree.ElementTree import Comment, Element, SubElement

from qerl_studies.figures.svg_path import Point, through

SVG = "{http://www.w3.org/2000/svg}"
G, USE, PATH, DEFS = f"{SVG}g", f"{SVG}use", f"{SVG}path", f"{SVG}defs"
EM = 1000  # units of letters in the size of their text; Matplotlib places them in hundredths
MOVED = r"translate\((\S+) (\S+)\)"
TEXT = re.compile(rf"{MOVED}(?: rotate\((\S+)\))? scale\((\S+) (\S+)\)")
IN_TEXT = re.compile(rf"{MOVED}(?: scale\((\S+)\))?")
FEWEST = 3  # repeats that are worth a marker
Kind = tuple[str, str]  # name and style of what is repeated
Letters = dict[tuple[str, Kind], list[Point]]  # places by transform and kind


def draw_repeats_as_markers(root: Element) -> None:
    """Change the drawing `root`, whose letters are in units of EM."""
    markers: dict[Kind, str] = {}
    drawings = _take_drawings(root)
    for parent in [root, *root.iter(G)]:
        _join_letters(parent, markers, drawings)
        _join_groups(parent)
        _join_points(parent, markers)
    _define(root, markers, drawings)


def _take_drawings(root: Element) -> dict[str, Element]:
    """Take from `root` what is repeated, by the name that it is used by."""
    drawings: dict[str, Element] = {}
    for parent in [*root.iter()]:
        for defs in parent.findall(DEFS):
            for path in defs.findall(PATH):
                drawings[f"#{path.get('id')}"] = path
                defs.remove(path)
            if len(defs) == 0:
                parent.remove(defs)
    return drawings


def _join_groups(parent: Element) -> None:
    """Make one of adjacent groups that differ in nothing but what they hold."""
    joined: list[Element] = []
    for child in parent:
        if joined and child.tag == joined[-1].tag == G and child.attrib == joined[-1].attrib:
            joined[-1].extend(child)
        else:
            joined.append(child)
    parent[:] = joined


def _join_points(parent: Element, markers: dict[Kind, str]) -> None:
    """Draw each run of equal points in `parent` as one path, after all comments."""
    joined: list[Element] = [child for child in parent if child.tag is Comment]
    for kind, children in groupby((child for child in parent if child.tag is not Comment), _kind):
        run = [*children]
        if kind and len(run) >= FEWEST:
            points = [(round(100 * float(use.get("x", 0))), round(100 * float(use.get("y", 0)))) for use in run]
            run = [_path(kind, points, markers, places=2)]
        joined += run
    parent[:] = joined


def _kind(element: Element) -> Kind | None:
    placed = element.tag == USE and not element.get("transform")
    return (element.get("href", ""), element.get("style", "")) if placed else None


def _path(kind: Kind, points: list[Point], markers: dict[Kind, str], places: int) -> Element:
    name = markers.setdefault(kind, f"marker{len(markers)}")
    return Element(PATH, {"d": through(points, places), "style": f"fill:none;marker:url(#{name})"})


def _join_letters(parent: Element, markers: dict[Kind, str], drawings: dict[str, Element]) -> None:
    """Draw all equal letters of the texts in `parent` as one path for each size."""
    letters: Letters = defaultdict(list)
    for text in [child for child in parent if child.tag == G and TEXT.fullmatch(child.get("transform", ""))]:
        for use in text.findall(USE):
            text.remove(use)
            if drawings[use.get("href", "")].get("d"):  # no space
                transform, point = _placed(text.get("transform", ""), use.get("transform", "translate(0 0)"))
                letters[transform, (use.get("href", ""), text.get("style", ""))].append(point)
        if len(text) == 0:
            parent.remove(text)
    counts: Counter[Kind] = Counter()
    for (_, kind), points in letters.items():
        counts[kind] += len(points)
    for transform, kinds in groupby(sorted(letters), lambda key: key[0]):
        group = SubElement(parent, G, {"transform": transform})
        for key in kinds:
            (name, style), points = key[1], sorted(letters[key], key=lambda point: (-point[1], point[0]))
            if len(points) > 1 and counts[key[1]] >= FEWEST:
                group.append(_path(key[1], points, markers, places=0))
            else:
                shared = {"href": name, "style": style} if style else {"href": name}
                group.extend(Element(USE, {**shared, "x": f"{x}", "y": f"{y}"}) for x, y in points)


def _placed(text: str, letter: str) -> tuple[str, Point]:
    """The transform that letters of this size share, and the place of one in it, in units of EM."""
    outer, inner = TEXT.fullmatch(text), IN_TEXT.fullmatch(letter)
    assert outer and inner, (text, letter)
    x, y, angle, wide, high = (float(number or 0) for number in outer.groups())
    along, up, size = (float(number or 1) for number in inner.groups())
    cos, sin = math.cos(math.radians(angle)), math.sin(math.radians(angle))
    units = EM / 100 / size
    point = (along + (cos * x + sin * y) / wide) * units, (up + (cos * y - sin * x) / high) * units
    turned = f"rotate({angle:g})" if angle else ""
    return f"{turned}scale({wide / units:.6g} {high / units:.6g})", (round(point[0]), round(point[1]))


def _define(root: Element, markers: dict[Kind, str], drawings: dict[str, Element]) -> None:
    """Draw at one place what is repeated, in its marker if it has one."""
    for use in root.iter(USE):
        if use.get("style") == drawings[use.get("href", "")].get("style", ""):
            del use.attrib["style"]
    uses = Counter([use.get("href", "") for use in root.iter(USE)] + [name for name, _ in markers])
    place = SubElement(root, DEFS)
    for (name, style), marker in markers.items():
        around = SubElement(place, f"{SVG}marker", {"id": marker})
        if uses[name] == 1 or not style:
            path = drawings.pop(name)
            path.attrib |= {"style": style} if style else {}
            around.append(path)
        else:
            SubElement(around, USE, {"href": name, "style": style})
    place.extend(drawing for drawing in drawings.values() if drawing.get("d"))
    sheet = root.find(f".//{SVG}style")
    if sheet is not None:
        sheet.text = f"{sheet.text or ''}marker{{overflow:visible}}"
