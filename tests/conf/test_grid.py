"""Every combination of options and every single experiment: composed and checked in one process that must not have
loaded torch or any of its friends; and the name that a run gets from its config."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import subprocess
import sys
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from qerl_bench.config import build, compose
from qerl_bench.sweep.check import note_following_alpha, warn_of_single_point
from qerl_core.checks import ConfigError
from qerl_core.options.composer import HYDRA_DEFAULTS
from qerl_core.options.fingerprint import fingerprint
from qerl_core.process.installation import CONF_DIR
from qerl_core.rundir.run_dir import RunDir

ROOT = CONF_DIR.parent
WHOLE = {"experiment", "recipe", "claim"}  # folders whose files set several axes, or none
AXES = sorted(folder.name for folder in CONF_DIR.iterdir() if folder.is_dir() and folder.name not in WHOLE)
RECIPES = sorted(path.stem for path in (CONF_DIR / "recipe").glob("*.yaml"))
OPTIONS = {
    axis: sorted(str(path.relative_to(CONF_DIR / axis).with_suffix("")) for path in (CONF_DIR / axis).rglob("*.yaml"))
    for axis in AXES
}
# Presets of model=hub differ in id and template only, and it needs an id (tests/models/test_hub_model.py).
HUB = {
    name
    for name in OPTIONS["model"]
    if name == "hub" or "defaults: [hub]" in (CONF_DIR / f"model/{name}.yaml").read_text()
}
OPTIONS["model"] = sorted({*OPTIONS["model"]} - HUB | {"qwen2.5-7b-instruct", "llama-3.2-1b"})
EXPERIMENTS = sorted(
    str(path.relative_to(CONF_DIR / "experiment").with_suffix(""))
    for path in (CONF_DIR / "experiment").rglob("*.yaml")
    if path.parent.name not in ("paper", "speed", "tiny")  # test_studies.py has those
)
# Full products: of the axes that may exclude each other, and of those that a user chooses between from day to day.
GRIDS = (
    ("quant", "quantizer", "aqn", "algo", "lora", "model"),
    ("quant", "aqn", "algo", "lora", "eval", "logger", "engine"),
    ("task", "model", "algo", "eval", "engine"),
    ("task", "algo", "reward"),
)


def pairwise(options: dict[str, list[str]]) -> list[dict[str, str]]:
    """Few combinations in which every two options of different axes meet at least once (greedy, deterministic)."""
    axes = sorted(options, key=lambda axis: -len(options[axis]))
    missing = {
        frozenset({(a, x), (b, y)})
        for a, b in itertools.combinations(axes, 2)
        for x, y in itertools.product(options[a], options[b])
    }

    def news(row: dict[str, str], axis: str, option: str) -> int:
        return sum(frozenset({(axis, option), item}) in missing for item in row.items())

    rows = []
    while missing:
        row = dict(min(sorted(pair) for pair in missing))
        for axis in axes:
            if axis not in row:
                gains = [news(row, axis, option) for option in options[axis]]
                row[axis] = options[axis][gains.index(max(gains))]
        rows.append(row)
        missing -= {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}
    return rows


def composed_rows() -> list[dict[str, str]]:
    """Combinations to compose for real: every two options of the axes with few, in turns with those of the others."""
    turns = {axis: names for axis, names in OPTIONS.items() if len(names) > 8}
    rows = pairwise({axis: names for axis, names in OPTIONS.items() if axis not in turns})
    return [row | {axis: names[i % len(names)] for axis, names in turns.items()} for i, row in enumerate(rows)]


PROGRAM = """
import gc, itertools, json, sys, time
gc.disable()  # a fifth of the time, and nothing here is large
import run  # the program itself: what it imports at its start counts too
from hydra_plugins.process_launcher import launcher
from omegaconf import OmegaConf
from qerl_core.options.composer import Composer
from qerl_bench.config import build, spec
from qerl_bench.experiment_spec import Experiment
from qerl_core.checks import ConfigError
import tests.quick_compose

asked, composer = json.load(sys.stdin), Composer()
started = time.perf_counter()
found = {"composed": {}, "refused": {}, "grid": 0, "grid_refused": []}
built = {axis: {} for axis in asked["options"]}
for name, overrides in asked["points"]:
    cfg = OmegaConf.create(composer.tree(overrides))
    if name.startswith("{"):  # a row: what it chose for each axis serves the grids below
        for axis, option in json.loads(name).items():
            built[axis].setdefault(option, spec(cfg, axis))
    try:
        found["composed"][name] = build(cfg).name
    except ConfigError as error:
        found["refused"][name] = str(error)

# Options meet in two places only: interpolations, which the points above compose, and Experiment, which sees them all.
base = OmegaConf.create(composer.tree([]))
plain = {key: base[key] for key in base if key not in asked["options"]}
plain |= {key: spec(base, key) for key in plain}
usual = {axis: spec(base, axis) for axis in built}
for axes in asked["grids"]:
    for names in itertools.product(*(asked["options"][axis] for axis in axes)):
        point = dict(zip(axes, names))
        found["grid"] += 1
        try:
            Experiment(**plain, **{**usual, **{axis: built[axis][name] for axis, name in point.items()}})
        except ConfigError:
            found["grid_refused"].append(point)
found["seconds"] = time.perf_counter() - started
found["modules"] = sorted(sys.modules)
json.dump(found, sys.stdout)
"""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What one fresh process made of all of it."""
    points = [(json.dumps(row, sort_keys=True), [f"{k}={v}" for k, v in row.items()]) for row in composed_rows()]
    points += [(f"experiment={name}", [f"experiment={name}"]) for name in EXPERIMENTS]
    for recipe, experiment in itertools.product(RECIPES, ("smoke", "demo")):
        points.append((f"{recipe} {experiment}", [f"recipe={recipe}", f"experiment={experiment}"]))
    points += [(f"smoke {model}", ["experiment=smoke", f"model={model}"]) for model in OPTIONS["model"]]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps({"points": points, "options": OPTIONS, "grids": GRIDS}),
        capture_output=True,
        text=True,
        env={"PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'kernels'}:{ROOT}", "PATH": ""},
    )
    assert done.returncode == 0, done.stderr
    return {**json.loads(done.stdout), "asked": [name for name, _ in points]}


def test_rows_meet_every_two_options_of_most_axes_and_every_option_of_all() -> None:
    rows = composed_rows()
    for axis, names in OPTIONS.items():
        assert {row[axis] for row in rows} == set(names)
    few = [axis for axis, names in OPTIONS.items() if len(names) <= 8]
    assert len(few) >= 6
    for a, b in itertools.combinations(few, 2):
        assert {(row[a], row[b]) for row in rows} == set(itertools.product(OPTIONS[a], OPTIONS[b]))


def test_there_is_something_to_compose() -> None:
    assert {"quant", "aqn", "algo", "lora", "model", "engine", "task", "eval", "logger"} <= set(AXES)
    assert all(OPTIONS.values()) and len(EXPERIMENTS) >= 2


def test_nothing_heavy_is_loaded(found: dict[str, Any]) -> None:
    heavy = {
        "torch",
        "transformers",
        "peft",
        "vllm",
        "wandb",
        "bitsandbytes",
        "lm_eval",
        "datasets",
        "triton",
        "pandas",
        "math_verify",
        "reasoning_gym",
    }
    assert not heavy & set(found["modules"])


def test_it_takes_seconds(found: dict[str, Any]) -> None:
    per_point = found["seconds"] / (len(found["asked"]) + len(list(itertools.chain(*OPTIONS.values()))))
    assert per_point < 1.5, "composing has become slow"


# One sequence of the whole context takes more than engine.kv_cache_gib.
LONG_CONTEXTS = [f"shape/{name}" for name in ("14b", "32b", "72b", "llama-3.1-8b", "qwen3-8b", "gpt-oss-20b")]


def _refusal(row: dict[str, str]) -> str | None:
    """The options that the refusal of this combination names, as a pattern; None if the combination must compose."""
    row = {"quant": "bf16", "aqn": "none", "algo": "grpo", "lora": "default"} | row
    if row["lora"] == "none" and row["quant"] != "bf16":
        return f"lora=none .*quant={row['quant']} .*lora=default, or quant=bf16"
    in_float32 = ("tiny", "tiny_untrained", "shape/tiny", "small/")
    if row["lora"] == "none" and not row.get("model", "tiny").startswith(in_float32):
        return "lora=none .*bfloat16.*model.dtype=float32"
    if row.get("quantizer", "rtn") != "rtn" and row["quant"] == "bf16":
        return f"quantizer={row['quantizer']} .*quant=bf16 .*quantizer=rtn"
    if row["algo"] == "sft" and row["aqn"] != "none":
        return f"aqn={row['aqn']} .*algo=sft .*aqn=none"
    if row["aqn"] == "layerwise" and row["quant"] == "bf16":
        return "aqn=layerwise .*quant=bf16"
    if row["aqn"] == "format_error":
        return "aqn=format_error .*relative" if row["quant"] == "bf16" else "aqn=format_error .*unquantized weights"
    if row.get("engine") == "vllm" and row["lora"] == "none":
        return "engine=vllm .*rank 1 to 512.*lora"
    if row.get("engine") == "vllm" and row.get("model") in LONG_CONTEXTS:
        return "engine.kv_cache_gib=4.0 "
    if row.get("task") == "shape" and row["algo"] == "sft":
        return "task=shape .*demonstrations.*algo=sft"
    if row.get("task") == "even_characters" and row["algo"] == "sft":
        return "task=even_characters .*worked solutions.*sft"
    if row.get("task") == "shape" and row.get("eval") != "none":
        return f"task=shape .*eval={row.get('eval', 'task')} "
    if row.get("reward") in ("random", "function") and row["algo"] == "sft":
        return f"reward={row['reward']} .*algo=sft .*reward=task"
    return None


def test_rows_compose_or_are_refused_for_a_known_reason(found: dict[str, Any]) -> None:
    rows = {json.dumps(row, sort_keys=True): row for row in composed_rows()}
    for name, row in rows.items():
        reason = _refusal(row)
        if reason is not None:
            assert re.match(reason, found["refused"][name]), (row, found["refused"][name])
        else:
            lora = 0 if row["lora"] == "none" else 32
            model = row["model"].replace("/", "-")
            expected = f"{model}-{row['quant']}-{row['aqn']}-{row['algo']}-r{lora}-s0-"
            assert found["composed"][name].startswith(expected), row
    names = [found["composed"][name] for name in rows if name in found["composed"]]
    assert len(set(names)) >= len(names) - sum(row["logger"] != OPTIONS["logger"][0] for row in rows.values())


def test_the_full_grid_is_possible_but_for_the_known_reasons(found: dict[str, Any]) -> None:
    rows = [
        dict(zip(axes, names, strict=True))
        for axes in GRIDS
        for names in itertools.product(*(OPTIONS[axis] for axis in axes))
    ]
    assert found["grid"] == len(rows) > 1000
    assert found["grid_refused"] == [row for row in rows if _refusal(row) is not None]


def test_every_axis_is_in_a_full_grid() -> None:
    assert {axis for axes in GRIDS for axis in axes} == set(AXES)


@pytest.mark.parametrize("experiment", ["smoke", "demo"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_decides_the_noise_of_any_experiment(found: dict[str, Any], recipe: str, experiment: str) -> None:
    own = {"none": {"smoke": "none", "demo": "exp"}[experiment], "paper": "exp_paper", "surogate": "exp_surogate"}
    noise = own.get(recipe, "exp_repo")
    assert found["composed"][f"{recipe} {experiment}"].split("-")[2] == noise


@pytest.mark.parametrize("model", OPTIONS["model"])
def test_smoke_takes_every_model(found: dict[str, Any], model: str) -> None:
    assert f"smoke {model}" in found["composed"], found["refused"].get(f"smoke {model}")


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_composes(found: dict[str, Any], name: str) -> None:
    assert f"experiment={name}" in found["composed"], found["refused"].get(f"experiment={name}")


# --- names and fingerprints ------------------------------------------------------------------------------------------


def _print(*overrides: str) -> str:
    return fingerprint(compose(list(overrides)))


def test_runs_of_the_same_science_share_a_fingerprint() -> None:
    reference = _print()
    same = ("seed=7", "root=/elsewhere", "logger=wandb", "logger=wandb logger.project=x", "save_every=3", "name=mine")
    same = (*same, "eval.every=3", "eval.every_questions=7", "checkpoints.keep=1")
    for words in (*same, "rollout.temperature=1", "task.correct_weight=1", "optim.weight_decay=0"):
        assert _print(*words.split()) == reference, words
    before = {str(key): value for key, value in compose().items() if key != "reward"}  # which was added later
    assert fingerprint(before) == reference
    assert _print("optim.lr=0.0001") == _print("optim.lr=1e-4") != reference


def test_runs_of_other_science_do_not() -> None:
    changes = [
        "steps=151",
        "optim.lr=1.0e-9",
        "optim.schedule=linear",
        "optim.warmup_steps=4",
        "optim.weight_decay=0.01",
        "lora.rank=16",
        "optim.max_grad_norm=2",
        "train.micro_batch_tokens=3200",
        "lora.alpha=64",
        "lora.dropout=0.1",
        "lora.targets=[q_proj]",
        "rollout.prompts_per_step=8",
        "rollout.group_size=4",
        "rollout.temperature=0.9",
        "algo.epsilon_low=0.1",
        "model.layers=5",
        "model.seed=1",
        "task.max_start=21",
        "task.procedures.guess=0.5",
        "eval.questions=8",
        "eval.quant=nvfp4",
        "rollout.quant=nvfp4",
        "engine.max_num_seqs=1",
        "device=cpu",
    ]
    base = compose()
    prints = [fingerprint(base)]
    for change in changes:
        key, _, value = change.partition("=")
        other = base.copy()
        assert OmegaConf.select(other, key) != yaml.safe_load(value), change
        OmegaConf.update(other, key, yaml.safe_load(value), force_add=False)
        prints.append(fingerprint(other))
    prints += [_print(word) for word in ("quant=nvfp4", "quant=nf4", "aqn=exp", "algo=dapo", "algo=sft")]
    prints += [_print(word) for word in ("model=qwen2.5-7b-instruct", "task=gsm8k", "eval=none")]
    prints += [_print("reward=random"), _print("reward=random", "reward.p=0.4")]
    prints += [_print("lora.rank=16")]  # from the command line, where alpha follows the rank
    assert len(set(prints)) == len(prints)


def test_the_name_of_a_run() -> None:
    cfg = compose(["quant=nvfp4", "aqn=exp", "lora.rank=16", "seed=3"])
    assert cfg.name == f"tiny-nvfp4-exp-grpo-r16-s3-{fingerprint(cfg)}"
    assert build(cfg).run_dir == Path(".") / "runs" / cfg.name
    assert compose(["lora=none"]).name.startswith("tiny-bf16-none-grpo-r0-s0-")
    assert compose(["quant=nvfp4", "aqn=exp", "lora.rank=16", "seed=4"]).name == cfg.name.replace("-s3-", "-s4-")


def test_the_stored_config_has_the_fingerprint_of_the_run(tmp_path: Path) -> None:
    cfg = compose(["quant=nvfp4", "aqn=exp", "optim.lr=1e-5", "eval.questions=null"])
    with RunDir(tmp_path / "run", cfg) as run:
        stored = OmegaConf.load(run.path / "config.yaml")
    assert stored == cfg
    assert fingerprint(stored) == cfg.name.rsplit("-", 1)[1]


def test_hydra_composes_what_compose_composes() -> None:
    """`--cfg job --resolve` of the program, flags behind the overrides as users write them."""
    words = ["quant=mxfp4", "aqn=exp", "optim.lr=2e-5", "seed=2", "experiment=smoke"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "src" / "run.py"), *words, "--cfg", "job", "--resolve"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert OmegaConf.to_container(OmegaConf.create(done.stdout)) == OmegaConf.to_container(compose(words))


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quant", [name for name in OPTIONS["quant"] if name != "bf16"])
def test_packed_weights_cannot_be_trained(quant: str) -> None:
    with pytest.raises(ConfigError, match=f"lora=none .*quant={quant} .*quant=bf16"):
        build(compose([f"quant={quant}", "lora=none"]))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("steps=5 optim.warmup_steps=5", "optim.warmup_steps must be below steps=5, got 5"),
        ("steps=-1", "steps must be a whole number of at least 0, got -1"),
        ("steps=0 eval=none", "steps=0 trains nothing .* eval=task"),
        ("steps=0 optim.warmup_steps=1", "optim.warmup_steps must be below steps=0, got 1"),
        ("steps=1.5", "steps must be a whole number"),
        ("steps=true", "steps must be a whole number"),
        ("seed=-1", "seed must be a whole number of at least 0"),
        ("save_every=0", "save_every must be"),
        ("device=tpu", "device .*auto.*cuda.*got 'tpu'"),
        ("rollout.group_size=1", "rollout.group_size .* at least 2, got 1"),
        ("rollout.temperature=0", "rollout.temperature .*above 0, got 0"),
        ("rollout.temperature=inf", "rollout.temperature .*got inf"),
        ("optim.lr=inf", "optim.lr .*above 0, got inf"),
        ("optim.schedule=step", "optim.schedule .*constant.*got 'step'"),
        ("optim.weight_decay=-1", "optim.weight_decay .*at least 0, got -1"),
        ("lora.rank=0", "lora.rank .*at least 1.*lora=none"),
        ("lora.rank=true", "lora.rank .*whole number"),
        ("lora.targets=q_proj", "lora.targets .*q_proj"),
        ("lora.alpha=much", "alpha.*much"),
        ("lora=none lora.rank=4", "lora=none .*lora.rank=4"),
        ("aqn=exp aqn.sigma_end=1", "sigma_end <= sigma_start"),
        ("noise.norms=all", "noise.norms .*blocks, blocks_final, missed"),
        ("noise.site=rollout_and_training noise.cadence=group", "Use noise.cadence=step"),
        ("importance_sampling.split_mismatch=1", "importance_sampling.split_mismatch .*got 1"),
        ("importance_sampling.mode=clip", "importance_sampling.mode .*none, truncate, mask, got 'clip'"),
        ("importance_sampling.level=group", "importance_sampling.level .*token, sequence"),
        ("importance_sampling.clip_max=0.9", "importance_sampling.clip_max .*at least 1"),
        (
            "importance_sampling.mode=mask importance_sampling.clip_min=0",
            "importance_sampling.clip_min .*null.*above 0.*got 0",
        ),
        (
            "importance_sampling.mode=truncate importance_sampling.clip_min=0.5",
            "Use importance_sampling.mode=mask, or importance_sampling.clip_min=null",
        ),
        ("importance_sampling.warn_ess=2", "importance_sampling.warn_ess .*at most 1, got 2"),
        ("algo=sft importance_sampling.mode=mask", "algo=sft .*Use importance_sampling.mode=none"),
        ("train.entropy_coef=-1", "train.entropy_coef .*at least 0, got -1"),
        ("quant=nvfp4 quant.compute_dtype=fp8", "quant.compute_dtype must be one of"),
        ("quant=mxfp4 quant.scale_rule=up", "quant.scale_rule must be one of"),
        ("quant=fp8 quant.block=64", "quant.block must be one of row, 128x128, got 64"),
        ("quant=int8 quant.block=32", "quant.block must be row or 128, got 32"),
        ("quant=int4 quant.block=64", "quant.block must be 32 or 128, got 64"),
        ("quant=int4 quant.convention=awq", "quant.convention must be one of compressed-tensors, torchao, got 'awq'"),
        ("quant=int4 quant.block=128 model.hidden_size=96", "hidden_size: INT4 .*128.* 96"),
        ("quant=fp8 quant.block=128x128 model.hidden_size=96", "hidden_size: FP8 .*128.* 96"),
        ("quant=nvfp4 quant.keep_last=1", "quant.keep_last must be .*at least 0 and below 1, got 1"),
        (
            "quant=nvfp4 quant.keep_first=0.5 quant.keep_last=0.5",
            "quant.keep_first=0.5 and quant.keep_last=0.5 .*nothing is packed.*smaller, or use quant=bf16",
        ),
        ("quant=nvfp4 quant.activations=nf4", "quant.activations must be one of none, nvfp4, mxfp4, fp8, int8, got"),
        ("rollout.activations=fp4", "rollout.activations must be null or one of none, .*got 'fp4'"),
        ("rollout.activations=fp8", "rollout.activations=fp8 .*quant=bf16 packs none.*rollout.quant"),
        ("quant=nvfp4 rollout.quant=bf16 rollout.activations=fp8", "rollout.activations=fp8 .*quant=bf16 packs none"),
        (
            "quant=nvfp4 quant.activations=mxfp4 model.hidden_size=48",
            "activations=mxfp4 .*32 .* 48; use activations=fp8",
        ),
        ("aqn=format_error aqn.format.activations=fp8", "aqn=format_error .*leave aqn.format.activations"),
        ("engine=vllm quant=nvfp4 quant.activations=fp8", "quant.activations=fp8 .*engine=vllm.*engine=hf"),
        ("engine=vllm quant=nvfp4 rollout.activations=fp8", "rollout.activations=fp8 .*engine=vllm.*engine=hf"),
        ("algo=sft quant=nvfp4 rollout.activations=fp8", "rollout.activations=fp8 .*algo=sft.*Leave"),
        ("train.kv=null", "train.kv must be one of none, fp8, int8, nvfp4, got None"),
        ("train.gradients=int8", "train.gradients must be one of bf16, fp8, got 'int8'"),
        ("quant=fp8 train.gradients=fp8", "train.gradients=fp8 .*quant.activations=none.*quant.activations=fp8, or"),
        (
            "quant=fp8 quant.block=128x128 quant.activations=fp8 model.hidden_size=128 train.gradients=fp8",
            "train.gradients=fp8 .*a scale for each row.*quant.block=row",
        ),
        ("rollout.kv=mxfp4", "rollout.kv must be null or one of none, fp8, int8, nvfp4, got 'mxfp4'"),
        ("eval.kv=fp4", "eval.kv must be null or one of none, .*got 'fp4'"),
        ("eval=lm_eval eval.kv=fp4", "eval.kv must be null or one of none, .*got 'fp4'"),
        ("rollout.kv=nvfp4 model.heads=16", "rollout.kv=nvfp4 .*16 numbers.*model=tiny, 8 wide. Use rollout.kv=fp8"),
        ("eval.kv=nvfp4 model.heads=16", "eval.kv=nvfp4 .*16 numbers.*model=tiny, 8 wide. Use eval.kv=fp8"),
        ("engine=vllm rollout.kv=nvfp4", "rollout.kv=nvfp4 .*engine=vllm writes none, fp8, int8. Use engine=hf"),
        ("engine=vllm train.kv=nvfp4", "rollout.kv=nvfp4 .*engine=vllm writes none, fp8, int8. Use engine=hf"),
        ("engine=vllm rollout.kv=fp8", "rollout.kv=fp8 and eval.kv=none .*engine=vllm has one.*eval.kv=none"),
        ("algo=sft rollout.kv=fp8", "rollout.kv=fp8 .*algo=sft.*Leave rollout.kv out"),
        ("rollout.merge=1", "rollout.merge must be .*got 1"),
        ("train.merge=fake", "train.merge must be one of none, ste, got 'fake'"),
        ("quant=nvfp4 train.merge=ste", "train.merge=ste .*rollout.merge=false.*Use rollout.merge=true"),
        ("rollout.merge=true", "rollout.merge=true .*quant=bf16.*packs none.*rollout.quant=nvfp4"),
        ("quant=nvfp4 rollout.quant=bf16 rollout.merge=true", "rollout.merge=true .*quant=bf16.*packs none"),
        ("engine=vllm quant=nvfp4 rollout.merge=true", "rollout.merge=true .*engine=vllm.*engine=hf"),
        ("lora=none rollout.merge=true", "rollout.merge=true .*lora=none .*lora=default"),
        ("quant=nvfp4 quantizer=gptq rollout.merge=true", "rollout.merge=true .*quantizer=gptq .*quantizer=rtn or mse"),
        ("algo=sft quant=nvfp4 rollout.merge=true", "rollout.merge=True .*algo=sft.*Leave rollout.merge out"),
        (
            "quant=nvfp4 rollout.merge=true train.merge=ste lora.dropout=0.1",
            "train.merge=ste .*lora.dropout=0.1 .*Use lora.dropout=0",
        ),
        (
            "quant=nvfp4 rollout.merge=true train.merge=ste eval.quant=bf16",
            "eval.quant=bf16 .*train.merge=ste .*Leave eval.quant out",
        ),
        ("rollout.lag=-1", "rollout.lag must be .*at least 0, got -1"),
        ("steps=10 rollout.lag=10", "rollout.lag=10 .*below steps=10.*smaller, or train longer"),
        ("algo=sft rollout.lag=1", "rollout.lag=1 .*algo=sft.*Leave rollout.lag out"),
        ("kl.every=-1", "kl.every must be .*at least 0, got -1"),
        ("algo=sft kl.every=5", "kl.every > 0 .*on-policy.*algo=sft"),
        ("lora=none kl.every=5", "kl.every > 0 .*lora=default.*lora=none"),
        ("engine.max_num_seqs=0", "engine.max_num_seqs must be"),
        ("eval.questions=0", "eval.questions must be"),
        ("model.dtype=int8", "model.dtype must be one of"),
        (
            "quant=nf4 model.hidden_size=32",
            r"model=tiny, hidden_size: NF4 .*64.* 32",
        ),
        ("quant=mxfp4 model.intermediate_size=40", "intermediate_size: MXFP4 .*32.* 40"),
        ("quant=mxfp8 model.intermediate_size=40", "intermediate_size: MXFP8 .*32.* 40"),
        ("model.heads=3", "model.hidden_size .*multiple of 2"),
        ("logger=wandb logger.mode=loud", "logger.mode .*online.*got 'loud'"),
        ("rollout.quant=int3", "rollout.quant must be null or one of bf16, .*got 'int3'"),
        ("engine=vllm rollout.quant=nvfp4", "rollout.quant=nvfp4 .*engine=hf"),
        ("algo=sft rollout.quant=nvfp4", "rollout.quant=nvfp4 .*algo=sft"),
        ("lora=none rollout.quant=nvfp4", "rollout.quant=nvfp4: lora=none .*lora=default"),
        (
            "eval.quant=fp6",
            "eval.quant must be null or one of bf16, fp8, int4, int8, mxfp4, mxfp8, nf4, nvfp4, got 'fp6'",
        ),
        ("lora=none eval.quant=nvfp4", "eval.quant=nvfp4: lora=none .*lora=default"),
        ("quant=nvfp4 quantizer=awq rollout.quant=bf16", "rollout.quant=bf16 .*quantizer=awq .*rtn, mse or gptq"),
        ("engine=vllm eval.quant=nvfp4", "eval.quant=nvfp4 .*engine=hf.*qerl-bench eval"),
        ("model.hidden_size=32 eval.quant=nf4", "eval.quant=nf4: model=tiny, hidden_size: NF4 .*64.* 32"),
        ("reward=random reward.p=1", "reward.p .*above 0 and below 1, got 1"),
        ("task=aime24 task.train_file=x", "task=aime24 .*train on"),
        ("task=gsm8k task.leaks=keep", "task.leaks must be one of refuse, drop"),
        ("task=gsm8k task.train.question=text", "question.*got 'text'"),
        ("task=bigmath task.train.max_question_characters=0", "max_question_characters .*got 0"),
        ("task.instruction=user", "task.instruction must be one of system, suffix, none"),
        ("task.template=raw", "task.template must be one of chat, plain"),
        ("task=word_problems task.steps=[0]", "task.steps .*12"),
        ("task=word_problems task.distractors=1", "task.distractors .*6"),
        ("task=word_problems task.max_number=1", "task.max_number .*at least 2, got 1"),
        ("task=word_problems task.procedures.guess=-1", "task.procedures"),
        ("task=reasoning_gym task.name=complex_arithmetic", "complex_arithmetic.*verifier"),
        ("task=reasoning_gym +task.options.seed=1", "task.options.*seed"),
        ("task=shape eval=none algo=sft", "task=shape .*demonstrations.*algo=sft.*on-policy"),
        ("task=shape", "task=shape .*eval=task.*use eval=none"),
        ("task=shape eval=none task.group_size=4", "task.group_size=4 .*rollout.group_size=8"),
        ("task=shape eval=none task.lengths=normal", "task.lengths .*fixed, geometric, got 'normal'"),
        ("task=shape eval=none task.prompt_tokens=0", "task.prompt_tokens .*at least 1, got 0"),
        ("task=shape eval=none task.max_completion_tokens=9", "completion_tokens=256 .*=9"),
        ("model=shape/7b model.heads=3", "model.hidden_size .*multiple of 2"),
        ("model=shape/7b model.vocabulary=100", "model.vocabulary .*at least 262"),
        ("model=shape/7b model.tied=1", "model.tied .*got 1"),
        ("model=shape/7b lora=none", "lora=none .*bfloat16"),
        ("+unknown=1", "no option unknown"),
        ("+quant.unknown=1", r"quant=bf16 has no option quant\.unknown; leave it out"),
        ("~logger", "lacks logger"),
        ("~optim.lr", r"lacks optim\.lr, .*earlier version"),
        ("name=../x", "name must be a folder name"),
        ("name=''", "name must be a folder name"),
        ("name=null", "name must be a folder name"),
        ("root=null", "root a path"),
        ("steps=10000001", "steps must be at most 10,000,000, got 10000001"),
        (
            "rollout.prompts_per_step=1001 rollout.group_size=1000",
            "1,000,000 completions, got 1,001 x 1,000",
        ),
        ("rollout.group_size=1000000000", "at most 1,000,000 completions"),
        ("eval.questions=1001 eval.samples=1000", "eval.questions x eval.samples must be at most 1,000,000"),
        ("eval.questions=null eval.samples=1000001", "eval.questions x eval.samples must be at most 1,000,000"),
        (
            "rollout.temperature=1e300",
            "rollout.temperature .*0.01 to 100, got 1e.300",
        ),
        ("eval.temperature=0.009", "eval.temperature .*0.01 to 100, got 0.009"),
        ("optim.lr=1e300", "optim.lr .*at most 1, got 1e.300.*1e-6 to 1e-3"),
        (f"optim.lr={'9' * 400}", "optim.lr must be at most 1"),
        ("task.max_completion_tokens=4097", "task.max_completion_tokens .*4096.*model=tiny, got 4097; make it smaller"),
        ("eval.max_tokens=4097", "eval.max_tokens .*4096.*model=tiny, got 4097"),
        ("lora.rank=129", "q_proj of model=tiny has 128, got 129.*lora=none"),
        ("lora.rank=385 'lora.targets=[down_proj]'", "down_proj of model=tiny has 384, got 385"),
    ],
)
def test_what_cannot_work_is_refused_in_words(words: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        build(compose(shlex.split(words)))


@pytest.mark.parametrize(
    "words",
    [
        "rollout.prompts_per_step=1000 rollout.group_size=1000",
        "rollout.temperature=0.01",
        "eval.temperature=100",
        "optim.lr=1",
        "steps=10000000",
        "task.max_completion_tokens=4096",
        "lora.rank=128",
        "lora.rank=384 'lora.targets=[down_proj]'",
    ],
)
def test_limits_are_themselves_allowed(words: str) -> None:
    experiment = build(compose(shlex.split(words)))
    key, _, value = words.split()[0].partition("=")
    assert attrgetter(key)(experiment) == float(value)


def test_supervised_training_needs_no_group() -> None:
    assert build(compose(["algo=sft", "rollout.group_size=1"])).rollout.group_size == 1


@pytest.mark.parametrize(
    ("words", "left"),
    [
        (["experiment=tiny/ranks"], "seed, model.seed, quant, lora.rank"),
        (["experiment=tiny/ranks", "++seed=1", "model.seed=0", "quant=bf16"], "lora.rank"),
        (["experiment=tiny/ranks", "seed=1", "model.seed=0", "quant=bf16", "lora.rank=8"], None),
        (["experiment=smoke"], None),
    ],
)
def test_one_run_of_a_sweep_says_that_it_is_one(
    words: list[str], left: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF_DIR), **HYDRA_DEFAULTS):
        warn_of_single_point(hydra_compose("run", words, return_hydra_config=True).hydra)
    assert [f"over {left};" in message for message in caplog.messages] == [True] * (left is not None)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["quant=nvfp4", "aqn=exp"], True),
        (["quant=nvfp4", "aqn=exp", "lora.alpha=32"], False),
        (["experiment=tiny/ranks"], False),  # whose file sets alpha
    ],
)
def test_a_sweep_over_ranks_says_that_alpha_follows(
    words: list[str], says: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        note_following_alpha([[*words, f"lora.rank={rank}"] for rank in (16, 32)])
    assert ["lora.alpha=32" in message for message in caplog.messages] == [True] * says
