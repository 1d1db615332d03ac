"""The page of a run's samples in a real browser."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.page.chromium import Browser


@pytest.fixture
def page(browser: Browser, sample_page: Path) -> Browser:
    browser.look()
    browser.open(sample_page)
    assert browser.problems == [] and len(browser.requests) == 1
    return browser


def choose(page: Browser, name: str, value: int) -> None:
    page.value(f"{{ $('{name}').value = {value}; $('{name}').dispatchEvent(new Event('input', {{bubbles: true}})) }}")
    assert page.problems == []


COLORS = "[...document.querySelectorAll('.tokens span')].map((one) => getComputedStyle(one).backgroundColor)"


def test_a_group_stands_side_by_side_with_rewards_and_advantages(page: Browser) -> None:
    assert page.value("document.querySelectorAll('.completion').length") == 4
    texts = page.value("[...document.querySelectorAll('.completion p')].map((one) => one.textContent)")
    completions = page.value("steps[0].groups[0].completions")
    for text, one in zip(texts, completions, strict=True):
        assert f"reward {one['reward']}" in text and f"advantage {one['advantage']}" in text
        assert all(f"{name} " in text for name in one["parts"])
    tokens = page.value("[...document.querySelector('.completion .tokens').children].map((one) => one.textContent)")
    assert tokens == completions[0]["tokens"]


def test_steps_and_groups_can_be_chosen_by_keyboard_too(page: Browser) -> None:
    first = page.value("$('shown').textContent")
    page.value("$('step').focus()")
    page.press("ArrowRight")
    assert "Step 2" in page.value("$('shown').textContent") and page.value("$('shown').textContent") != first
    assert page.value("$('group').options.length") == 2
    question = page.value("document.querySelector('.question').textContent")
    choose(page, "group", 1)
    assert page.value("document.querySelector('.question').textContent") != question


def test_tokens_are_colored_by_what_the_run_measured(page: Browser) -> None:
    """Noise moves log-probabilities, the kernels of one and the same program do not."""
    numbers = "steps.flatMap((one) => one.groups.flatMap((some) => some.completions.flatMap((c) => numbers(c, {}))))"
    entropy, noise, kernels, both = (page.value(numbers.format(f"data.scales[{place}]")) for place in range(4))
    assert min(entropy) > 3 and max(map(abs, noise)) > 0.05 and max(map(abs, kernels)) <= 0.002
    assert [a + b for a, b in zip(noise, kernels, strict=True)] == pytest.approx(both, abs=1e-6)
    choose(page, "scale", 1)
    colors = page.value(COLORS)
    assert len({*colors}) > 5
    assert "blue below zero" in page.value("$('key').textContent")
    choose(page, "scale", 0)
    assert page.value(COLORS) != colors


def test_a_token_tells_all_its_numbers(page: Browser) -> None:
    moved = "new PointerEvent('pointermove', {clientX: 5, clientY: 5})"
    page.value(f"document.querySelector('.tokens span').dispatchEvent({moved})")
    told = page.value("$('tip').textContent")
    assert told.count("nats") == 4 and "token 1" in told


def test_a_run_of_before_tokens_shows_its_texts(browser: Browser, tmp_path: Path) -> None:
    import json

    from qerl_studies.report.run_page import run_page

    lines = [{"step": step, "prompt": "p", "completion": f"<b>{step}", "gold": "1", "reward": 0.5} for step in (1, 2)]
    (tmp_path / "rollouts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 3, "pro')
    (tmp_path / "page.html").write_text(run_page(tmp_path, "index.html"))
    browser.open(tmp_path / "page.html")
    assert browser.problems == []
    assert browser.value("document.querySelector('.tokens').textContent") == "<b>1"
    assert browser.value("$('key').textContent") == "not measured in this step"


def test_a_narrow_window_shows_all(browser: Browser, sample_page: Path) -> None:
    browser.look(400)
    browser.open(sample_page)
    assert browser.value("document.documentElement.scrollWidth") <= 400
    browser.look()


def test_answers_before_and_after_training_are_listed(page: Browser) -> None:
    rows = page.value("document.querySelectorAll('#changed ~ div tbody tr').length")
    assert rows == 4
