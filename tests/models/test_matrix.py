"""The committed table of docs/models.md: its NVFP4 column computed again, and what the whole must show.

The other formats: make test-models.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models import builds, cell, matrix

COMMITTED = {(found.architecture, found.quant): found for found in matrix.read()}
# A base model that works with nothing left out, of each kind.
WHOLE = ("llama", "mistral", "qwen2", "qwen3", "gemma3", "mixtral", "qwen3_moe")


@pytest.mark.parametrize("architecture", builds.known())
def test_a_cell_is_what_the_table_says(architecture: str, tmp_path: Path) -> None:
    """Two steps with noise in NVFP4, and every check of `cell.examine`."""
    checkpoint = builds.build(architecture, tmp_path / architecture)
    found = cell.outcome(architecture, "nvfp4", checkpoint, tmp_path)
    assert matrix.comparable(found) == matrix.comparable(COMMITTED[architecture, "nvfp4"])


def test_the_table_has_every_cell_and_none_fails() -> None:
    assert list(COMMITTED) == [(name, quant) for name in builds.ARCHITECTURES for quant in matrix.FORMATS]
    assert [found for found in COMMITTED.values() if found.verdict not in ("works", "refused")] == []
    assert sum(COMMITTED[name, "nvfp4"].verdict == "works" for name in builds.ARCHITECTURES) >= 25
    assert all(found.reason for found in COMMITTED.values() if found.verdict == "refused")


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("quant", matrix.FORMATS)
def test_common_models_work_without_any_option(name: str, quant: str) -> None:
    found = COMMITTED[name, quant]
    assert (found.verdict, found.options, found.norms) == ("works", "", "4/2")
    assert found.packed == ("0.00" if quant == "bf16" else "1.00")


def test_the_page_shows_the_table() -> None:
    page = matrix.PAGE.read_text()
    assert page.partition(matrix.MARKS[0])[2].partition(matrix.MARKS[1])[0] == matrix.render(list(COMMITTED.values()))


def test_wrong_weights_a_missed_norm_and_another_temperature_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checks of a cell can fail: each defect by itself, with the harness's own checks before the run left out."""
    from qerl_bench import experiment, model_setup, run_setup

    checkpoint = builds.build("llama", tmp_path / "llama")
    monkeypatch.setattr(run_setup, "preflight", lambda *_: {})

    def reason() -> str:
        found = cell.outcome("llama", "nvfp4", checkpoint, tmp_path)
        assert found.verdict == "fails"
        return found.reason

    with monkeypatch.context() as patch:
        patch.setattr(cell, "dequantized", lambda model: [("model.norm.weight", torch.ones(64))])
        assert "trainer and transformers differ by" in reason()
    with monkeypatch.context() as patch:
        sites = model_setup.build_noise

        def one_fewer(*arguments: Any) -> Any:
            injector = sites(*arguments)
            injector.norms = dict(list(injector.norms.items())[1:])
            return injector

        patch.setattr(model_setup, "build_noise", one_fewer)
        assert "no noise at ['model.layers.0.input_layernorm']" in reason()
    with monkeypatch.context() as patch:
        sampling = experiment.rollout_sampling
        patch.setattr(
            experiment,
            "rollout_sampling",
            lambda *arguments, **options: replace(sampling(*arguments, **options), temperature=0.9),
        )
        assert "sampler and trainer differ by" in reason()
