"""Runs that several files of unit tests damage, continue and read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qerl_bench.config import build


class Runs:
    """A run that was killed in step 5, with checkpoints of steps 2 and 4, and the same run finished."""

    def __init__(self, config: Any) -> None:
        from qerl_bench.commands.run import run_experiment
        from tests.short_runs import killed_in_step

        self.config, self.experiment = config, build(config)
        self.unfinished = self.experiment.run_dir.with_name("unfinished")
        self.finished = self.experiment.run_dir
        with killed_in_step(5):
            run_experiment(self.experiment, config)
        shutil.copytree(self.finished, self.unfinished)
        run_experiment(self.experiment, config)

    @staticmethod
    def numbers(folder: Path) -> list[dict[str, Any]]:
        """What metrics.jsonl says, without what differs from one attempt to the next."""
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        measured = ("time", "speed", "memory")
        return [{key: record[key] for key in record if not key.startswith(measured)} for record in records]

    def copy(self, state: str, to: Path) -> Path:
        return shutil.copytree(getattr(self, state), to)


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparing LaTeX has a limit so short that a test is quick; the real one differs in its length alone."""
    from qerl_bench.task.grader import latex

    monkeypatch.setattr(latex, "LIMIT_S", 0.3)
    latex._compare_in_worker.cache_clear()


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """flash(function): from here on PyTorch computes attention over packed sequences on a GPU by it."""
    from torch.nn.attention import varlen

    return lambda function: monkeypatch.setattr(varlen, "varlen_attn", function)


@pytest.fixture
def show_claims(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """show_claims(2): from here on the page of a study shows no more than the first claims."""
    from qerl_studies.claims.registry import QERL, claims_of
    from qerl_studies.report import study_page

    return lambda count: monkeypatch.setattr(study_page, "shown_claims", lambda: claims_of(QERL)[:count])


@pytest.fixture(scope="session")
def runs(make_config: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Runs:
    words = (
        "quant=nvfp4",
        "aqn=exp",
        "steps=6",
        "train.entropy_coef=0.01",
        f"root={tmp_path_factory.mktemp('root')}",
        "name=run",
    )
    from tests.short_runs import without_figures

    with without_figures():
        return Runs(make_config(*words))
