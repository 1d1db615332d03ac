"""What the arms of a study are repeated on: bases, copies of a file, models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from qerl_bench.conduct.probe_queue import probed, records
from qerl_core.checks import ConfigError
from qerl_studies.design.design import Arm, Design, judged_by_page, read_design
from qerl_studies.design.units import read_units

HUB = {"common": ["model=hub", "model.id=x.gguf", "task=arithmetic"], "seeds": 2}
ARMS = {"bf16": {"tier": 1, "words": ["quant=bf16"]}, "nvfp4": {"tier": 1, "words": ["quant=nvfp4"]}}


def study(folder: Path, **changes: Any) -> Design:
    content = HUB | {"arms": ARMS, "probe": {"questions": 4, "samples": 2}}
    content |= {"dose": {"rise": 0.1, "prompts": 2, "draws": 3}} | changes
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in content.items() if value is not None}))
    return read_design(path)


def test_every_copy_has_seeds_of_its_own_and_all_arms_share_it(tmp_path: Path) -> None:
    design = study(tmp_path, units={"dither": [1, 5]})
    assert design.bases == (1, 5)
    words = {(arm.name, base, seed): design.words(arm, base, seed, None) for arm in design.arms for base in (1, 5)
             for seed in design.seeds}  # fmt: skip
    assert {one[-1] for (_, base, _), one in words.items() if base == 5} == {"seed=10", "seed=11"}
    assert all("model.dither=5" in one for (_, base, _), one in words.items() if base == 5)
    assert words["bf16", 1, 0][-1] == words["nvfp4", 1, 0][-1] == "seed=2"
    assert design.tree_of(design.reference, 5)["model"]["dither"] == 5


def test_a_study_is_judged_by_claims_or_by_its_page(tmp_path: Path) -> None:
    assert study(tmp_path, units={"dither": [1]}, judged_by="page") and judged_by_page(tmp_path)
    assert study(tmp_path, units={"dither": [1]}, judged_by="claims") and not judged_by_page(tmp_path)
    with pytest.raises(ConfigError, match="judged_by must be one of claims, page"):
        study(tmp_path, units={"dither": [1]}, judged_by="pages")
    with pytest.raises(ConfigError, match="besides gates, primary, judged_by, must have exactly the keys arms"):
        study(tmp_path, units={"dither": [1]}, judged_by_="page")
    (tmp_path / "study.yaml").write_text("judged_by: Page\n")  # beside runs that were only collected
    with pytest.raises(ConfigError, match="judged_by must be one of claims, page, got 'Page'"):
        judged_by_page(tmp_path)


def test_copies_of_several_sizes_share_their_draws_and_seeds(tmp_path: Path) -> None:
    from qerl_bench.conduct.probe_process import probe_plan

    design = study(tmp_path, units={"dither": [1, 2], "dither_scale": [0.5, 4]})
    assert [unit.words[1].partition("=")[2] for unit in design.units.values()] == ["0.5", "0.5", "4", "4"]
    assert [unit.first_seed for unit in design.units.values()] == [1, 2, 1, 2]
    assert [(one.draw, one.draws) for one in (probe_plan(design, base) for base in (0, 1, 2))] == [
        ("answers/1", range(3, 6)),
        ("answers/2", range(6, 9)),
        ("answers/1", range(3, 6)),
    ]
    assert len({design.probe_file(base) for base in design.bases}) == 4


def test_models_are_options_or_whatever_model_id_takes(tmp_path: Path) -> None:
    design = study(tmp_path, units={"model": ["tiny", "dir/x.gguf"]}, common=["task=arithmetic"])
    assert design.units[0].words == ("model=tiny",)
    assert design.units[1].words == ("model=hub", "model.id=dir/x.gguf")
    assert design.words(design.reference, 1, 1, None)[-1] == "seed=1"
    assert design.tree_of(design.reference, 1)["model"]["name"] == "x"


def test_values_of_model_seed_are_what_bases_always_were() -> None:
    units = read_units({"bases": [3, 4]})
    assert {base: unit.words for base, unit in units.items()} == {3: ("model.seed=3",), 4: ("model.seed=4",)}
    assert units[4].seed_of(1, 2) == 1


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"units": {"dither": [1]}, "bases": 2}, "bases"),
        ({"units": {"dithers": [1]}}, "units must have the key dither.*dithers"),
        ({"units": {"dither": [1, 1]}}, "units.dither has a seed twice"),
        ({"units": {"dither": [1], "dither_scale": [0]}}, "each of units.dither_scale must be .* got 0"),
        ({"units": {"dither": [1], "dither_scale": 2}}, "units.dither_scale must be a list, got 2"),
        ({"units": {"model": ["tinny"]}}, "units.model has tinny, which is no option"),
        ({"units": {"model": []}}, "units.model must be a list"),
        ({"units": {"dither": [1]}, "common": [*HUB["common"], "model.dither=3"]}, "common has model.dither=3"),
        ({"units": {"dither": 2}, "probe": {"questions": 4, "samples": 2, "more": 1}}, "probe must have .*got .*more"),
        ({"units": {"dither": 2}, "probe": {"questions": 4}}, "probe must have the keys questions and samples"),
        (
            {"units": {"dither": 2}, "probe": {"questions": 4, "samples": 2, "temperatures": [0.6]}},
            r"probe.temperatures must be .* with 1, .* got \(0.6,\)",
        ),
        (
            {"units": {"dither": 2}, "probe": {"questions": 4, "samples": 2, "split": "test"}},
            "probe.split must be one of train, held_out, got 'test'",
        ),
    ],
)
def test_wrong_units_and_probes_are_refused(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        study(tmp_path, **change)


def test_the_details_of_a_probe_decide_its_file_but_formats_do_not(tmp_path: Path) -> None:
    def named(**probe: Any) -> str:
        return study(tmp_path, units={"dither": 2}, probe={"questions": 4, "samples": 2, **probe}).probe_file(1).name

    plain = named()
    assert named(formats=["nf4"]) == plain != named(temperatures=[0, 1]) != named(temperatures=[1, 0.6]) != plain
    assert named(temperatures=[1]) == named(texts=0) == named(split="train") == plain


def test_a_format_of_the_probe_alone_is_measured_too(tmp_path: Path) -> None:
    design = study(tmp_path, units={"dither": 2}, probe={"questions": 4, "samples": 2, "formats": ["nvfp4", "nf4"]})
    assert design.formats == ["bf16", "nvfp4", "nf4"] and not design.probe.details


def test_a_format_by_another_quantizer_is_a_format_of_its_own(tmp_path: Path) -> None:
    design = study(tmp_path, units={"dither": 2}, probe={"questions": 4, "samples": 2, "formats": ["nvfp4+gptq"]})
    assert design.formats == ["bf16", "nvfp4", "nvfp4+gptq"]
    assert design.plain("nvfp4+gptq").words == ["quant=nvfp4", "quantizer=gptq"]
    arm = Arm(name="calibrated", tier=1, words=["quant=nvfp4", "quantizer=gptq"])
    assert design.format_of(arm) == "nvfp4+gptq" and design.format_of(design.plain("nvfp4")) == "nvfp4"
    assert design.answers_file(0, "nvfp4+gptq") != design.answers_file(0, "nvfp4")


def test_a_unit_counts_without_a_format_that_no_arm_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the root of the study
    design = study(tmp_path, units={"dither": 3}, probe={"questions": 4, "samples": 2, "formats": ["nf4"]})
    for base, formats in ((0, ["bf16", "nvfp4"]), (1, ["bf16"]), (2, ["bf16", "nvfp4", "nf4"])):
        file = design.probe_file(base)
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps({"base": base, "formats": {quant: {} for quant in formats}, "doses": {}}))
    assert [probed(design, base, design.formats) for base in design.bases] == [False, False, True]
    assert [one["base"] for one in records(design)] == [0, 2]
