"""Makes Matplotlib's SVG half as large, for figures that a repository holds: the same drawing to 0.01 points."""

from __future__ import annotations

import re
from xml.etree import ElementTree

SVG, LINK = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}href"
NAMED = re.compile(r'(?:xlink:href="|url\()#([^")]+)')
NUMBER = re.compile(r"-?\d+\.\d+")
STEP = re.compile(r"([MLQCz])([^MLQCz]*)")
PLACES = ("x", "y", "width", "height")


def compact(text: str) -> str:
    """`text` with rounded coordinates, relative paths, short names, each style once, and nothing that nothing uses."""
    names = {name: f"i{number:x}" for number, name in enumerate(dict.fromkeys(NAMED.findall(text)))}
    ElementTree.register_namespace("", SVG.strip("{}"))
    root = ElementTree.fromstring(text, ElementTree.XMLParser(target=ElementTree.TreeBuilder(insert_comments=True)))
    _shorten(root, names)
    _share_styles(root)
    written = ElementTree.tostring(root, encoding="unicode").replace(" />", "/>").replace("<!--", "\n<!--")
    return f'<?xml version="1.0" encoding="utf-8"?>\n{written}\n'


def _shorten(element: ElementTree.Element, names: dict[str, str]) -> None:
    for child in element:
        _shorten(child, names)
    element[:] = [part for child in element for part in (child if _says_nothing(child) else [child])]
    element.tail = None
    if element.tag is not ElementTree.Comment:
        element.text = (element.text or "").strip()
    given = element.attrib.copy()
    element.attrib.clear()
    for key, value in given.items():
        if shorter := _value(key, value, names):
            element.set("href" if key == LINK else key, shorter)
    along = re.fullmatch(r"translate\((\S+) 0\)", element.get("transform", ""))
    if element.tag == f"{SVG}use" and along:  # a letter in its line, in hundredths of its size
        element.set("x", f"{float(along[1]):.0f}")
        del element.attrib["transform"]


def _share_styles(root: ElementTree.Element) -> None:
    """Write each style once, as a class."""
    sheet = root.find(f".//{SVG}style")
    if sheet is None:
        return
    classes: dict[str, str] = {}
    for element in root.iter():
        if style := element.attrib.pop("style", ""):
            element.set("class", classes.setdefault(style, f"s{len(classes):x}"))
    sheet.text = "".join([sheet.text or "", *(f".{name}{{{style}}}" for style, name in classes.items())])


def _says_nothing(element: ElementTree.Element) -> bool:
    return element.tag == f"{SVG}g" and not element.attrib


def _value(key: str, value: str, names: dict[str, str]) -> str:
    """A shorter value of an attribute; empty if it is a name that nothing uses."""
    if key == "id":
        return names.get(value, "")
    if key == "d":
        return _relative(value)
    if key == "style":
        return value.replace(": ", ":").replace("; ", ";")
    if key in PLACES:
        return NUMBER.sub(_rounded, value)
    if key == "transform":
        return re.sub(r"translate\([^)]*\)", lambda move: NUMBER.sub(_rounded, move[0]), value)
    return re.sub(r"(^|url\()#([^)]+)", lambda name: f"{name[1]}#{names[name[2]]}", value)


def _rounded(number: re.Match[str]) -> str:
    return _decimal(round(100 * float(number[0])))


def _decimal(hundredths: int) -> str:
    text = f"{hundredths / 100:g}"
    return text.replace("0.", ".", 1) if abs(hundredths) < 100 else text


def _relative(path: str) -> str:
    """A path of absolute M, L, Q, C and z, as steps from the point before."""
    written, here, start = [], (0, 0), (0, 0)
    for command, numbers in STEP.findall(path):
        ends = [round(100 * float(number)) for number in numbers.split()]
        steps = [_decimal(end - here[place % 2]) for place, end in enumerate(ends)]
        written.append(command.lower() + " ".join(steps).replace(" -", "-"))
        here = (ends[-2], ends[-1]) if ends else start
        start = here if command == "M" else start
    return "".join(written)
