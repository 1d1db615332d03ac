"""A claim is a file: one of somebody else's, in a folder of its own, gets its verdict beside those of the project."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from qerl_bench.__main__ import main
from qerl_core.checks import ConfigError
from qerl_core.options.user_options import use
from qerl_core.process.installation import CONF_DIR
from qerl_core.statistics import holm
from qerl_studies.claims.evaluate import evaluate_claims
from qerl_studies.claims.registry import QERL, claims_of, families, own_claims
from qerl_studies.runs.comparable import load_runs

ASSETS = Path(__file__).parents[1] / "assets" / "runs"
ARMS = {"nvfp4": {"quant.name": "nvfp4", "aqn.name": "none"}, "bf16": {"quant.name": "bf16", "aqn.name": "none"}}
MINE: dict[str, Any] = {
    "defaults": ["shared/learning"],
    "family": "mine",
    "number": 1,
    "paper": "Somebody",
    "address": "arXiv 2700.00001",
    "title": "Ten steps are enough",
    "statement": "NVFP4 has another entropy from the first step on.",
    "reported": "more, by a tenth",
    "reported_effects": [1.1],
    "source": "a page of one's own",
    "expected": "more",
    "measure": {"name": "clean entropy at first", "metric": "entropy", "over": "first step", "ratio": True, "unit": ""},
    "margin": 1.02,
    "where": {"steps": "any", "lora.rank": {"from": 1}},
    "primary": {"lr_factor": "any", "lora.rank": "any"},
    "contrasts": {"nvfp4 - bf16": {"factor": ["quant.", "quantizer."], "arms": ARMS}},
    "gates": [],
    "command": "experiment=tiny/main",
    "at_scale": "experiment=paper/table1",
}


def folder_with(place: Path, **changes: Any) -> Path:
    """A folder of one's own with a single claim; a key whose change is None is left out."""
    (place / "claim").mkdir(parents=True)
    content = {key: value for key, value in (MINE | changes).items() if value is not None}
    (place / "claim" / "ten_steps.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    return place


def test_it_is_judged_and_shown_beside_the_others(tmp_path: Path) -> None:
    folder, out = folder_with(tmp_path / "mine"), tmp_path / "out"
    for command in ("claims", "report"):
        assert main([command, str(ASSETS), f"out={out}", "--config-dir", str(folder)]) == 0
    for page in ("claims.md", "index.html"):
        text = (out / page).read_text()
        assert "claims of QeRL and Somebody" in text and "Somebody (arXiv 2700.00001): more, by a tenth." in text
        for claim in claims_of(QERL):
            assert claim.title in text
    (mine,) = own_claims()
    (result,) = evaluate_claims([mine], load_runs([ASSETS]))
    (primary,) = [one.primary for one in result.voting]
    assert primary is not None and primary.effect is not None and primary.effect.whole.n == 2
    assert (
        f"| 14. Ten steps are enough: **{result.verdict}** ({result.word}) | nvfp4 - bf16 | ×"
        in (out / "claims.md").read_text()
    )


def test_a_family_of_ones_own_has_a_table_and_no_run_yet(tmp_path: Path) -> None:
    arms = {"rank 2": {"lora.rank": 2}, "rank 3": {"lora.rank": 3}}
    contrast = {"rank 2 - rank 3": {"factor": ["lora."], "arms": arms}}
    folder = folder_with(tmp_path / "mine", contrasts=contrast)
    main(["claims", str(ASSETS), "papers=mine", f"out={tmp_path}", "--config-dir", str(folder)])
    row = (tmp_path / "mine.md").read_text().splitlines()[-1]
    assert row.startswith(
        "| Somebody (arXiv 2700.00001) | Ten steps are enough | `python src/run.py experiment=tiny/main"
    )
    assert row.endswith("| **incomplete** (not tested): no runs | - |")


def test_families_are_corrected_by_themselves(tmp_path: Path) -> None:
    use([folder_with(tmp_path / "mine", measure="initial_entropy")])
    runs, (mine,) = load_runs([ASSETS]), own_claims()
    alone, twin = evaluate_claims([mine], runs)[0], mine
    others = [one for one in families()["literature"] if one.measure.name == mine.measure.name]
    together = evaluate_claims([*others, mine], runs)[-1]
    assert together.p_direction == alone.p_direction == pytest.approx(holm([alone.p_direction])[0])
    several = evaluate_claims([mine, twin], runs)
    assert [one.p_direction for one in several] == pytest.approx([min(1.0, 2 * alone.p_direction)] * 2)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"expected": "bigger"}, r"expected must be one of more, less, same, got 'bigger'"),
        ({"measure": "acuracy"}, r"measure has 'acuracy'.*accuracy"),
        ({"measure": MINE["measure"] | {"metric": "entropi"}}, r"measure\.metric has 'entropi'.*entropy"),
        ({"measure": MINE["measure"] | {"over": "now"}}, r"measure\.over has 'now'.*first step"),
        ({"margin": 0.02}, r"margin must be a factor above 1.*got 0\.02"),
        ({"margin": None}, r"lacks margin"),
        ({"where": {"lora.rnk": 3}}, r"where has 'lora\.rnk'.*lora\.rank"),
        ({"where": {"steps": {"least": 3}}}, r"where\.steps must be .*from.*least"),
        ({"where": {"steps": {"from": 9, "to": 3}}}, r"where\.steps must have from below to"),
        ({"contrasts": {"a": {"factor": ["quant."], "arms": {"x": {}}}}}, r"contrasts\.a\.arms must be two arms.*got"),
        ({"contrasts": {"a": {"factor": ["qant."], "arms": ARMS}}}, r"contrasts\.a .*qant\."),
        ({"contrasts": {"a": {"factor": ["quant."]}}}, r"contrasts\.a lacks arms"),
        ({"contrasts": {}}, r"Ten steps are enough.*primary"),
        ({"gates": ["lerned"]}, r"gates has 'lerned'.*learned"),
        ({"reported_effects": [0.0]}, r"reported_effects must be numbers above 0, got \[0\.0\]"),
        ({"number": "first"}, r"number must be a whole number.*'first'"),
        ({"explores": "maybe"}, r"explores must be true or false, got 'maybe'"),
        ({"family": "literature"}, r"family=literature.*call"),
        ({"defaults": None}, r"lacks .*defaults"),
        ({"nmber": 3}, r"'nmber'.*number"),
        ({"command": ""}, r"command must be a text"),
        ({"defaults": ["shared/lerning"]}, r"defaults names .*lerning\.yaml"),
        ({"measure": {"name": "entropy"}}, r"measure lacks metric, over, ratio, unit"),
        ({"reported_effects": "many"}, r"reported_effects must be a list, got 'many'"),
        ({"where": ["steps"]}, r"where must have conditions .*got \['steps'\]"),
    ],
)
def test_what_is_wrong_is_told_by_file_and_key(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    use([folder_with(tmp_path / "mine", **changes)])
    with pytest.raises(ConfigError, match=said) as refused:
        families()
    assert str(tmp_path / "mine" / "claim" / "ten_steps.yaml") in str(refused.value)


@pytest.mark.parametrize("text", ["- a\n", "a: [\n", ""])
def test_a_file_that_is_no_mapping_is_named(tmp_path: Path, text: str) -> None:
    folder = folder_with(tmp_path / "mine")
    (folder / "claim" / "ten_steps.yaml").write_text(text)
    use([folder])
    with pytest.raises(ConfigError, match=r"ten_steps\.yaml"):
        families()


def test_two_claims_of_a_family_have_two_places_and_titles(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "mine")
    text = (folder / "claim" / "ten_steps.yaml").read_text()
    (folder / "claim" / "again.yaml").write_text(text)
    use([folder])
    with pytest.raises(ConfigError, match=r"mine.*number=\{1\}"):
        families()


@pytest.mark.parametrize("file", sorted((CONF_DIR / "claim").glob("*.yaml")), ids=lambda file: file.stem)
def test_a_margin_has_a_reason(file: Path) -> None:
    assert re.search(r"^margin: [\d.]+ +# \S", file.read_text(), flags=re.M)
