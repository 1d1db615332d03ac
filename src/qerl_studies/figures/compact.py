"""Makes Matplotlib's SVG a third as large, for figures that a repository holds: the same drawing to 0.01 points."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from qerl_studies.figures.svg_markers import EM, SVG, G, draw_repeats_as_markers
from qerl_studies.figures.svg_path import decimal, shorter

LINK = "{http://www.w3.org/1999/xlink}href"
NAMED = re.compile(r'(href="#|url\(#)([^")]+)')
NUMBER = re.compile(r"-?\d+\.\d+")
PLACES = ("x", "y", "width", "height")
LETTER = "scale(0.015625)"  # of a letter's outline, in 64ths of hundredths of the size of its text
SHORT = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def compact(text: str) -> str:
    """`text` with rounded coordinates, relative paths, short names, each style once, and repeats as markers.

    Of its metadata the program and version that drew it.
    """
    ElementTree.register_namespace("", SVG.strip("{}"))
    root = ElementTree.fromstring(text, ElementTree.XMLParser(target=ElementTree.TreeBuilder(insert_comments=True)))
    for told in root.iter(f"{SVG}metadata"):
        drawn_by = re.search(r"Matplotlib v[\d.]+", "".join(told.itertext()))
        told[:], told.text = [], drawn_by[0] if drawn_by else ""
    _shorten(root, {name for _, name in NAMED.findall(text)})
    draw_repeats_as_markers(root)
    _share_styles(root)
    written = ElementTree.tostring(root, encoding="unicode").replace(" />", "/>").replace("<!--", "\n<!--")
    return f'<?xml version="1.0" encoding="utf-8"?>\n{_with_short_names(written)}\n'


def _shorten(element: ElementTree.Element, used: set[str]) -> None:
    for child in element:
        _shorten(child, used)
    element[:] = [part for child in element for part in (child if _says_nothing(child) else [child])]
    element.tail = None
    if element.tag is not ElementTree.Comment:
        element.text = (element.text or "").strip()
    given = element.attrib.copy()
    element.attrib.clear()
    is_letter = given.get("transform") == LETTER
    for key, value in given.items():
        if key == "d":
            element.set(key, shorter(value, EM / 6400, places=0) if is_letter else shorter(value))
        elif not (is_letter and key == "transform") and (key != "id" or value in used):
            element.set("href" if key == LINK else key, _value(key, value))


def _says_nothing(element: ElementTree.Element) -> bool:
    return element.tag == G and not element.attrib


def _value(key: str, value: str) -> str:
    if key == "style":
        return value.replace(": ", ":").replace("; ", ";")
    if key in PLACES:
        return NUMBER.sub(_rounded, value)
    if key == "transform":
        return re.sub(r"translate\([^)]*\)", lambda move: NUMBER.sub(_rounded, move[0]), value)
    return value


def _rounded(number: re.Match[str]) -> str:
    return decimal(round(100 * float(number[0])), places=2)


def _share_styles(root: ElementTree.Element) -> None:
    """Write each style once, as a class."""
    sheet = root.find(f".//{SVG}style")
    if sheet is None:
        return
    classes: dict[str, str] = {}
    for element in root.iter():
        if style := element.attrib.pop("style", ""):
            element.set("class", classes.setdefault(style, _short(len(classes))))
    sheet.text = "".join([sheet.text or "", *(f".{name}{{{style}}}" for style, name in classes.items())])


def _with_short_names(written: str) -> str:
    used = dict.fromkeys(name for _, name in NAMED.findall(written))
    names = {name: _short(number) for number, name in enumerate(used)}
    written = NAMED.sub(lambda found: f"{found[1]}{names[found[2]]}", written)
    return re.sub(r' id="([^"]+)"', lambda found: f' id="{names[found[1]]}"' if found[1] in names else "", written)


def _short(number: int) -> str:
    """a, b, ... z, A, ... Z, aa, ab, ..."""
    return ("" if number < len(SHORT) else _short(number // len(SHORT) - 1)) + SHORT[number % len(SHORT)]
