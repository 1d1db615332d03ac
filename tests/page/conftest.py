"""A browser, and pages of small studies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from qerl_bench.config import build
from qerl_studies.commands import report as command
from tests.page.chromium import PROGRAM, Browser

TINY = Path(__file__).parents[2] / "studies" / "tiny"


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if PROGRAM is None:
        pytest.skip("needs Chromium: make test-page installs Debian's")
    browser = Browser(tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()


@pytest.fixture(scope="session")
def study_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of the committed tiny study: 312 runs of 39 settings."""
    out = tmp_path_factory.mktemp("report")
    command.main([str(TINY), "--out", str(out)])
    return out / "index.html"


@pytest.fixture(scope="session")
def sample_page(make_config: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of the samples of a tiny run with much noise, which keeps two groups of each of its four steps."""
    from qerl_bench.commands.run import run_experiment
    from tests.short_runs import without_figures

    folder = tmp_path_factory.mktemp("root")
    noise = ("aqn=constant", "aqn.level=0.5", "train.mismatch_share=1")
    config = make_config("quant=nvfp4", *noise, "train.kept_groups=2", f"root={folder}", "name=run")
    with without_figures():
        run_experiment(build(config), config)
    command.main([str(folder), "--out", str(folder / "report")])
    return folder / "report" / "samples" / "run.html"
