"""The study page in a real browser: what filters leave, drawn and saved, and what needs no mouse."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from qerl_studies.commands import report
from tests.page.chromium import Browser

ONE = Path(__file__).parents[1] / "assets" / "runs" / "nvfp4-exp-grpo-r32-s0-a101d16e"
SHOWN = "[...document.querySelectorAll('{}')].filter((one) => !one.hidden && !one.closest('[hidden]')).length"
MARKS = "document.querySelectorAll('#overview g.mark').length"


@pytest.fixture
def page(browser: Browser, study_page: Path) -> Browser:
    browser.look()
    browser.open(study_page)
    assert browser.problems == []
    assert browser.requests == [study_page.resolve().as_uri()]
    return browser


def choose(page: Browser, name: str, value: str) -> None:
    page.value(f"const s = document.forms.filters.elements['{name}']; s.value = '{value}';"
               "s.dispatchEvent(new Event('change', {bubbles: true}))".join("{}"))  # fmt: skip
    assert page.problems == []


def test_a_filter_changes_tables_and_drawings(page: Browser) -> None:
    runs, marks = page.value(SHOWN.format("tr[data-run]")), page.value(MARKS)
    doses = "document.querySelectorAll('#dose-chart circle').length"
    primary = "data.effects.filter((one) => one.pairs && one.role === 'primary').length"
    expected = [page.value(one) for one in ("data.runs.length", primary, "data.doses.length")]
    assert [runs, marks, page.value(doses)] == expected and runs == 312 and marks > 10
    choose(page, "format", "nf4")
    settings = page.value("new Set(runsLeft().map((run) => run.name.replace(/-s\\d+-/, '-'))).size")
    assert page.value(SHOWN.format("tr[data-run]")) == 8 * settings < runs
    assert 0 < page.value(MARKS) < marks
    assert page.value(doses) == page.value("data.doses.filter((dose) => dose.axes.format === 'nf4').length") > 0
    assert f"{8 * settings} of 312 runs" in page.value("$('counts').textContent")
    choose(page, "format", "")
    choose(page, "verdict", page.value("document.forms.filters.elements.verdict.options[1].value"))
    chosen = page.value("document.forms.filters.elements.verdict.value")
    rows = "[...document.querySelectorAll('tr[data-verdict]')].filter((row) => !row.hidden)"
    assert page.value(f"{rows}.every((row) => row.dataset.verdict === '{chosen}')")
    page.value("document.forms.filters.reset()")
    page.value("new Promise((done) => setTimeout(done, 50))")
    assert (page.value(SHOWN.format("tr[data-run]")), page.value(MARKS)) == (runs, marks)


def test_seeds_take_the_place_of_intervals(page: Browser) -> None:
    dots = "document.querySelectorAll('#overview circle').length"
    assert page.value(dots) == 0
    page.value("document.querySelector('[value=seeds]').click()")
    effects = page.value(
        "data.effects.filter((one) => one.pairs && one.role === 'primary').map((one) => one.pairs.length)"
    )
    assert page.value(dots) == sum(effects) > 0


def test_the_numbers_drawn_are_those_of_the_table(page: Browser) -> None:
    """An effect's pairs have its mean, and the cell of the matrix shows its text."""
    effects = [one for one in page.value("data.effects") if one.get("pairs")]
    for place, effect in enumerate(page.value("data.effects")):
        if effect.get("pairs"):
            mean = sum(pair["in_margins"] for pair in effect["pairs"]) / len(effect["pairs"])
            assert mean == pytest.approx(effect["in_margins"][0], rel=1e-4, abs=1e-6)
        if effect["role"] == "primary" and effect.get("text"):
            cell = page.value(f"document.querySelector('[data-effect=\"{place}\"]').textContent")
            assert effect["text"] in cell and effect["origin"] in cell
    assert effects


def test_saved_files_have_the_rows_that_are_left(page: Browser) -> None:
    choose(page, "format", "bf16")
    page.value("$('save-runs').click()")
    rows = list(csv.DictReader(io.StringIO(page.saved("runs.csv"))))
    assert len(rows) == page.value("runsLeft().length") > 50 and {row["format"] for row in rows} == {"bf16"}
    entropies = [run["numbers"]["entropy_first"] for run in page.value("runsLeft()")]
    assert [float(row["entropy, first"] or "nan") for row in rows] == pytest.approx(
        [float("nan") if entropy is None else entropy for entropy in entropies], nan_ok=True
    )
    page.value("document.forms.filters.elements.format.value = ''; apply()")
    page.value("$('save-effects').click()")
    effects = list(csv.DictReader(io.StringIO(page.saved("effects.csv"))))
    assert len(effects) == page.value("data.effects.length")
    page.value("$('save-pairs').click()")
    pairs = list(csv.DictReader(io.StringIO(page.saved("pairs.csv"))))
    assert len(pairs) == page.value("$('pair-table').tBodies[0].rows.length") == 8


def test_a_spreadsheet_gets_no_formula(page: Browser) -> None:
    cells = page.value("['=1+1', '-0.5', '+x', 'a,\"b', null].map(csvCell)")
    assert cells == ["'=1+1", "-0.5", "'+x", '"a,""b"', ""]


def test_tables_are_sorted_by_number_and_gaps_come_last(page: Browser) -> None:
    head = "[...document.querySelectorAll('#run-table th button')].find((one) => one.textContent === 'entropy, first')"
    texts = "[...$('run-table').tBodies[0].rows].map((row) => row.cells[13].textContent)"
    column = page.value(f"{head}.closest('th').cellIndex")
    texts = texts.replace("13", str(column))
    page.value(f"{head}.click()")
    up = page.value(texts)
    known = [text for text in up if text != "-"]
    assert known == sorted(known, key=float) and 0 < len(known) < len(up) and up[: len(known)] == known
    assert page.value(f"{head}.closest('th').getAttribute('aria-sort')") == "ascending"
    page.value(f"{head}.click()")
    down = page.value(texts)
    assert down[: len(known)] == sorted(known, key=float, reverse=True) and {*down[len(known) :]} == {"-"}
    order = "['-', '12', '3', '-1', '1,000', ''].sort((a, b) => inOrder(a, b, {}))"
    assert page.value(order.format(1)) == ["-1", "3", "12", "1,000", "-", ""]
    assert page.value(order.format(-1)) == ["1,000", "12", "3", "-1", "-", ""]


def test_the_keyboard_reaches_filters_sorting_and_marks(page: Browser) -> None:
    page.value("document.querySelector('#run-table th button').focus()")
    page.press("Enter")
    assert page.value("document.querySelector('#run-table th').getAttribute('aria-sort')") == "ascending"
    page.value("document.querySelector('#overview svg').focus()")
    page.press("ArrowDown")
    first = page.value("$('tip').textContent")
    page.press("ArrowDown")
    second = page.value("$('tip').textContent")
    assert not page.value("$('tip').hidden") and first != second
    assert page.value("$('said').textContent") == second  # for a screen reader
    page.press("ArrowUp")
    assert page.value("$('tip').textContent") == first
    page.press("Tab")
    assert page.value("$('tip').hidden")


def test_everything_has_a_name_for_a_screen_reader(page: Browser) -> None:
    nodes = page.send("Accessibility.getFullAXTree")["nodes"]
    roles = ("button", "combobox", "radio", "link", "image", "region", "textbox")
    named = [node for node in nodes if node.get("role", {}).get("value") in roles and not node.get("ignored")]
    assert len(named) > 40
    assert [node for node in named if not node.get("name", {}).get("value")] == []


@pytest.mark.parametrize("width", [1200, 400, 320])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_nothing_is_wider_than_the_window_and_text_is_readable(
    browser: Browser, study_page: Path, width: int, dark: bool
) -> None:
    browser.look(width, dark)
    browser.open(study_page)
    assert browser.value("document.documentElement.scrollWidth") <= width
    text, back = (browser.value(f"getComputedStyle(document.body).{name}") for name in ("color", "backgroundColor"))
    assert abs(_light(text) - _light(back)) > 180
    assert (_light(back) < 60) == dark


def _light(color: str) -> float:
    return sum(float(part) for part in color.partition("(")[2].rstrip(")").split(",")[:3]) / 3


def test_without_a_script_the_tables_say_the_same(browser: Browser, study_page: Path) -> None:
    browser.look(javascript=False)
    browser.open(study_page)
    text, folded = browser.value("document.body.innerText"), browser.value("document.body.textContent")
    data = json.loads(browser.value("document.getElementById('data').textContent"))
    browser.look()
    for effect in data["effects"]:
        assert effect["cells"][4] in text or effect["reason"] in folded
    assert all(run["name"] in text for run in data["runs"])
    assert "save as CSV" not in text and "verdict\nall" not in text


def test_ticks_of_a_narrow_axis_tell_apart(page: Browser) -> None:
    for low, high in ((5.54059, 5.54068), (-0.03, 0.03), (-240, 240)):
        shown = page.value(f"ticks({low}, {high})")
        assert len({text for _, text in shown}) == len(shown) > 3
        assert [float(text) for _, text in shown] == pytest.approx([value for value, _ in shown], abs=1e-9)


def test_filters_are_kept_when_the_page_loads_again(page: Browser) -> None:
    choose(page, "format", "nvfp4")
    page.reload()
    assert page.value("document.forms.filters.elements.format.value") == "nvfp4"
    assert 0 < page.value(SHOWN.format("tr[data-run]")) < 312
    choose(page, "format", "")


def test_print_shows_tables_without_controls(browser: Browser, study_page: Path, tmp_path: Path) -> None:
    browser.look(dark=True, media="print")
    browser.open(study_page)
    assert _light(browser.value("getComputedStyle(document.body).color")) < 60  # on white paper
    assert browser.value("document.querySelector('.rules').getBoundingClientRect().height") > 100  # though not open
    assert browser.value("getComputedStyle($('filters')).display") == "none"
    assert browser.value("getComputedStyle($('save-runs')).display") == "none"
    browser.pdf(tmp_path / "page.pdf")
    browser.look()
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF") and (tmp_path / "page.pdf").stat().st_size > 50_000


def test_sections_without_content_are_not_shown(browser: Browser, tmp_path: Path) -> None:
    """Of runs of one arm there is no effect, no dose and no pair to draw."""
    report.main([str(ONE), f"out={tmp_path}"])
    browser.look(320, dark=True)
    browser.open(tmp_path / "index.html")
    shown = browser.value("[...document.querySelectorAll('h2')].filter((one) => one.offsetParent).map((one) => one.id)")
    assert shown == ["own", "verdicts", "claims", "runs"] and not browser.problems
    assert browser.value("$('counts').textContent") == "1 of 1 runs"
    assert browser.value("document.documentElement.scrollWidth") <= 320


def test_ticks_of_curves_are_round(page: Browser) -> None:
    texts = page.value("[...document.querySelectorAll('.curves svg > text')].map((one) => one.textContent)")
    numbers = [one.rstrip("%") for one in texts if one != "step"]
    assert len(numbers) > 20
    for one in numbers:
        assert len(one.replace("-", "").replace(".", "").lstrip("0").rstrip("0")) <= 3, one
