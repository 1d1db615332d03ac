"""--style: figures as wide as the page they go to, text of its size, and the look of the docs unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from matplotlib import rcParams
from matplotlib.figure import Figure

from qerl_studies.commands.figure import main
from qerl_studies.figures import style
from qerl_studies.figures.named import FIGURES, Named


@pytest.fixture(autouse=True)
def docs_again() -> Iterator[None]:
    yield
    style.use_style("docs")


@pytest.mark.parametrize(
    ("name", "widths", "size"),
    [
        ("docs", (5.5, 5.5, 6.75), 8.0),
        ("neurips", (5.5, 5.5, 5.5), 8.0),
        ("icml", (3.25, 6.75, 6.75), 8.0),
        ("slides", (9.9, 9.9, 12.15), 14.4),
    ],
)
def test_widths_and_sizes(name: str, widths: tuple[float, ...], size: float) -> None:
    style.use_style(name)
    wanted = ((1, style.TEXT_WIDTH), (2, style.TEXT_WIDTH), (3, style.FULL_WIDTH))
    with style.paper_style():
        figures = [style.panels(1, columns, 2.0, width)[0] for columns, width in wanted]
        assert [figure.get_figwidth() for figure in figures] == pytest.approx(widths)
        assert rcParams["font.size"] == pytest.approx(size) and style.small() == pytest.approx(size * 7 / 8)
        for figure in figures:
            assert figure.get_figheight() == pytest.approx(2.0 * size / 8)
            style.caption(figure, "a caption of many words " * 20)
            figure.draw_without_rendering()
            box = figure._supxlabel.get_window_extent()  # type: ignore[attr-defined]  # matplotlib has no other way
            assert box.x1 <= figure.bbox.width


def one_panel(_: object) -> Figure:
    with style.paper_style():
        return style.panels(1, 1, 2.0)[0]


def test_a_figure_is_pdf_for_a_page_and_svg_for_the_docs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FIGURES, "f", Named("a panel", lambda _: None, one_panel))
    for words, ending in (
        (["--style", "icml"], "pdf"),
        ([], "svg"),
        (["--style", "slides", "--formats", "png"], "png"),
    ):
        main(["f", str(tmp_path), "--out", str(tmp_path), *words])
        assert capsys.readouterr().out.strip() == str(tmp_path / f"f.{ending}")
    assert (tmp_path / "f.pdf").read_bytes().count(b"/MediaBox [ 0 0 234 144 ]") == 1  # 3.25 x 2 in, in points
