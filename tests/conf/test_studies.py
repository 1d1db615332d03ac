"""Every point of every study in conf/experiment, expanded by Hydra's own sweeper and composed without torch.

The same points come from sweeps/make.py, put on the command line by W&B's own code.
"""

from __future__ import annotations

import json
import math
import re
import runpy
import subprocess
import sys
import zlib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

from qerl_bench.config import build, compose
from qerl_core.checks import ConfigError
from qerl_core.metrics import definitions
from qerl_core.options.fingerprint import as_dict, flat
from qerl_core.process.installation import CONF_DIR
from qerl_studies.claims.claim import NO_RUNS, ContrastResult
from qerl_studies.claims.evaluate import evaluate_claims
from qerl_studies.claims.registry import QERL, claims_of
from qerl_studies.design.design import read_design
from qerl_studies.runs.comparable import load_runs
from qerl_studies.runs.measure import WARM_UP
from tests.run_folders import write_run
from tests.wandb_agent import agent_commands

ROOT = CONF_DIR.parent
CLAIMS = claims_of(QERL)
FOLDERS = ("paper", "speed", "tiny")
STUDIES = sorted(
    f"{folder}/{path.stem}"
    for folder in FOLDERS
    for path in (CONF_DIR / "experiment" / folder).glob("*.yaml")
    if path.stem != "base"
)

SHARED = ("paper/bigmath", "paper/gsm8k", "paper/speed")  # what other studies have in common
PROGRAM = """
import gc, json, sys
gc.disable()  # a fifth of the time, and nothing here is large
from hydra import compose as hydra_compose
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf
from qerl_core.options.composer import Composer, reading_once
from qerl_bench.config import build
import tests.quick_compose

composer = Composer()
composed = {"studies": {}, "configs": {}}
for study in json.load(sys.stdin):
    chosen = f"experiment={study}"
    with reading_once():
        swept = hydra_compose("run", [chosen], return_hydra_config=True).hydra.sweeper.params or {}
    words = OverridesParser.create().parse_overrides([*(f"{key}={swept[key]}" for key in swept), chosen])
    (points,) = BasicSweeper.split_arguments(words, max_batch_size=None)
    others = {f"{key}={n}" for key in ("seed", "model.seed") for n in range(1, 100)}
    first = [point for point in points if not others & set(point)]
    configs = [composer.tree(list(point)) for point in first]
    names = [build(OmegaConf.create(config)).name for config in configs]
    composed["studies"][study] = {"swept": dict(swept), "points": points, "names": names}
    if study.startswith("paper/"):
        composed["configs"] |= dict(zip(names, configs))
composed["modules"] = sorted(sys.modules)
json.dump(composed, sys.stdout)
"""


@pytest.fixture(scope="module")
def composed() -> dict[str, Any]:
    """For every study what it sweeps, how many runs it has, and the names of those of its first seed and base."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps(STUDIES),
        capture_output=True,
        text=True,
        env={"PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'kernels'}:{ROOT}", "PATH": ""},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def names(composed: dict[str, Any], studies: Iterable[str]) -> set[str]:
    return {name for study in studies for name in composed["studies"][study]["names"]}


def test_composing_them_loads_nothing_heavy(composed: dict[str, Any]) -> None:
    assert not {"torch", "transformers", "peft", "vllm", "wandb", "pandas"} & set(composed["modules"])


@pytest.mark.parametrize("study", STUDIES)
def test_the_points_of_a_study_are_different_runs(composed: dict[str, Any], study: str) -> None:
    points = composed["studies"][study]
    assert len(set(points["names"])) == len(points["names"])
    repeats = [len(str(points["swept"].get(key, 0)).split(",")) for key in ("seed", "model.seed")]
    assert len(points["points"]) == len(points["names"]) * math.prod(repeats)


@pytest.mark.parametrize("study", STUDIES)
def test_a_study_says_how_many_runs_it_has(composed: dict[str, Any], study: str) -> None:
    text = (CONF_DIR / "experiment" / f"{study}.yaml").read_text().replace("\n# ", " ")
    said = [int(count) for count in re.findall(r"\((\d+) runs", text)]
    shared = [int(count) for count in re.findall(r"(\d+) of them main's", text)]
    points = composed["studies"][study]
    swept = len(points["points"]) > 1
    assert said == ([len(points["points"])] if swept and study not in SHARED else [])
    repeats = len(points["points"]) // len(points["names"])
    main = names(composed, ["tiny/main"]) if study.startswith("tiny/") and study != "tiny/main" else set()
    common = len(main & set(points["names"])) * repeats
    assert shared == ([common] if common else [])


# --- the paper -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "quant", "aqn", "lr", "rank"),
    [
        ("full", "bf16", "none", 1e-6, 0),
        ("lora", "bf16", "none", 5e-6, 32),
        ("qlora", "nf4", "none", 1e-5, 32),
        ("mxfp4", "mxfp4", "none", 1e-5, 32),
        ("nvfp4", "nvfp4", "none", 1e-5, 32),
        ("qerl", "nvfp4", "exp_paper", 1e-5, 32),
    ],
)
def test_the_methods_of_the_paper(method: str, quant: str, aqn: str, lr: float, rank: int) -> None:
    run = build(compose(["experiment=paper/table1", f"recipe=method/{method}"]))
    assert (run.quant.name, run.aqn.name, run.optim.lr, run.lora.rank) == (quant, aqn, lr, rank)
    assert run.quantizer.name == ("awq" if quant.endswith("fp4") else "rtn")
    assert run.noise.site == ("rollout_and_old_logprobs" if method == "qerl" else "rollout")


def test_the_two_settings_of_the_paper() -> None:
    gsm8k, bigmath = (build(compose([f"experiment=paper/{name}"])) for name in ("gsm8k", "bigmath"))
    for run in (gsm8k, bigmath):
        assert run.rollout.prompts_per_step * run.rollout.group_size == 128
        assert (run.algo.epsilon_low, run.algo.epsilon_high, run.kl.coef, run.train.entropy_coef) == (0.2, 0.28, 0, 0)
        assert run.optim.optimizer == "adamw_8bit"
    assert (gsm8k.algo.name, gsm8k.rollout.group_size, gsm8k.train.updates_per_batch) == ("grpo", 8, 4)
    assert (bigmath.algo.name, bigmath.rollout.group_size, bigmath.train.updates_per_batch) == ("dapo", 16, 1)
    assert (gsm8k.task.max_completion_tokens, bigmath.task.max_completion_tokens) == (4096, 8192)
    assert (gsm8k.task.name, bigmath.task.name) == ("gsm8k", "bigmath")


@pytest.mark.parametrize("study", [study for study in STUDIES if study.startswith("paper/")])
def test_warm_up_is_a_tenth_of_each_run_of_the_paper(study: str) -> None:
    run = compose([f"experiment={study}"])
    assert run.optim.warmup_steps == run.steps / 10


@pytest.mark.parametrize("study", ["tables3_5_to_8", "tables3_5_to_8_vllm", "table9", "table9_vllm"])
def test_the_steps_whose_speed_is_measured_have_the_lengths_of_the_paper(composed: dict[str, Any], study: str) -> None:
    configs = [composed["configs"][name] for name in names(composed, [f"paper/{study}"])]
    lengths = {(c["task"]["lengths"], c["task"]["prompt_tokens"], c["task"]["completion_tokens"]) for c in configs}
    assert lengths == {("fixed", 256, 2048)}
    by_vllm = study.endswith("_vllm")
    assert {config["engine"]["name"] for config in configs} == {"vllm" if by_vllm else "hf"}
    nf4 = {config["quant"].get("backend") for config in configs if config["quant"]["name"] == "nf4"}
    assert nf4 == (set() if by_vllm else {"own", "bitsandbytes"})
    assert {config["quantizer"]["name"] for config in configs} == {"rtn"}


def test_the_arm_of_figure_9_without_noise_differs_from_the_others_in_noise_alone(composed: dict[str, Any]) -> None:
    (none,) = (composed["configs"][name] for name in names(composed, ["paper/figure9_none"]))
    for name in names(composed, ["paper/figure9"]):
        other = composed["configs"][name]
        different = {key for key in none if none[key] != other[key]}
        assert none["aqn"]["name"] == "none" and different == {"aqn", "noise", "name"}


def test_the_code_samples_no_group_again(composed: dict[str, Any]) -> None:
    refills = [
        {composed["configs"][name]["algo"]["max_resampling_rounds"] for name in names(composed, [f"paper/{study}"])}
        for study in ("table2", "table2_code")
    ]
    assert refills == [{3}, {0}]


def recorded(configs: dict[str, Any], place: Path) -> Path:
    """A run of two seeds for each config, on a GPU: all that the claims ask for, and numbers that differ by seed."""
    for name, config in configs.items():
        for seed in (0, 1):
            folder = place / name.replace("-s0-", f"-s{seed}-")
            size = 1 + zlib.crc32(folder.name.encode()) / 2**32
            keys = ("reward/mean", "accuracy", "entropy", "speed/rollout_tok_s", "time/step_s", "memory/peak_gib")
            keys = (*keys, "train/taught_frac")
            lines = [{"kind": "train", "step": step} | dict.fromkeys(keys, size * step) for step in range(1, 13)]
            answers = pd.DataFrame({"question": ["a", "b"], "correct": [True, size > 1.5]})
            answers = answers.assign(mode="sampled", step=config["steps"])
            kept = None if config["eval"]["name"] == "none" else answers
            environment = {"device": "cuda", "gpu": "a GPU", "code": "1f"}
            text = json.dumps(config | {"name": folder.name, "seed": seed})  # which is YAML too
            write_run(folder, text, lines, {}, environment, kept)
    return place


def compared(result: ContrastResult) -> bool:
    return any(comparison.effect for comparison in result.comparisons)


def test_whoever_runs_the_studies_of_the_paper_gets_every_claim_compared(
    composed: dict[str, Any], tmp_path: Path
) -> None:
    """Matched where two runs differ in one thing; the paper's own arms, called that, where they differ in several."""
    runs = load_runs([recorded(composed["configs"], tmp_path)])

    def results(model: str, task: str) -> dict[str, tuple[ContrastResult, ...]]:
        chosen = [run for run in runs if (run.option("model.name"), run.option("task.name")) == (model, task)]
        return {result.claim.title: result.contrasts for result in evaluate_claims(CLAIMS, chosen)}

    small, gsm8k = (results(f"qwen2.5-{size}-instruct", "gsm8k") for size in ("3b", "7b"))
    shape = results("qwen2.5-7b-instruct", "shape")
    matched = {
        "4-bit raises initial entropy": gsm8k, "AQN adds to it": gsm8k, "Exponential decay is best": small,
        "Rank matters little": small, "Faster rollouts": shape, "Faster steps, end to end": shape, "Less memory": shape,
        # figure 16's LoRA at the rate of figure 8's NVFP4, as long
        "Faster reward growth than 16-bit LoRA": gsm8k, "Higher final accuracy than 16-bit LoRA": gsm8k,
        "NVFP4 with LoRA matches full-parameter training": gsm8k,
    }  # fmt: skip
    for title, of_claim in matched.items():
        assert all(compared(result) for result in of_claim[title] if result.contrast.votes), title
    # Elsewhere the paper's LoRA has half the rate; its QLoRA has another quantizer, and its high rates come with noise.
    published = {
        "Faster reward growth than 16-bit LoRA": (small, "optim.lr (1e-05 / 5e-06)"),
        "Higher final accuracy than 16-bit LoRA": (small, "optim.lr (1e-05 / 5e-06)"),
        "Quantized policies bear a higher learning rate": (gsm8k, "aqn.name (exp_paper / none)"),
        "NF4 trails": (gsm8k, "quantizer.name (rtn / awq)"),
    }
    for title, (of_claim, confounder) in published.items():
        recipes = [result for result in of_claim[title] if result.contrast.confounded]
        assert not any(compared(result) for result in of_claim[title] if result.contrast.votes) and recipes, title
        assert all(compared(recipe) and confounder in recipe.confounders for recipe in recipes), title
    # No experiment of the paper is one of supervised fine-tuning.
    sft = "The reverse holds for supervised fine-tuning"
    assert {claim.title for claim in CLAIMS} == {*matched, *published, sft}
    assert all(result.reason == NO_RUNS for result in gsm8k[sft])
    growth = results("qwen2.5-7b-instruct", "bigmath")["Faster reward growth than 16-bit LoRA"]
    assert [compared(result) for result in growth] == [False, True, True]


WORLDS = ROOT / "studies" / "worlds-2026-settings" / "study.yaml"


def test_each_tier_of_the_worlds_settings_completes_whole_contrasts(tmp_path: Path) -> None:
    design = read_design(WORLDS)
    names, configs = {}, {}
    for arm in design.arms:
        config = as_dict(compose(design.words(arm, design.bases[0], 0, sigma=0.12 if arm.dosed else None)))
        names[config["name"].replace("-s0-", "-")], configs[config["name"]] = arm.tier, config
    runs = load_runs([recorded(configs, tmp_path)])

    def in_primary_settings(tier: int) -> dict[str, set[str]]:
        """The contrasts that vote and have an effect there, by claim."""
        kept = [run for run in runs if names[re.sub(r"-s\d+-", "-", run.name)] <= tier]
        return {
            one.claim.title: {r.contrast.label for r in one.voting if r.primary is not None and r.primary.effect}
            for one in evaluate_claims(CLAIMS, kept)
        }

    rates, ranks, shapes, supervised = (CLAIMS[number - 1].title for number in (7, 6, 5, 9))
    whole = {claim.title: {one.label for one in claim.contrasts if one.votes} for claim in CLAIMS}
    decided = [
        [title for title, found in in_primary_settings(tier).items() if found == whole[title]] for tier in range(1, 6)
    ]
    accuracies = {"Faster reward growth than 16-bit LoRA", "Higher final accuracy than 16-bit LoRA"}
    assert {*decided[0]} == {rates, *accuracies} and {*decided[1]} == {*decided[0], ranks}
    assert {*decided[2]} == {*decided[1], shapes, "AQN adds to it"} == {*decided[3]}
    assert in_primary_settings(4)[supervised] == {"nvfp4 - bf16"} and {*decided[4]} == {*decided[3], supervised}


@pytest.mark.parametrize("path", sorted((ROOT / "studies").glob("*/study.yaml")), ids=lambda path: path.parent.name)
def test_the_arms_of_a_committed_study_are_runs_of_their_own(path: Path) -> None:
    design = read_design(path)
    words = [design.words(arm, design.bases[0], 0, sigma=0.12 if arm.dosed else None) for arm in design.arms]
    runs = [build(compose(one)) for one in words]
    assert len({run.name for run in runs}) == len(runs) and min(arm.tier for arm in design.arms) == 1
    assert all(run.steps == runs[0].steps and run.model.name == runs[0].model.name for run in runs)


@pytest.mark.parametrize(("world", "least"), [("outliers", 60), ("shortcut", 32)])
def test_the_studies_in_one_world_share_no_base(world: str, least: int) -> None:
    """Those that trained arms: dag-2026-explained stopped before, and dag-2026-weighted has its bases."""
    paths = (ROOT / "studies").glob("*/study.yaml")
    designs = [read_design(path) for path in paths if (path.parent / "results").exists()]
    bases = [base for one in designs if f"experiment=worlds/{world}" in one.common for base in one.bases]
    assert len(bases) == len({*bases}) >= least


# --- the tiny study --------------------------------------------------------------------------------------------------

TINY = [study for study in STUDIES if study.startswith("tiny/")]


def test_the_tiny_study_has_two_runs_of_41_settings_on_each_of_16_bases(composed: dict[str, Any]) -> None:
    swept = [composed["studies"][study]["swept"] for study in TINY]
    assert {study["seed"] for study in swept} == {"0,1"}
    assert {study["model.seed"] for study in swept} == {",".join(map(str, range(16)))}
    assert len(names(composed, TINY)) == 41
    texts = [path.read_text() for path in (ROOT / "Makefile", CONF_DIR / "experiment" / "tiny" / "base.yaml")]
    assert all(f"{41 * 16 * 2:,} runs" in text for text in texts)


def test_the_tiny_study_is_evaluated_closely_at_a_rate_that_falls_to_zero() -> None:
    for study in TINY:
        run = build(compose([f"experiment={study}"]))
        assert (run.eval.name, getattr(run.eval, "samples", None)) == ("task", 32)
        assert run.optim.lr_at(run.steps, run.steps) < 1e-3 * run.optim.lr


@pytest.mark.parametrize(
    ("study", "shared"), [("learning_rates", 4), ("schedules", 2), ("ranks", 2), ("algorithms", 2), ("sft", 0)]
)
def test_baselines_are_runs_of_main(composed: dict[str, Any], study: str, shared: int) -> None:
    assert len(names(composed, [f"tiny/{study}"]) & names(composed, ["tiny/main"])) == shared


def test_what_make_study_begins_with_is_a_run_of_main(composed: dict[str, Any]) -> None:
    (words,) = re.findall(r"^FIRST := (.*)$", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert build(compose(words.split())).name in names(composed, ["tiny/main"])


@pytest.mark.parametrize("rank", [8, 16, 32, 64])
def test_alpha_is_the_same_for_every_rank(rank: int) -> None:
    for study in ("tiny/ranks", "paper/figure10"):
        lora = build(compose([f"experiment={study}", f"lora.rank={rank}"])).lora
        assert (lora.rank, getattr(lora, "alpha", None)) == (rank, 32)


@pytest.mark.parametrize("aqn", ["exp", "linear", "cosine", "log"])
def test_the_noise_of_the_tiny_study_takes_all_ten_stages(aqn: str) -> None:
    experiment = build(compose(["experiment=tiny/schedules", "quant=nvfp4", f"aqn={aqn}"]))
    sigmas = [experiment.aqn.sigma(step, experiment.steps) for step in range(1, experiment.steps + 1)]
    assert [sigmas.count(sigma) for sigma in dict.fromkeys(sigmas)] == [10] * 10
    assert sigmas[0] == 0.0
    assert sigmas[-1] == pytest.approx(5e-4)


def test_a_control_is_the_control_of_its_name_but_for_what_tiny_shares() -> None:
    for control in (CONF_DIR / "experiment" / "control").glob("*.yaml"):
        if control.stem == "bf16_noise":  # bf16 with aqn=exp, which is a point of tiny/main
            continue
        tiny, plain = (
            compose([f"experiment={name}"]) for name in (f"tiny/control_{control.stem}", f"control/{control.stem}")
        )
        base, default = compose(["experiment=tiny/base"]), compose()
        tiny, plain, base, default = (flat(as_dict(config)) for config in (tiny, plain, base, default))
        for key in plain.keys() - {"name"}:
            assert tiny[key] == (plain if base.get(key) == default.get(key) else base)[key], (control.stem, key)


LAUNCHED = """
import runpy, subprocess, sys

class Started(subprocess.Popen):
    def __init__(self, command, **options): print("started", *command[2:])
    pid = 1
    def poll(self): return 0

subprocess.Popen = Started
sys.argv[0] = sys.argv.pop(1)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_the_program_starts_the_points_that_the_file_lists(composed: dict[str, Any], tmp_path: Any) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            LAUNCHED,
            ROOT / "src" / "run.py",
            "experiment=tiny/ranks",
            "-m",
            "seed=0",
            "model.seed=0",
            "hydra.launcher.preload=false",
            f"root={tmp_path}",
        ],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'kernels'}", "PATH": "", "CUDA_VISIBLE_DEVICES": ""},
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    started = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("started")]
    assert {build(compose(words)).name for words in started} == set(composed["studies"]["tiny/ranks"]["names"])
    assert len(started) == 8


# --- speed and memory ------------------------------------------------------------------------------------------------

SPEED = [study for study in STUDIES if study.startswith("speed/")]


@pytest.mark.parametrize(
    ("study", "points"),
    [("rollout", 45), ("step", 27), ("memory", 18), ("ragged", 18), ("long", 6)],
    ids=lambda value: str(value),
)
def test_a_speed_study_is_as_large_as_it_says(composed: dict[str, Any], study: str, points: int) -> None:
    assert len(composed["studies"][f"speed/{study}"]["points"]) == points
    assert f"({points} runs)" in (CONF_DIR / "experiment" / "speed" / f"{study}.yaml").read_text()


@pytest.mark.parametrize("study", SPEED)
def test_a_speed_study_measures_steps_that_train(study: str) -> None:
    run = build(compose([f"experiment={study}"]))
    assert (run.task.name, run.model.name, run.eval.name, run.aqn.name) == ("shape", "shape-7b", "none", "none")
    measured = run.steps - math.ceil(WARM_UP * run.steps)
    fewest = {"speed/step": 5, "speed/long": 2}.get(study, 10)  # a step takes a minute or more
    assert measured >= fewest and run.save_every == run.steps
    assert run.algo.on_policy and "shape-7b" in run.name
    for prompt in run.task.train_prompts(1, run.rollout.prompts_per_step, seed=0):
        assert set(prompt.answer) == {"0", "1"} and len(prompt.answer) == run.rollout.group_size


def test_speed_studies_share_runs(composed: dict[str, Any]) -> None:
    assert len(names(composed, ["speed/memory"]) & names(composed, ["speed/rollout"])) == 3


# --- sweeps ----------------------------------------------------------------------------------------------------------

make_sweep = runpy.run_path(str(ROOT / "sweeps" / "make.py"))["sweep"]
COMMITTED = sorted((ROOT / "sweeps").glob("*.yaml"))


def agent_words(sweep: dict[str, Any]) -> Iterator[list[str]]:
    """What W&B's agent writes behind the program, point by point."""
    for command in agent_commands(sweep):
        yield command[command.index(sweep["program"]) + 1 :]


@cache
def meaning(word: str) -> tuple[str, Any]:
    """An override as Hydra reads it: 1e-4 and 0.0001 are one number."""
    (parsed,) = OverridesParser.create().parse_overrides([word])
    return parsed.get_key_element(), parsed.value()


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_a_committed_sweep_is_what_its_command_makes(path: Path) -> None:
    (command,) = re.findall(r"^# Made by: python sweeps/make.py (.*)$", path.read_text(), flags=re.MULTILINE)
    assert path.read_text() == make_sweep(command.split())


CONTROLS = sorted(study for study in STUDIES if study.startswith("tiny/control"))


@pytest.mark.parametrize("studies", [*([study] for study in STUDIES if study not in SHARED), CONTROLS], ids="+".join)
def test_an_agent_runs_the_points_of_the_study(composed: dict[str, Any], studies: list[str]) -> None:
    sweep = yaml.safe_load(make_sweep(studies))
    words = [frozenset(map(meaning, point)) for point in agent_words(sweep)]
    mirror = ("logger", "wandb")  # without it the agent waits for numbers that never come
    assert all(mirror in point for point in words)
    expected = {frozenset(map(meaning, point)) for study in studies for point in composed["studies"][study]["points"]}
    assert {point - {mirror} for point in words} == expected
    assert len(words) == len(expected)
    assert (ROOT / sweep["program"]).is_file()
    assert sweep["metric"]["name"] in {**definitions.ROLLOUT, **definitions.TRAIN, **definitions.EVAL}


def test_studies_of_different_grids_are_no_sweep() -> None:
    for studies in ([], ["tiny/main", "tiny/ranks"], ["smoke"]):
        with pytest.raises(ConfigError):
            make_sweep(studies)


def test_a_word_of_the_agent_composes(composed: dict[str, Any]) -> None:
    sweep = yaml.safe_load(make_sweep(["tiny/learning_rates"]))
    names = {build(compose(words)).name for words in agent_words(sweep) if {"seed=0", "model.seed=0"} <= {*words}}
    assert names == set(composed["studies"]["tiny/learning_rates"]["names"])
