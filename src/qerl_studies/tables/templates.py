"""Templates of pages, in the folder templates/ of a package."""

from __future__ import annotations

from jinja2 import Environment, PackageLoader, StrictUndefined


def templates(package: str, html: bool = False) -> Environment:
    """Those of `package`; `html` escapes what is put in, otherwise pages are text and end with their line break."""
    return Environment(
        loader=PackageLoader(package),
        autoescape=html,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=not html,
        undefined=StrictUndefined,
    )
