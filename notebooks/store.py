"""Runs the notebooks and stores what they show, for readers on GitHub: `python notebooks/store.py`, after any change.

The outputs are those of the eight short runs in tests/assets/runs. Needs no Jupyter.
"""

from __future__ import annotations

import ast
import base64
import io
import json
import os
from collections.abc import Iterator
from contextlib import chdir, redirect_stdout
from importlib.metadata import version
from pathlib import Path
from typing import Any

from PIL import Image

FOLDER = Path(__file__).resolve().parent
RUNS = "../tests/assets"  # QERL_ROOT, as seen from here
COLORS = 20  # of a stored picture
DRAWN_BY = ("matplotlib", "pandas", "pillow")  # whose versions decide what tables and pictures look like


def outputs(notebook: dict[str, Any], name: str) -> Iterator[list[dict[str, Any]]]:
    """The outputs of each code cell, run from top to bottom in one namespace, in the notebook format."""
    names: dict[str, Any] = {"__name__": "__main__"}
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(code, 1):
        *lines, last = ast.parse("".join(cell["source"])).body
        printed = io.StringIO()
        with redirect_stdout(printed):
            ends_with_value = isinstance(last, ast.Expr)
            exec(compile(ast.Module(lines if ends_with_value else [*lines, last], []), name, "exec"), names)
            value = eval(compile(ast.Expression(last.value), name, "eval"), names) if ends_with_value else None
        streams = [{"name": "stdout", "output_type": "stream", "text": printed.getvalue().splitlines(keepends=True)}]
        result = {"data": shown(value), "execution_count": number, "metadata": {}, "output_type": "execute_result"}
        yield [*(streams if printed.getvalue() else []), *([result] if value is not None else [])]


def shown(value: Any) -> dict[str, Any]:
    """What Jupyter would show of a value, by type: a picture, a table, or text."""
    if hasattr(value, "_repr_png_"):
        with Image.open(io.BytesIO(value._repr_png_())) as image, io.BytesIO() as file:
            small = image.convert("RGB").resize((image.width * 5 // 8, image.height * 5 // 8), Image.Resampling.LANCZOS)
            small.quantize(COLORS, Image.Quantize.MAXCOVERAGE).save(file, format="png", optimize=True)
            return {"image/png": base64.b64encode(file.getvalue()).decode(), "text/plain": ["a figure"]}
    html = {"text/html": value._repr_html_().splitlines(keepends=True)} if hasattr(value, "_repr_html_") else {}
    return html | {"text/plain": repr(value).splitlines(keepends=True)}


def store(path: Path) -> None:
    """Run a notebook over the recorded runs and write its outputs into it."""
    notebook = json.loads(path.read_text())
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    with chdir(path.parent):
        for number, (cell, found) in enumerate(zip(code, outputs(notebook, path.name), strict=True), 1):
            cell |= {"outputs": found, "execution_count": number}
    notebook["metadata"]["drawn_by"] = versions()
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


def versions() -> dict[str, str]:
    return {package: version(package) for package in DRAWN_BY}


if __name__ == "__main__":
    os.environ["QERL_ROOT"] = RUNS
    for file in sorted(FOLDER.glob("*.ipynb")):
        store(file)
