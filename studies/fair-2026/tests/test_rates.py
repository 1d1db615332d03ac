"""Part 2 of the fair test, rates: the designs are those of the frozen protocol, and its runs can start."""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from qerl_bench.config import build, compose
from qerl_core.options import user_options
from qerl_studies.design.design import Design, read_design
from qerl_studies.design.sessions import read_sessions
from tests.scripts import ROOT, script

STUDY = ROOT / "studies" / "fair-2026"
PART = STUDY / "rates"
# SHA-256 of the protocol at its tag, fair-rates
FROZEN = "8b516011dc2f6cf75f332972321e99e96a51788b81616b3fbcd269b55d9803d5"
DESIGNS: dict[str, tuple[range, tuple[str, ...]]] = {
    "05b": (range(43, 51), ("2e-4", "4e-4")),
    "15b": (range(43, 51), ("2e-4", "4e-4")),
    "15b-high": (range(43, 49), ("6e-4",)),
}
ARMS = {"bf16": ("bf16", "rtn"), "nvfp4": ("nvfp4", "rtn"), "four-six": ("nvfp4", "four-six")}


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Those of `--config-dir studies/fair-2026/conf`."""
    monkeypatch.setattr(user_options, "_in_use", [])
    user_options.use([STUDY / "conf"])
    yield user_options.search_path([STUDY / "conf"])


def design_of(name: str, words: list[str]) -> Design:
    return read_design(PART / name / "study.yaml", words)


@pytest.mark.parametrize("name", DESIGNS)
def test_a_design_has_the_arms_of_the_protocol(name: str, words: list[str]) -> None:
    design, (copies, rates) = design_of(name, words), DESIGNS[name]
    assert [*design.bases] == [*copies] and len(design.seeds) == 1
    assert [arm.name for arm in design.arms] == [f"{arm}-{rate}" for rate in rates for arm in ARMS]
    trees = []
    for arm in design.arms:
        chosen = compose(design.words(arm, 43, design.seeds[0], sigma=None))
        experiment: Any = build(chosen)
        kind, rate = re.fullmatch(r"(.*)-(\de-4)", arm.name).groups()  # type: ignore[union-attr]
        assert (experiment.quant.name, experiment.quantizer.name) == ARMS[kind]
        assert experiment.optim.lr == float(rate)
        own = {"bf16": "bf16", "nvfp4": "nvfp4", "four-six": "nvfp4+four-six"}
        assert {*experiment.also_answering} == {*own.values()} - {own[kind]}
        trees.append({key: value for key, value in chosen.items() if key not in ("quant", "quantizer", "name")})
        trees[-1]["optim"] = {key: value for key, value in chosen.optim.items() if key != "lr"}
    assert all(tree == trees[0] for tree in trees)


def test_all_sizes_train_alike(words: list[str]) -> None:
    common = [yaml.safe_load((PART / name / "study.yaml").read_text())["common"] for name in DESIGNS]
    assert len({tuple(word for word in one if not word.startswith("model.id=")) for one in common}) == 1
    protocol = (PART / "protocol.md").read_text()
    runs = sum(len(design.bases) * len(design.arms) for design in (design_of(name, words) for name in DESIGNS))
    assert f"for {runs} runs" in protocol


def test_the_papers_size_is_the_same_study_of_another_model(words: list[str]) -> None:
    design, ours = design_of("3b", words), design_of("15b", words)
    data = ("model=", "model.id=", "task.train_file=", "task.eval_file=")
    of_ours = [word for word in ours.common if not word.startswith(data)]
    assert design.common == of_ours and design.arms == ours.arms and len(design.seeds) == len(ours.bases)
    for arm in design.arms:
        experiment: Any = build(compose(design.words(arm, 0, 1, sigma=None)))
        assert experiment.model.id == "Qwen/Qwen2.5-3B-Instruct" and experiment.seed == 1


def test_the_better_quantizer_is_the_one_that_part_1_names() -> None:
    pages = script("studies/fair-2026/calibration.py")
    words = (STUDY / "calibration" / "results" / "words.md").read_text()
    assert "The rule takes `four-six`." in words and "four-six" in pages.QUANTIZERS


def test_the_protocol_is_the_frozen_one() -> None:
    """Amendments are appended; nothing before them changes."""
    before = (PART / "protocol.md").read_text().partition("\n## Amendments")[0].rstrip("\n")
    assert hashlib.sha256(before.encode()).hexdigest() == FROZEN


def test_copies_are_in_no_other_design() -> None:
    beside = {STUDY / "controls", STUDY / "nf4", STUDY / "full"}  # further arms, on copies of this part on purpose
    others = [path for path in (ROOT / "studies").rglob("*.yaml") if not {PART, *beside} & {*path.parents}]
    drawn = [yaml.safe_load(path.read_text()) for path in others if Path(path).name.endswith(".yaml")]
    used = {copy for one in drawn if isinstance(one, dict) for copy in (one.get("units") or {}).get("dither", [])}
    assert {*range(31, 43)} <= used and not used & {*range(43, 51)}


def test_runs_are_found_wherever_a_session_had_the_files(words: list[str]) -> None:
    session = PART / "data" / "05b" / "2026-11-29"
    design = design_of("05b", words)
    said = yaml.safe_load((session / "study.yaml").read_text())["common"]
    assert {*said} - {*design.common} == {"model.id=/tmp/qwen2.5-coder-0.5b-instruct.gguf"}
    runs = read_sessions(design, [session]).runs
    assert {*runs} == {(arm.name, copy, 0) for arm in design.arms for copy in (43, 44, 45)}
    assert {run.device for run in runs.values()} == {"NVIDIA H200"}


def test_a_file_of_another_name_is_another_file(words: list[str], tmp_path: Path) -> None:
    session = PART / "data" / "05b" / "2026-11-29"
    other = tmp_path / session.name
    shutil.copytree(session, other)
    content = (other / "study.yaml").read_text()
    (other / "study.yaml").write_text(content.replace("0.5b-instruct.gguf", "0.5b-base.gguf"))
    assert not read_sessions(design_of("05b", words), [other]).runs
