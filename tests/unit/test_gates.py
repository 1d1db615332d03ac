"""The gates of a study: numbers against a second calculation, states at the limits, doses, designs, blocks in time."""

from __future__ import annotations

import gzip
import json
import logging
import math
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain, combinations
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pytest
import yaml

from qerl_bench.commands import gates as command
from qerl_bench.commands import study
from qerl_bench.conduct import probe_queue, runner
from qerl_bench.conduct.archive import archive_probes
from qerl_bench.conduct.deadline import Deadline
from qerl_bench.conduct.runner import Blocks, blocks_of
from qerl_bench.config import build, compose
from qerl_bench.probe.bisection import TOLERANCE, find_sigma
from qerl_core.checks import ConfigError, TrainingStopped
from qerl_core.options.user_options import search_path
from qerl_core.process.children import Child
from qerl_core.process.installation import CONF_DIR
from qerl_core.process.termination import Terminated
from qerl_core.statistics import mean_ci
from qerl_core.sweeps.points import Point
from qerl_studies.design.controls import LEVEL, one_passes
from qerl_studies.design.design import Design, read_design
from qerl_studies.design.gates import Result, between, blocked, gates, override, render, to_json
from qerl_studies.design.readings import Runs
from qerl_studies.design.sessions import read_probes, read_sessions, words_of_runs
from qerl_studies.runs.load import Run
from tests.failing import failing

if TYPE_CHECKING:
    from qerl_bench.experiment_spec import Experiment
    from qerl_bench.model.policy import Policy

STUDY = CONF_DIR.parent / "studies" / "worlds-2026" / "study.yaml"


@pytest.fixture(autouse=True)
def committed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if all of this checkout were: tests/unit/test_provenance.py has what happens otherwise."""
    monkeypatch.setattr(study, "account_for_changes", lambda *_: None)


@pytest.fixture(scope="module")
def design() -> Design:
    return replace(read_design(STUDY), bases=(0, 1, 2, 3))


def probes(design: Design, lost: int = 2, **dose: Any) -> list[dict[str, Any]]:
    """Bases that pass: of 64 samples half of the questions have 1 or 2 right, the others 20 or more."""
    good = [1, 2, 2, 20, 24, 30] * 5
    hurt = [max(0, count - lost) for count in good]
    found = {"sigma": 0.12, "rise": 0.1, "kl": 0.03, **dose}
    return [
        {
            "base": base,
            "formats": {
                quant: {"correct": good if quant == "bf16" else hurt, "samples": 64, "entropy": 0.4}
                for quant in design.formats
            },
            "doses": {arm.name: found for arm in design.arms if arm.dosed},
        }
        for base in design.bases
    ]


def run(design: Design, arm: str, base: int, end: float, late: float = 0.02) -> Run:
    """A run that ends with the accuracy `end` on short and long questions alike, from 0.2, and rises to the last."""
    steps = np.arange(1, 101)
    accuracy = np.where(steps <= 80, 0.3, 0.3 + late * (steps - 80) / 20) + 1e-3 * base * (steps % 2)
    metrics = pd.DataFrame({"kind": "train", "step": steps, "metric": "accuracy", "value": accuracy})
    questions = ["a b c", "a b c d", "a b c d e", "a b c d e f"]
    answers = [
        {"mode": "sampled", "question": question, "step": step, "correct": round(1000 * share), "samples": 1000}
        for question in questions
        for step, share in ((0, 0.2), (250, end + 0.002 * base))
    ]
    return Run(Path(f"{arm}-{base}"), {"name": arm, "steps": 250}, {}, True, {}, metrics, pd.DataFrame(answers))


def results(design: Design, records: Sequence[dict[str, Any]], runs: Runs | None = None) -> dict[str, Result]:
    return {one.gate: one for one in gates(design, records, runs or {})}


def test_the_gates_of_bases_are_what_counting_all_choices_gives(design: Design) -> None:
    counts = [3, 0, 5]
    record = probes(design)[0]
    record["formats"]["bf16"] = {"correct": counts, "samples": 8, "entropy": 0.4}
    common = [*design.common, "rollout.group_size=4"]
    small = replace(design, probe=replace(design.probe, samples=8), arms=design.arms[:1], common=common)
    measured = results(small, [record])
    samples = [[i < count for i in range(8)] for count in counts]
    hit = [np.mean([any(chosen) for chosen in combinations(row, 4)]) for row in samples]
    assert measured["pass@1 of the base"].value == pytest.approx(8 / 24)
    assert measured["pass@8"].value == pytest.approx(2 / 3)
    assert measured["groups of 4 without success"].value == pytest.approx(1 - np.mean(hit))


def test_good_bases_pass_and_a_failed_gate_stops_the_arms_that_need_it(design: Design) -> None:
    passing = results(design, probes(design))
    assert {name for name, one in passing.items() if one.passed is False} == set()
    assert passing["headroom"].passed is None and math.isnan(passing["headroom"].value)
    assert passing["damage by nf4"].value == pytest.approx(np.mean([1, 2, 2, 2, 2, 2]) / 64)

    for lost in (0, 8):  # damage is measured, whatever it is
        hurt = results(design, probes(design, lost=lost))
        assert blocked(hurt.values()) == {} and hurt["damage by nf4"].word == "measured"
    weak = results(design, probes(design, rise=0.01, kl=1e-4))
    assert set(blocked(weak.values())) == {"nvfp4-noise", "bf16-noise"}
    told = override(weak.values(), ["rise", "KL", "headroom"])
    assert blocked(told) == {} and {one.gate.split(",")[0] for one in told if one.overridden} == {
        "rise of entropy",
        "KL",
    }
    assert render(told).count("**fail**, overridden") == 4
    assert sum(row["overridden"] for row in json.loads(to_json(told, {}))["gates"]) == 4
    assert results(design, probes(design, sigma=None))["KL, nats, bf16-noise"].passed is False
    hopeless = probes(design)
    for record in hopeless:
        record["formats"]["bf16"]["correct"] = [0] * 30
    assert set(blocked(results(design, hopeless).values())) == {arm.name for arm in design.arms}


def test_gates_of_training_need_headroom_a_rise_skill_and_one_control(design: Design) -> None:
    def judged(end: float, late: float, control: float) -> dict[str, Result]:
        runs = {("bf16", base, 0): run(design, "bf16", base, end, late) for base in design.bases}
        for arm in (arm for arm in design.arms if arm.control):
            moved = control if arm.name == "bf16-hot" else 0.0
            runs |= {(arm.name, b, 0): run(design, arm.name, b, end + moved + 0.001 * (b % 2)) for b in design.bases}
        return results(design, probes(design), runs)

    good = judged(0.5, 0.05, 0.04)
    shown = ("headroom", "rise in the last fifth", "control of exploration bf16-hot")
    assert [good[name].passed for name in shown] == [True] * 3
    assert good["control of gain bf16-group8"].word == "no" and good["control of exploration bf16-hot"].stops == ()
    assert good["headroom"].value == pytest.approx(1 - 0.503)
    assert (
        good["gain on the longest questions"].value == pytest.approx(0.303)
        and good["control of exploration bf16-bonus"].passed
    )
    hot = good["control of exploration bf16-hot"]
    assert hot.value == pytest.approx(0.0405) and hot.bases == 4
    flat, full, dull = judged(0.5, 0.0, 0.04), judged(0.9, 0.05, 0.04), judged(0.5, 0.05, 0.005)
    assert flat["rise in the last fifth"].fails and full["headroom"].passed is False
    two_kinds = between("a mean where no base is", 0.1, 0.4, [0.05, 0.05, 0.6], ())
    assert (two_kinds.word, two_kinds.meeting, two_kinds.bases) == ("neither", 0, 3)
    assert between("all are at a limit", 0.1, 0.4, [0.1, 0.4], ()).meeting == 2
    assert between("of a run that learns nothing", 0.0, math.inf, [0.0, 0.0], (), must=True).passed is False
    assert between("at the limit", 0.0, math.inf, [0.0, 0.0], ()).passed is True
    assert between("too many tokens", 0.0, 200.0, [230.0, 231.0], ()).passed is False
    assert set(blocked(dull.values())) == {"nvfp4-noise", "bf16-noise"}
    unlearned = judged(0.22, 0.05, 0.04)
    assert unlearned["gain on the longest questions"].passed is False


@pytest.mark.parametrize(
    ("values", "must", "word"),
    [
        ([0.2, 0.21, 0.22], False, "yes"),
        ([0.08, 0.1, 0.13], False, "neither"),  # 0.1 lies inside of the interval, whose mean meets it
        ([0.35, 0.4, 0.42], False, "neither"),
        ([0.05, 0.06, 0.07], False, "no"),
        ([0.5, 0.51, 0.52], False, "no"),
        ([0.09], False, "no"),  # one base has no interval
        ([0.11], False, "yes"),
        ([0.11], True, "open"),
        ([math.nan, math.nan], False, "no"),  # no dose was found
        ([], False, "open"),
    ],
)
def test_a_limit_inside_of_the_interval_is_neither_passed_nor_failed(
    values: list[float], must: bool, word: str
) -> None:
    found = between("a gate", 0.1, 0.4, values, ("arm",), must=must)
    assert found.word == word
    assert (blocked([found]) == {"arm": ["a gate"]}) == (word == "no")
    shown = between("a gate that must be passed", 0.1, 0.4, [0.08, 0.1, 0.13], ("arm",), must=True)
    assert shown.word == "neither" and blocked([shown]) and not blocked(override([shown], ["a gate"]))


def test_a_control_is_of_gain_or_of_exploration_and_a_study_may_lack_one(design: Design, tmp_path: Path) -> None:
    assert {arm.name: arm.shows for arm in design.arms if arm.control} == {
        "bf16-hot": "exploration", "bf16-group8": "gain", "bf16-bonus": "exploration",
    }  # fmt: skip
    without = replace(design, arms=tuple(arm for arm in design.arms if arm.shows != "exploration"))
    found = results(without, probes(design))
    assert found["control of exploration"].word == "no such arm" and blocked(found.values()) == {}
    assert "| no such arm | harm can be shown, a lack of help cannot |" in render([*found.values()])
    words = yaml.safe_load(STUDY.read_text())
    words["arms"]["bf16-group8"]["control"] = "exploration"
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(words, sort_keys=False))
    (said,) = (arm for arm in read_design(path).arms if arm.name == "bf16-group8")
    assert said.shows == "exploration"


def test_one_rule_decides_for_gates_and_claims_whether_a_control_passes() -> None:
    smaller, unsure, sure = mean_ci([0.005, 0.006, 0.007]), mean_ci([0.03, -0.02, 0.04]), mean_ci([0.02, 0.021, 0.022])
    most = int(LEVEL / sure.p_outside(0.0))
    assert most >= 2 and one_passes([unsure, sure], most) and not one_passes([unsure, sure], most + 1)
    assert not one_passes([smaller, unsure], 1) and not one_passes([], 0)


def test_a_control_that_lowers_accuracy_shows_no_gain(design: Design) -> None:
    runs = {("bf16", base, 0): run(design, "bf16", base, 0.5, 0.05) for base in design.bases}
    runs |= {("bf16-group8", b, 0): run(design, "bf16-group8", b, 0.4 + 0.001 * (b % 2)) for b in design.bases}
    assert results(design, probes(design), runs)["control of gain bf16-group8"].word == "no"


def test_seeds_are_the_units_of_a_design_with_one_model(design: Design) -> None:
    one = replace(design, bases=(0,), units={0: design.units[0]}, arms=design.arms[:1])
    runs = {("bf16", 0, seed): run(one, "bf16", 2 * seed, 0.5, 0.05) for seed in range(3)}
    assert results(one, probes(one), runs)["headroom"].bases == 3
    assert results(replace(one, units=design.units), probes(one), runs)["headroom"].bases == 1


def test_a_study_that_is_continued_is_not_judged_by_the_bases_it_has(
    design: Design, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = probes(design)
    runs = {(arm, base, seed): run(design, arm, base, 0.9) for arm, base, seed in words_of_runs(design, records)}
    monkeypatch.setattr(runner, "finished_runs", lambda *_: runs)

    def judged() -> dict[str, bool | None]:
        return {one.gate: one.passed for one in runner.gates_so_far(design, records)}

    assert judged()["headroom"] is False and judged()["control of exploration bf16-hot"] is False
    del runs["bf16", 3, 0]
    assert judged()["headroom"] is None and judged()["control of exploration bf16-hot"] is None
    assert judged()["pass@1 of the base"] is True


def test_the_table_and_the_json_hold_every_gate(design: Design) -> None:
    found = gates(design, probes(design, sigma=None), {})
    written = json.loads(to_json(found, blocked(found)))
    assert [row["gate"] for row in written["gates"]] == [one.gate for one in found]
    assert all(row["value"] is None or math.isfinite(row["value"]) for row in written["gates"])
    assert all(one.gate in line for one, line in zip(found, render(found).splitlines()[2:], strict=True))


@pytest.mark.parametrize("start", [1e-3, 0.1, 9.0])
def test_the_dose_is_found_from_above_and_from_below(start: float) -> None:
    sigma, tried = find_sigma(lambda sigma: 5 * sigma**2, 0.1, start)
    assert sigma is not None and 5 * sigma**2 == pytest.approx(0.1, rel=TOLERANCE + 0.01)
    assert sigma == float(f"{sigma:.3g}") and len(tried) < 25


def test_the_search_ends_where_sigmas_differ_by_less_than_draws() -> None:
    uneven = {0.1: 0.276, 0.05: 0.057, 0.0707: 0.059, 0.0841: 0.145, 0.0771: 0.115}  # as a model of 1.5B sampled
    sigma, tried = find_sigma(lambda sigma: uneven[float(f"{sigma:.3g}")], 0.1, 0.1)
    assert sigma == 0.0771 and len(tried) == len(uneven)


def test_no_dose_is_found_where_noise_does_nothing_or_everything() -> None:
    assert find_sigma(lambda sigma: 0.05 * sigma / (1 + sigma), 0.1, 0.1)[0] is None
    assert find_sigma(lambda sigma: 1.0, 0.1, 0.1)[0] is None


def test_noise_is_measured_and_taken_back(
    make_experiment: Callable[..., Experiment], make_policy: Callable[..., Policy]
) -> None:
    import torch

    from qerl_bench.dose import curve

    experiment, policy = make_experiment("quant=nvfp4"), make_policy(sharp=True)
    engine, quiet = experiment.engine.build(policy), policy.noise
    scales = {name: norm.weight.clone() for name, norm in policy.norms.items()}  # type: ignore[operator]
    prompts = experiment.task.train_prompts(1, 2, seed=0)
    measured = curve(experiment, policy, engine, prompts, (0.0, 0.1, 0.4), range(1))
    kls = [one.kl for one in measured]
    assert kls[0] < 1e-6 < kls[1] < kls[2]
    assert measured[:1] == curve(experiment, policy, engine, prompts, [0.0], range(1))
    assert policy.noise is quiet
    assert all(torch.equal(norm.weight, scales[name]) for name, norm in policy.norms.items())  # type: ignore[arg-type]


def small_study(folder: Path, arms: dict[str, str], rise: float) -> Design:
    """One base of the smoke test, and what words each arm has."""
    study = {"bases": 1, "seeds": 1, "probe": {"questions": 2, "samples": 2}}
    study |= {"common": ["experiment=smoke", "task.max_completion_tokens=8", "model.layers=1"]}
    study |= {"arms": {name: {"tier": 1, "words": words.split()} for name, words in arms.items()}}
    study |= {"dose": {"rise": rise, "prompts": 2, "draws": 1}}
    (folder / "study.yaml").write_text(yaml.safe_dump(study, sort_keys=False))
    return read_design(folder / "study.yaml")


def test_the_dose_of_an_arm_is_measured_on_its_own_weights_and_norms(
    tmp_path: Path, stand_in: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its quantizer, the place of its noise and the format of its rollouts; arms of one shape are measured once."""
    from qerl_bench.conduct import probe_process
    from qerl_bench.probe import rise

    arms = {
        "bf16": "",
        "plain": "quant=nvfp4 aqn=matched",
        "linear": "quant=nvfp4 aqn=matched_linear",
        "mse": "quant=nvfp4 aqn=matched quantizer=mse",
        "final": "quant=nvfp4 aqn=matched noise.norms=blocks_final",
        "adapters": "quant=nvfp4 aqn=matched noise.where=adapters",
        "mixed": "quant=bf16 aqn=matched rollout.quant=nvfp4",
    }
    monkeypatch.chdir(tmp_path)
    measured: list[str] = []
    samplers: list[tuple[float, ...]] = []

    def samples(noise: Any, policy: Policy, engine: Any, *_: Any) -> list[Any]:
        samplers.append(tuple(one.relative_error for one in engine.policy.layers.values()))
        return [SimpleNamespace(entropies=[1.0], token_ids=[0])]

    def dose(design: Design, experiment: Experiment, policy: Policy, engine: Any) -> dict[str, Any]:
        measured.append(experiment.aqn.name)
        real_dose(design, experiment, policy, engine)
        errors = [one.relative_error for one in policy.layers.values()]
        return {"sigma": 0.1, "noisy": [*policy.noise.noisy], "trained": errors, "sampled": samplers[-1]}

    real_dose = probe_process.dose
    stand_in(rise, noisy_samples=samples)
    stand_in(probe_process, answers=lambda *_: {}, dose=dose)
    design = small_study(tmp_path, arms, rise=0.1)
    probe_process.probe_base(design, 0, design.formats)
    doses = json.loads(design.probe_file(0).read_text())["doses"]
    assert measured == ["matched"] * 5 and doses["linear"] == doses["plain"]
    assert sum(doses["mse"]["trained"]) < sum(doses["plain"]["trained"]) and sum(doses["mixed"]["trained"]) == 0
    assert doses["mixed"]["sampled"] == doses["plain"]["sampled"] == doses["plain"]["trained"]
    norms = doses["plain"]["noisy"]
    assert doses["mse"]["noisy"] == norms and doses["final"]["noisy"] == [*norms, "model.norm"]
    assert not {*doses["adapters"]["noisy"]} & {*norms}


@pytest.mark.slow
def test_arms_with_the_weights_of_their_format_share_its_policy_and_no_number_tells(
    tmp_path: Path, listen: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from qerl_bench.conduct import probe_process

    arms = {
        "bf16": "",
        "mixed": "quant=bf16 aqn=matched rollout.quant=nvfp4",
        "plain": "quant=nvfp4 aqn=matched",
        "adapters": "quant=nvfp4 aqn=matched noise.where=adapters",
        "mse": "quant=nvfp4 aqn=matched quantizer=mse",
    }
    monkeypatch.chdir(tmp_path)
    design = small_study(tmp_path, arms, rise=2e-4)
    built = listen(probe_process, "build_policy")

    def found() -> dict[str, Any]:
        built.clear()
        probe_process.probe_base(design, 0, design.formats)
        record = json.loads(design.probe_file(0).read_text())
        design.probe_file(0).unlink()
        return record

    shared = found()
    assert [f"{one.quant.name} {one.quantizer.name}" for one, *_ in built] == ["bf16 rtn", "nvfp4 rtn", "nvfp4 mse"]
    monkeypatch.setattr(probe_process, "weights_key", lambda experiment: str(id(experiment)))
    assert found() == shared and len(built) == 7  # each format is asked, and each arm has a dose
    assert min(shared["doses"][arm]["sigma"] for arm in ("mixed", "plain", "adapters")) > 0


# --- the design ------------------------------------------------------------------------------------------------------


def test_every_arm_of_the_committed_design_and_every_world_can_run(design: Design) -> None:
    blocks = blocks_of(design, probes(design), {})
    points = [point for block in blocks for point in block]
    assert len({point.name for point in points}) == len(points) == 4 * 2 * len(design.arms)
    tiers = [sum(arm.tier == tier for arm in design.arms) for tier in (1, 2, 3)]
    assert [len(block) for block in blocks] == [2 * count for count in tiers for _ in design.bases]
    dosed = [point for point in points if "aqn=matched" in point.overrides]
    assert all("aqn.sigma_of_base=0.12" in point.overrides for point in dosed) and len(dosed) == 16
    few = blocks_of(replace(design, arms=design.arms[1:3]), probes(design), {"nvfp4-noise": ["a gate"]})
    assert [len(block) for block in few] == [2] * len(design.bases)
    for world in (CONF_DIR / "experiment" / "worlds").glob("*.yaml"):
        build(compose([f"experiment=worlds/{world.stem}"]))


def test_a_study_says_what_it_spends_its_time_on(design: Design) -> None:
    """Doses where an arm has one, and an end in time where time is limited."""
    assert any(arm.dosed for arm in design.arms)
    limited = study.spent_first(design, 90.0, 2)
    assert limited.startswith("90 minutes, 2 at a time") and "format, and doses; then" in limited
    assert f" of {len(design.arms)} arms, as many blocks as end in time." in limited
    undosed = replace(design, arms=[arm for arm in design.arms if not arm.dosed])
    free = study.spent_first(undosed, float("inf"), 1)
    assert free.startswith("no limit of time, 1 at a time") and "format; then" in free
    assert f" of {len(undosed.arms)} arms. What" in free


def test_an_arm_without_a_dose_is_left_out_and_named(design: Design, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING")
    (record, *_) = probes(design)
    record = {**record, "doses": {arm: {**dose, "sigma": None} for arm, dose in record["doses"].items()}}
    points = [*chain(*blocks_of(design, [record], {}))]
    dosed = [arm.name for arm in design.arms if arm.dosed]
    assert dosed and len(points) == len(design.seeds) * (len(design.arms) - len(dosed))
    said = [message for message in caplog.messages if "dose" in message]
    assert len(said) == len(dosed) and all(any(f"arm {name} " in message for message in said) for name in dosed)


def test_what_overrules_gates_is_said_as_it_is_typed(
    design: Design,
    conducted: Callable[..., None],
    tmp_path: Path,
    stand_in: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    failed = Result(
        gate="rise of entropy, arm", limit="0.01 to 0.1", word="no", stops=tuple(arm.name for arm in design.arms)
    )
    conducted(lambda sweep: [])
    stand_in(study, gates_so_far=lambda *_: [failed])
    with pytest.raises(TrainingStopped, match="no arm may run"):
        study.main([str(STUDY), "bases=0", f"out={tmp_path}"])
    (said,) = (word for message in caplog.messages for word in shlex.split(message) if word.startswith("despite="))
    assert said == "despite=rise of entropy"
    caplog.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study, "is_finished", lambda run_dir: True)
        study.main([str(STUDY), "bases=0", f"out={tmp_path}"])  # gates on runs may stop arms that are done
        assert "0 of " in caplog.messages[-1] and "runs are left to do" in caplog.messages[-1]
        with pytest.raises(TrainingStopped, match="no arm may run"):  # and there are bases that no run is of
            study.main([str(STUDY), "bases=0,1", f"out={tmp_path}"])
    caplog.clear()
    study.main([str(STUDY), "bases=0", f"out={tmp_path}", said])
    assert "stopped by" not in caplog.text and "are left to do" in caplog.text


def test_words_of_the_command_line_replace_common_ones(design: Design) -> None:
    other = read_design(STUDY, ["experiment=worlds/rare", "task.hit=0.7"])
    assert other.common == ["experiment=worlds/rare", "task.hit=0.7"]
    assert other.probe_file(0) != design.probe_file(0) != design.probe_file(1)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"common": ["experiment=worlds/base", "seed=3"]}, "common has seed=3"),
        ({"seeds": 0}, "seeds must be .* got 0"),
        ({"bases": [16, -1]}, "each of bases must be .* got -1"),
        ({"bases": [16, 17, 16]}, "bases has a seed twice"),
        ({"arms": {"a": {"tier": 1, "words": ["algo=sft"]}}}, "the first arm of .* cannot have algo=sft"),
        ({"more": 1}, r"exactly the keys .*more"),
        ({"arms": {"a": {"tier": 1, "words": ["quant=bf16"], "dose": 1}}}, r"arms.a must .*dose"),
        ({"arms": {"a": {"tier": 0, "words": ["quant=bf16"]}}}, "arms.a.tier"),
        ({"arms": {"a": {"tier": 1, "words": [], "control": "hot"}}}, "arms.a.control must be gain, .* got 'hot'"),
        ({"arms": {"a": {"tier": 1, "words": []}, "b": {"tier": 1, "words": ["task=dag"]}}}, "model or task"),
        (
            {"arms": {"a": {"tier": 1, "words": []}, "b": {"tier": 1, "words": [], "compared_with": "c"}}},
            "arms.b.compared_with must be one of a, got c",
        ),
    ],
)
def test_a_wrong_design_is_refused(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(STUDY.read_text()) | change))
    with pytest.raises(ConfigError, match=says):
        read_design(path)


# --- blocks in time --------------------------------------------------------------------------------------------------

STUB = """
import sys, time
from pathlib import Path
from types import SimpleNamespace
from qerl_core.process.children import end_with_parent
end_with_parent()
folder, code = Path(sys.argv[1]), sys.argv[2]
with open(folder.parent / "order", "a") as file:
    file.write(folder.name + " ")
exec(code)
"""
TAKES = "(folder / 'done.json').write_text('{{\"wall_s\": {}}}')"


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch, run_by: Callable[[str], None]) -> None:
    monkeypatch.setenv("PYTHONPATH", str(CONF_DIR.parent / "src"))
    run_by(STUB)


def block(folder: Path, *names: str, code: str = TAKES.format(100)) -> list[Point]:
    for name in names:
        (folder / name).mkdir()
    return [Point([str(folder / name), code], name, folder / name, finished=False) for name in names]


@pytest.fixture
def short_design(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Design]:
    """One arm of one step on one base, with these words and gates."""

    def made(*words: str, gates: dict[str, Any], control: bool = False) -> Design:
        content: dict[str, Any] = {"bases": 1, "seeds": 1, "probe": {"questions": 2, "samples": 2}, "gates": gates}
        content["dose"] = {"rise": 0.1, "prompts": 2, "draws": 1}
        content["common"] = ["experiment=smoke", "task.max_completion_tokens=8", "model.layers=1", "steps=2", *words]
        content["arms"] = {"bf16": {"tier": 1, "words": []}}
        if control:
            content["arms"]["longer"] = {"tier": 1, "words": ["optim.lr=1e-3"], "control": "gain"}
        (tmp_path / "study.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
        return read_design(tmp_path / "study.yaml")

    monkeypatch.chdir(tmp_path)
    return made


@pytest.mark.parametrize(
    ("words", "gates", "control", "complaint"),
    [
        ("eval=none", {"headroom": 0.1}, False, r"gates.headroom, and its runs have eval=none: choose eval=task"),
        ("eval=none", {"pass_at_1": [0.0, 1.0]}, True, "the control longer, and its runs have eval=none"),
        ("eval.at=[]", {"above_half_time": 0.0}, False, r"half time: add eval.at=\[1\]"),
    ],
)
def test_gates_that_no_run_will_answer_are_refused_before_any_run(
    short_design: Callable[..., Design], words: str, gates: dict[str, Any], control: bool, complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        study.require_answers(short_design(words, gates=gates, control=control))


def test_gates_of_a_study_without_evaluations_read_no_answers(short_design: Callable[..., Design]) -> None:
    """So it can be packed: the gates are asked before."""
    design = short_design("eval=none", gates={"pass_at_1": [0.0, 1.0]})
    silent = replace(run(design, "bf16", 0, end=0.5), kept_answers=None)
    study.require_answers(design)
    found = results(design, probes(design), {("bf16", 0, 0): silent})
    assert not silent.has_answers() and found["pass@1 of the base"].passed
    assert found["control of gain"].word == found["control of exploration"].word == "no such arm"


@pytest.mark.usefixtures("stub")
def test_blocks_are_run_one_after_the_other_and_none_begins_that_would_not_end(tmp_path: Path) -> None:
    first, second = block(tmp_path, "a1", "a2"), block(tmp_path, "b1", "b2")
    assert Blocks([first, second], 1, [], Deadline(10)).run() == []
    assert (tmp_path / "order").read_text().split() == ["a1", "a2", "b1", "b2"]
    done = [replace(point, finished=True) for point in first]  # says that a run takes 100 s
    left = {minutes: Blocks([done, second], 1, [], Deadline(minutes)) for minutes in (4.4, 4.5)}  # less 0.75
    assert [len(one.blocks) for one in left.values()] == [1, 0]  # two runs, and a tenth to spare: 220 s
    assert [len(one.todo) for one in left.values()] == [0, 2]
    assert [one.to_start() for one in left.values()] == [[1.0, 1.0]] * 2
    assert all((one.done, one.total) == (2, 4) for one in left.values())
    assert "2 of 4 runs done" in left[4.4].state()
    assert len(Blocks([done, done], 1, [], Deadline(0.6)).blocks) == 0  # nothing to do needs no time


@pytest.mark.usefixtures("stub")
def test_finished_runs_are_kept_on_the_way_once_there_are_new_ones(tmp_path: Path) -> None:
    done: list[int] = []
    sweep = Blocks([block(tmp_path, "a1", "a2")], 1, [], Deadline(10), lambda: done.append(sweep.done), 0.0)
    assert sweep.run() == [] and done == [1, 2]
    done.clear()
    sweep = Blocks([block(tmp_path, "b1")], 1, [], Deadline(10), lambda: done.append(sweep.done), 1000.0)
    assert sweep.run() == [] and done == []  # the end packs
    sweep.keep_every_s, sweep.kept = 0.0, 0
    assert sweep.is_time_to_keep()
    sweep.deadline.end = time.monotonic() + runner.ARCHIVING_S - 1
    assert not sweep.is_time_to_keep()  # what is running would be stopped late


@pytest.fixture
def conducted(design: Design, stand_in: Callable[..., None]) -> Callable[..., None]:
    """conducted(run, rise=0.01): a study finds its first base probed, with this dose, and `run` runs its blocks."""

    def begin(run: Callable[[Blocks], Any], failed: Sequence[str] = (), **dose: Any) -> None:
        stand_in(study, probe_bases=lambda *_: (probes(design, **dose)[:1], [*failed]))
        stand_in(Blocks, run=run)

    return begin


def test_a_folder_that_cannot_be_written_stops_no_runs(
    conducted: Callable[..., None],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def run(blocks: Blocks) -> list[tuple[Point, str]]:
        with failing(study, "archive", OSError("no space")):
            blocks.keep()
        return []

    conducted(run)
    study.main([str(STUDY), "bases=0", f"out={tmp_path}"])
    assert "no space" in caplog.text and (tmp_path / "gates.md").exists()


def test_a_block_of_which_most_is_done_needs_the_time_of_the_rest(tmp_path: Path) -> None:
    done = [replace(point, finished=True) for point in block(tmp_path, "a1", "a2", "a3")]
    for point, seconds in zip(done, (900, 100, 100), strict=True):
        (point.run_dir / "done.json").write_text(json.dumps({"wall_s": seconds}))
    begun = block(tmp_path, "b1", "b2")
    for point in begun:
        (point.run_dir / "checkpoints" / "step_000090").mkdir(parents=True)
        (point.run_dir / "config.yaml").write_text("steps: 100")
    left = {minutes: Blocks([done, begun], 1, [], Deadline(minutes)) for minutes in (1.8, 1.9)}  # less 0.75
    assert [len(one.todo) for one in left.values()] == [0, 2]  # 0.1 of the steps and 0.2, of the latest runs: 66 s
    assert left[1.8].to_start() == pytest.approx([0.3, 0.3])


@pytest.mark.usefixtures("stub")
def test_runs_that_are_nearly_done_when_the_time_is_up_may_end(tmp_path: Path) -> None:
    records = "".join(f'{{"kind": "train", "step": {step}, "time": {2 * step}}}\n' for step in (96, 97))
    ends = TAKES.format(1)
    code = f"(folder / 'metrics.jsonl').write_text({records!r}); (folder / 'begun').touch(); time.sleep(0.5); {ends}"
    near, far = block(tmp_path, "near", code=code), block(tmp_path, "far", code=code.replace("(0.5)", "(600)"))
    for point, steps in ((near[0], 98), (far[0], 120)):  # 2 s and 46 s are left
        (point.run_dir / "config.yaml").write_text(f"steps: {steps}")
    sweep = Blocks([near + far, block(tmp_path, "next")], 2, [], Deadline(100))
    collect = sweep.collect

    def collected() -> None:
        if all((point.run_dir / "begun").exists() for point in near + far):  # before that the next block would begin
            sweep.deadline.end = min(sweep.deadline.end, time.monotonic())
            collect()

    sweep.collect = collected  # type: ignore[method-assign]
    assert sweep.run() == []
    assert [(point.run_dir / "done.json").exists() for point in near + far] == [True, False]
    assert sweep.done == 1 and len(sweep.blocks) == 1


@pytest.mark.usefixtures("stub")
@pytest.mark.parametrize(("time_is_up", "times"), [(False, 2), (True, 1)])
def test_runs_without_memory_are_repeated_while_there_is_time(tmp_path: Path, time_is_up: bool, times: int) -> None:
    full = "failed: train: no memory is left"
    code = f"with open(folder / 'run.log', 'a') as log: log.write({full!r} + chr(10))\nsys.exit(1)"
    sweep = Blocks([block(tmp_path, "a1", code=code)], 2, [], Deadline(100))
    collect = sweep.collect

    def collected() -> None:
        collect()
        if sweep.failed and time_is_up:
            sweep.deadline.end = 0.0

    sweep.collect = collected  # type: ignore[method-assign]
    ((failed, reason),) = sweep.run()
    assert failed.name == "a1" and "no memory is left" in reason
    assert (failed.run_dir / "run.log").read_text().count(full) == times


@pytest.mark.usefixtures("stub")
def test_runs_are_stopped_when_the_time_is_up(tmp_path: Path) -> None:
    waits = "(folder / 'started').touch(); time.sleep(600)"
    sweep = Blocks([block(tmp_path, "a1", "a2", code=waits), block(tmp_path, "b1")], 1, [], Deadline(100))
    started = tmp_path / "a1" / "started"
    collect = sweep.collect

    def collected() -> None:
        if started.exists():
            sweep.deadline.end = 0.0
        collect()

    sweep.collect = collected  # type: ignore[method-assign]
    assert sweep.run() == []
    assert (tmp_path / "order").read_text().split() == ["a1"] and len(sweep.blocks) == 1


@pytest.mark.usefixtures("no_packages")
def test_a_format_that_cannot_run_here_is_refused_before_any_base_is_made(
    design: Design, listen: Callable[..., list[Any]]
) -> None:
    started = listen(probe_queue, "start_probe")
    with pytest.raises(ConfigError, match=r"arm nf4 .*pip install .*bitsandbytes.*tiers= leaves it out, which is of 2"):
        probe_queue.probe_bases(design, [], 2, Deadline(10))
    assert not started


@pytest.mark.usefixtures("no_packages")
def test_formats_and_doses_that_only_another_tier_needs_are_not_measured(
    design: Design, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the root of the study
    started: list[Point] = []
    monkeypatch.setattr(Blocks, "run", lambda sweep: started.extend([*sweep.todo, *chain(*sweep.blocks)]) or [])

    def start_probe(design: Design, _words: object, base: int, formats: Sequence[str], environment: Any) -> Child:
        assert formats == ["bf16", "nvfp4"] and "bf16-noise" not in [arm.name for arm in design.arms]
        (record,) = (one for one in probes(design) if one["base"] == base)
        record["formats"] = {quant: record["formats"][quant] for quant in formats}
        file = design.probe_file(base)
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(record))
        return Child([sys.executable, "-c", ""], environment)

    monkeypatch.setattr(probe_queue, "start_probe", start_probe)
    study.main([str(STUDY), "bases=0,1", "tiers=1", "out=out"])
    assert len(started) == 2 * 2 * sum(arm.tier == 1 for arm in design.arms)
    results = {one["gate"]: one for one in json.loads(Path("out", "gates.json").read_text())["gates"]}
    for quant in ("nf4", "mxfp4"):
        assert (results[f"damage by {quant}"]["passed"], results[f"damage by {quant}"]["bases"]) == (None, 0)
    with pytest.raises(ConfigError, match=r"arm nf4 .*bitsandbytes"):
        study.main([str(STUDY), "bases=0,1", "tiers=2"])


def test_a_process_probes_for_the_arms_that_it_is_told(stand_in: Callable[..., None]) -> None:
    from qerl_bench.conduct import probe_process

    called: list[Any] = []
    stand_in(probe_process, probe_base=lambda *given: called.append(given))
    probe_process.main([str(STUDY), "1", "bf16,nvfp4", "bf16,nvfp4-noise", "steps=7"])
    ((design, base, formats),) = called
    assert [arm.name for arm in design.arms] == ["bf16", "nvfp4-noise"] and "steps=7" in design.common
    assert (base, formats) == (1, ["bf16", "nvfp4"])


def test_two_studies_that_probe_a_base_at_once_keep_what_both_found(
    design: Design, stand_in: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from qerl_bench.conduct import probe_process

    monkeypatch.chdir(tmp_path)  # the root of both
    file = design.probe_file(0)
    other = {"base": 0, "formats": {"mxfp4": {"entropy": 2.0}}, "doses": {"another": {"sigma": 0.1}}}

    def run_probes(*_: object) -> dict[str, Any]:  # the other study writes meanwhile
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(other))
        return {probe_process.ANSWERS: {"entropy": 1.0}}

    plain = replace(design, arms=tuple(arm for arm in design.arms if arm.name == "bf16"))
    stand_in(probe_process, run_probes=run_probes, base_checkpoint=lambda *_: None, digest_of=lambda *_: "0")
    probe_process.probe_base(plain, 0, ["bf16"])
    record = json.loads(file.read_text())
    assert record["formats"] == {"mxfp4": {"entropy": 2.0}, "bf16": {"entropy": 1.0}}
    assert record["doses"] == other["doses"] and record["digest"] == "0"


def test_a_dose_of_another_study_is_not_taken_for_that_of_an_arm_of_the_same_name(
    stand_in: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arms = {"bf16": "", "noise": "quant=nvfp4 aqn=matched"}
    one = small_study(tmp_path, arms, rise=0.1)
    other = small_study(tmp_path, {**arms, "noise": "quant=nvfp4 aqn=matched noise.where=adapters"}, rise=0.1)
    faster = small_study(tmp_path, {**arms, "noise": "quant=nvfp4 aqn=matched optim.lr=1e-4"}, rise=0.1)
    assert one.probe_file(0) == other.probe_file(0) == faster.probe_file(0)
    dose = {"sigma": 0.1, "of": probe_queue.dose_digest(build(compose(one.words(one.arms[1], 0, 0, sigma=1.0))))}
    one.probe_file(0).parent.mkdir(exist_ok=True)
    one.probe_file(0).write_text(json.dumps({"base": 0, "formats": {}, "doses": {"noise": dose}}))
    with pytest.raises(ConfigError, match=r"dose of noise for arm noise .* rename the arm"):
        probe_queue._refuse_doses_of_others(other)
    for same in (one, faster):
        probe_queue._refuse_doses_of_others(same)

    def start_probe(_design: Design, _words: object, _base: int, formats: Sequence[str], environment: Any) -> Child:
        record = {"base": 0, "formats": {key: {} for key in formats}, "doses": {"noise": dose}}
        one.probe_file(0).write_text(json.dumps(record))  # by the other study, at the same time
        return Child([sys.executable, "-c", ""], environment)

    one.probe_file(0).unlink()
    stand_in(probe_queue, start_probe=start_probe)
    with pytest.raises(ConfigError, match=r"dose of noise for arm noise .* rename the arm"):
        probe_queue.probe_bases(other, [], 1, Deadline(100))


def test_probes_with_details_are_kept_apart_by_the_format_that_others_are_compared_with(design: Design) -> None:
    plain = replace(design, arms=tuple(arm for arm in design.arms if not arm.dosed))
    turned = replace(plain, arms=plain.arms[::-1])
    assert plain.formats[0] != turned.formats[0] and plain.probe_file(0) == turned.probe_file(0)
    detailed = [replace(one, probe=replace(one.probe, texts=4)) for one in (plain, turned)]
    assert detailed[0].probe_file(0) != detailed[1].probe_file(0)


def test_an_arm_without_a_dose_on_record_has_no_run(design: Design) -> None:
    records = probes(design)
    del records[0]["doses"]["bf16-noise"]
    made = {(arm, base) for arm, base, _ in words_of_runs(design, records) if "noise" in arm}
    assert {base for arm, base in made if arm == "bf16-noise"} == {1, 2, 3}
    assert gates(design, records, {})[0].bases == 4 and results(design, records)["KL, nats, bf16-noise"].bases == 3


def test_a_failed_probe_is_told_and_one_without_time_too(
    design: Design,
    stand_in: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)  # the root of the study
    deadline = Deadline(100)

    def start_probe(_design: Design, _words: object, base: int, _formats: object, environment: Any) -> Child:
        if base == 0:
            deadline.end = 0.0
            output = design.probe_file(0).with_name("probe-0.log")
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_text(
                "step 1/500  loss 5.6\rstep 412/500  loss 1.3  left 0:33\n07:59:12 SIGTERM: a checkpoint follows\n"
            )
        return Child([sys.executable, "-c", "exit(3)" if base == 1 else "import time; time.sleep(600)"], environment)

    stand_in(probe_queue, start_probe=start_probe, probed=lambda *_: False)
    records, failed = probe_queue.probe_bases(replace(design, bases=(1, 0, 2)), [], 1, deadline)
    assert records == [] and len(failed) == 1 and "base 1: exit code 3" in failed[0] and "probe-1.log" in failed[0]
    told = [record.getMessage() for record in caplog.records if "no time" in record.getMessage()]
    assert "base 0: step 412/500  loss 1.3  left 0:33 (" in told[0] and "probe-0.log" in told[0]
    assert told[1] == "no time for the probe of base 2: not begun" and len(told) == 2


def test_a_probe_that_ended_without_its_numbers_is_told_as_a_failure(
    design: Design, stand_in: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    stand_in(
        probe_queue,
        start_probe=lambda *given: Child([sys.executable, "-c", ""], given[-1]),
        probed=lambda *_: False,
    )
    records, failed = probe_queue.probe_bases(replace(design, bases=(1,)), [], 1, Deadline(100))
    assert records == [] and len(failed) == 1 and "probe of base 1: it ended, and" in failed[0]


def test_a_study_ends_with_its_failures_and_packs_what_was_done_despite_a_gate(
    conducted: Callable[..., None], tmp_path: Path
) -> None:
    conducted(lambda _: [], failed=["probe of base 9"], rise=0.01)
    with pytest.raises(TrainingStopped, match="base 9"):
        study.main([str(STUDY), "bases=0", "despite=rise of entropy", f"out={tmp_path}"])
    packed = json.loads((tmp_path / "gates.json").read_text())
    assert packed["stopped"] == {} and any(gate["passed"] is False for gate in packed["gates"])
    assert all(gate["overridden"] == (gate["passed"] is False) for gate in packed["gates"])
    with pytest.raises(ConfigError, match=r"minutes .* 0\.75, .* got 0.7"):
        study.main([str(STUDY), "minutes=0.7"])


def test_a_study_that_could_probe_nothing_says_so_and_one_that_could_probe_a_part_too(
    conducted: Callable[..., None], stand_in: Callable[..., None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    conducted(lambda _: [])
    caplog.set_level(logging.INFO)
    study.main([str(STUDY), "bases=0,1", f"out={tmp_path}"])
    assert "runs are left to do, and those of the bases [1], which have no probe yet: the same" in caplog.text
    stand_in(study, probe_bases=lambda *_: ([], []))
    with pytest.raises(TrainingStopped, match=r"no base was probed in the time.*minutes=N"):
        study.main([str(STUDY), "bases=0,1", f"out={tmp_path}"])


def test_a_word_that_no_gate_begins_with_is_told_with_the_names_of_all(
    conducted: Callable[..., None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    conducted(lambda _: [])
    study.main([str(STUDY), "bases=0", "despite=pass,raise of entropy", f"out={tmp_path}"])
    told = [message for message in caplog.messages if message.startswith("despite=")]
    assert len(told) == 1 and told[0].startswith("despite=raise of entropy: no gate of this study begins so; it has: ")
    assert "; rise of entropy, nvfp4-noise; " in told[0]


def test_a_study_that_a_signal_ends_packs_what_was_done(conducted: Callable[..., None], tmp_path: Path) -> None:
    def end(_: Blocks) -> list[tuple[Point, str]]:
        raise Terminated(signal.SIGTERM)

    conducted(end)
    with pytest.raises(Terminated):
        study.main([str(STUDY), "bases=0", f"out={tmp_path}"])
    assert {file.name for file in tmp_path.iterdir()} == {"study.yaml", "probes.json", "gates.json", "gates.md"}


@pytest.mark.parametrize(
    ("words", "tiers", "runs"), [([], {1, 2, 3}, 18), (["tiers=2"], {2}, 4), (["tiers=1,3"], {1, 3}, 14)]
)
def test_only_arms_of_the_chosen_tiers_run(
    design: Design, tmp_path: Path, conducted: Callable[..., None], words: list[str], tiers: set[int], runs: int
) -> None:
    started: list[Point] = []
    conducted(lambda sweep: started.extend([*sweep.todo, *chain(*sweep.blocks)]) or [])
    study.main([str(STUDY), "bases=0", f"out={tmp_path}", *words])
    others = {arm.name for arm in design.arms if arm.tier not in tiers}
    points = [*chain(*blocks_of(design, probes(design)[:1], others))]
    assert [point.name for point in started] == [point.name for point in points] and len(points) == runs
    gates_of = {gate["gate"] for gate in json.loads((tmp_path / "gates.json").read_text())["gates"]}
    assert "damage by mxfp4" in gates_of and "control of exploration bf16-hot" in gates_of  # of the whole study
    with pytest.raises(ConfigError, match=r"tiers \[1, 2, 3\], got tiers=\[1, 4\]"):
        study.main([str(STUDY), "tiers=1,4"])


# --- packed sessions -------------------------------------------------------------------------------------------------


def test_a_further_session_can_train_further_arms_of_a_copy(tmp_path: Path) -> None:
    again = STUDY.parents[1] / "real-2026" / "15b-again"
    (whole,) = again.glob("data/*-copy-01")
    settings = json.loads(gzip.decompress((whole / "settings.json.gz").read_bytes()))
    for folder, quant in (("1-first", "bf16"), ("2-second", "nvfp4")):
        here = Path(shutil.copytree(whole, tmp_path / folder))
        kept = {name: of for name, of in settings["runs"].items() if f"-{quant}-" in name}
        (here / "settings.json.gz").write_bytes(gzip.compress(json.dumps(settings | {"runs": kept}).encode()))
        for file in here.glob("*.parquet"):
            table = pd.read_parquet(file)
            table[table["run"].isin([*kept])].to_parquet(file)
    design, folders = read_design(again / "study.yaml"), sorted(tmp_path.iterdir())
    study = read_sessions(design, folders)
    assert [*study.runs] == [("bf16", 1, 0), ("nvfp4", 1, 0)] and study.session_of == {1: "2-second"}
    assert study.runs.keys() == read_sessions(design, [whole]).runs.keys() and len(study.pairs("nvfp4", "bf16")[0]) == 1


def test_sessions_are_read_together_and_a_base_belongs_to_the_one_that_trained_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first session of the study has probed base 3 too, but trained only bases 0 to 2."""
    early, late = (STUDY.parent / "data" / name for name in ("2026-11-22", "2026-11-23"))
    design = replace(read_design(STUDY), bases=(2, 3))
    study = read_sessions(design, [early, late])
    digests = {folder: {one["base"]: one["digest"] for one in read_probes(folder)} for folder in (early, late)}
    assert digests[early][3] != digests[late][3] and 2 not in digests[late]
    assert {base: one["digest"] for base, one in study.probes.items()} == {2: digests[early][2], 3: digests[late][3]}
    assert {(base, found.path.parent) for (_, base, _), found in study.runs.items()} == {(2, early), (3, late)}
    assert study.session_of == {2: early.name, 3: late.name}
    again = read_sessions(design, [late, early])
    assert again.probes == study.probes and again.runs.keys() == study.runs.keys()
    with pytest.raises(ConfigError, match=r"2026-11-23 has runs of the bases \[3\]"):
        read_sessions(design, [early, late, late])
    with pytest.raises(ConfigError, match=r"probes\.json"):
        read_sessions(design, [tmp_path])
    of_others = [one | {"digest": "sha256:other"} for one in read_probes(late)]
    shutil.copytree(late, tmp_path / "other")
    (tmp_path / "other" / "probes.json.gz").write_bytes(gzip.compress(json.dumps(of_others).encode()))
    with pytest.raises(ConfigError, match="or of other weights"):
        read_sessions(design, [late, tmp_path / "other"])

    with pytest.raises(SystemExit):
        command.main([str(STUDY), "bases=2,3", f"runs={early},{late}", f"out={tmp_path}"])
    measured = {one["gate"]: one["bases"] for one in json.loads((tmp_path / "gates.json").read_text())["gates"]}
    assert measured["pass@1 of the base"] == measured["headroom"] == 2 and "| headroom |" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="give out=DIR"):
        command.main([str(STUDY), f"runs={early}", f"runs={late}"])


def test_a_session_that_only_probed_is_read_too(design: Design, tmp_path: Path) -> None:
    """Its design names no folder of the machine that it was made on."""
    own = search_path([tmp_path])
    archive_probes(replace(design, common=[*design.common, *own]), probes(design), tmp_path)
    study = read_sessions(read_design(tmp_path / "study.yaml"), [tmp_path])
    assert [*study.probes] == [0, 1, 2, 3] and study.runs == {} and study.design.common == design.common


@pytest.mark.parametrize("says", [True, False])
def test_what_a_session_overrode_is_read_from_its_record(says: bool, tmp_path: Path, design: Design) -> None:
    """Records of before have no such field: there a gate was that failed and stopped nothing."""
    gates = [
        {"gate": "headroom", "passed": None, "must": True, "overridden": True},
        {"gate": "control of exploration hot", "passed": False, "must": True, "overridden": False},  # stops no arm
        {"gate": "control group8", "passed": False, "overridden": True},
        {"gate": "pass@64", "passed": False, "overridden": False},
    ]
    for one in [] if says else gates:
        del one["overridden"]
    record = {"gates": gates, "stopped": {"nvfp4": ["pass@64"]}}
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "probes.json").write_text("[]")
    (tmp_path / "s" / "gates.json").write_text(json.dumps(record))
    read = set(read_sessions(design, [tmp_path / "s"]).overridden)
    assert read == ({"headroom"} if says else {"control of exploration hot"}) | {"control of gain group8"}


# --- the world -------------------------------------------------------------------------------------------------------


def test_outliers_change_what_rounding_costs_and_nothing_else() -> None:
    import torch

    from qerl_bench.model.load import load_packed

    ids = torch.randint(0, 200, (4, 12), generator=torch.Generator().manual_seed(0))
    shape = ("hidden_size=64", "layers=2", "heads=4", "kv_heads=2", "intermediate_size=96", "warm_start_steps=0")
    logits = {}
    for quant, outliers in [(quant, outliers) for quant in ("bf16", "nvfp4") for outliers in (0.0, 1.0)]:
        words = [*(f"model.{word}" for word in shape), f"model.outliers={outliers}", f"quant={quant}"]
        one = build(compose(["model=small/2m", "task=countdown", *words]))
        model = load_packed(one.model, one.quant, one.quantizer, one.task, None, "cpu").model
        with torch.no_grad():
            logits[quant, outliers] = model(ids).logits
    assert torch.equal(logits["bf16", 0.0], logits["bf16", 1.0])
    errors = [(logits["nvfp4", outliers] - logits["bf16", 0.0]).square().mean() for outliers in (0.0, 1.0)]
    assert errors[1] > 3 * errors[0] > 0


@pytest.mark.parametrize(
    ("option", "shape"), [("matched", "exp"), *((f"matched_{shape}", shape) for shape in ("linear", "cosine", "log"))]
)
def test_matched_noise_has_the_shape_of_its_schedule_and_its_size_belongs_to_the_base(option: str, shape: str) -> None:
    words = [f"aqn={option}", "aqn.sigma_of_base=0.2"], [f"aqn={shape}", "aqn.sigma_start=0.2", "aqn.sigma_end=0.01"]
    matched, decay = (build(compose(of_one)).aqn for of_one in words)
    assert [matched.sigma(s, 40) for s in range(1, 41)] == pytest.approx([decay.sigma(s, 40) for s in range(1, 41)])
    one, other = (
        Run(Path("x"), dict(compose([f"aqn={option}", f"aqn.sigma_of_base={sigma}"])), {}, True, {}, pd.DataFrame())  # type: ignore[arg-type]
        for sigma in (0.1, 0.2)
    )
    assert one.setting_items == other.setting_items
    with pytest.raises(ConfigError, match=r"aqn.sigma_of_base must be .* got 0"):
        build(compose([f"aqn={option}", "aqn.sigma_of_base=0"]))
