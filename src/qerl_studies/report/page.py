"""What all pages share: one self-contained file each, with style, script and data inside, that asks no network."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from qerl_studies.figures.style import FORMAT_COLORS, color
from qerl_studies.tables.templates import templates

FILES = Path(__file__).parent / "templates"


def page(template: str, data: Any = None, **content: Any) -> str:
    """The HTML of a template; its script, TEMPLATE.js, reads `data` as JSON."""
    script = FILES / f"{template}.js"
    return (
        _environment()
        .get_template(f"{template}.html")
        .render(
            style=Markup((FILES / "page.css").read_text()),
            script=Markup("".join(file.read_text() for file in (FILES / "page.js", script)) if script.exists() else ""),
            data=embedded(data),
            **content,
        )
    )


def embedded(data: Any) -> Markup:
    """JSON for a script element: nothing in it can end the element, and what is not finite becomes null."""
    text = json.dumps(finite(data), separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    return Markup(text.replace("<", "\\u003c"))


def finite(value: Any) -> Any:
    """The same with None in place of numbers that are not finite, and six digits of the others."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(part) for key, part in value.items()}
    return [finite(part) for part in value] if isinstance(value, list | tuple) else value


def colors(formats: list[str]) -> dict[str, str]:
    """The color of each weight format, as in every figure; black is the page's text color, which a dark page needs."""
    shades = {name: color(name) for name in formats}
    return {name: "var(--text)" if shade == FORMAT_COLORS["bf16"] else shade for name, shade in shades.items()}


@cache
def _environment() -> Environment:
    return templates("qerl_studies.report", html=True)
