"""What options mean is read from their YAML files, and words that name no option are answered with one that does."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from qerl_bench.config import build, compose
from qerl_core.checks import ConfigError
from qerl_core.metrics.definitions import definitions
from qerl_core.options.explain import AXES, SEVERAL, explain
from qerl_core.options.files import option_fields, options_of, read_option
from qerl_core.options.fingerprint import as_dict, flat
from qerl_core.options.foreign_names import OPTIONS_FOR, WITHOUT_KEY
from qerl_core.options.suggestions import keys_of_axis
from qerl_core.process.arguments import WIDTH
from qerl_core.process.installation import CONF_DIR


def test_comments_belong_to_their_fields(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(
        "# @package _global_\n# First.\n#   python a command\n# Second.\n"
        'name: x\nplain: 1  # one\n               # two\nmarked: "#"   # a sign\nbare: [a,\n  b]\n'
        "# above\nbelow: null\ngroup:  # of these\n  inner: 2.0\n  other: {a: 1}   # a map\n#  no comment\n"
    )
    content = read_option(tmp_path / "x.yaml")
    assert content.summary == "First. Second." and content.groups == {"group": "of these"}
    assert {field.key: (yaml.safe_load(field.default), field.meaning) for field in content.fields} == {
        "name": ("x", ""),
        "plain": (1, "one"),
        "marked": ("#", "a sign"),
        "bare": (["a", "b"], ""),
        "below": (None, "above"),
        "group.inner": (2.0, ""),
        "group.other": ({"a": 1}, "a map"),
    }
    assert option_fields([tmp_path], "", "x")["group.inner"].meaning == "of these"


@pytest.mark.parametrize("axis", [axis for axis in AXES if axis not in SEVERAL])
def test_every_value_of_every_option_is_explained(axis: str) -> None:
    options = options_of([CONF_DIR], axis)
    fields = [(option, *item) for option in options for item in option_fields([CONF_DIR], axis, option).items()]
    unexplained = [(option, key) for option, key, field in fields if not field.meaning]
    assert len(fields) >= len(options) and [one for one in unexplained if one[1].rpartition(".")[2] != "name"] == []


def test_all_keys_of_a_config_are_known() -> None:
    """The reader finds the same values as Hydra: own ones, those of a preset's base, and those of a nested option."""
    for words in (["model=qwen3-4b", "task=gsm8k"], ["aqn=layerwise", "quant=nvfp4", "quantizer=awq", "algo=dapo"]):
        values = {key for key in flat(as_dict(compose(words))) if "_target_" not in key}
        root = read_option(CONF_DIR / "run.yaml")
        chosen = dict(root.bases) | dict(word.split("=") for word in words)
        known = {field.key for field in root.fields}
        for axis in set(AXES) - set(SEVERAL):
            known |= {f"{axis}.{key}" for key in option_fields([CONF_DIR], axis, chosen[axis])}
        assert {re.sub(r"^(model.template)\..*", r"\1", key) for key in values} == known


def test_explain_is_about_the_chosen_options_and_needs_no_torch() -> None:
    script = (
        "import sys; from qerl_bench.__main__ import main\n"
        "assert main(['run', '--explain', *sys.argv[1:]]) == 0 and 'torch' not in sys.modules"
    )
    words = ["aqn.sigma_start", "aqn=exp", "aqn.sigma_start=0.02", "optim."]
    done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, check=True)
    assert "aqn.sigma_start = 0.02   (aqn=exp, default 1.0e-2)\n    standard deviation" in done.stdout
    assert "optim.lr = 0.0003   (conf/run.yaml, default ${model.lr})\n    AdamW" in done.stdout
    assert done.stdout.count("\noptim.") == 7


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["aqn", "aqn=exp"], ("aqn = exp;", "  constant ", "aqn.stages = 10   (aqn=exp)")),
        (["aqn.", "aqn=layerwise", "quant=nvfp4", "aqn@aqn.schedule=constant"], ("aqn.schedule.level = 1.0e-2",)),
        (
            ["aqn.stages"],
            ("aqn=none has no option", "(aqn=cosine|linear|log)", "(aqn=exp|exp_paper|exp_repo|exp_surogate|matched)"),
        ),
        (["steps", "experiment=smoke"], ("steps = 6   (conf/run.yaml, default 150)",)),
        (["task.eval.marker", "task=gsm8k"], ('task.eval.marker = "####"', "separates")),
        (["task=shape", "eval=none"], ("task = shape;", "eval = none;", "task.lengths = fixed")),
        (["experiment"], ("experiment = null;", "  tiny/main ")),
        ([], ("usage: ", "  quant       bf16 fp8", "--explain KEY")),
    ],
)
def test_what_is_explained(words: list[str], says: tuple[str, ...]) -> None:
    text = explain(words)
    assert all(one in text for one in says)
    assert max(map(len, text.splitlines())) <= WIDTH


# --- words that name no option ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            "aqn=constant aqn.sigma=1",
            r"no option aqn.sigma\. Did you mean aqn.level\?",
        ),
        ("aqn.sigma=1", r"Did you mean aqn.level \(of aqn=constant\) or aqn.sigma_start \(of aqn=.*exp"),
        ("beta=0.1", r"no option beta\. Did you mean kl.coef\?"),  # as TRL and others call it
        ("algo.num_generations=4", r"Did you mean rollout.group_size\?"),
        ("seeds=0", r"Did you mean seed\?"),
        ("resume=true", r"no option resume\. The same command continues"),
        ("train.resume_from_checkpoint=x", r"The same command continues"),
        ("push_to_hub=true", r"qerl-bench publish"),
        ("max_seq_length=9", r"Did you mean task.max_completion_tokens\?"),
        ("logging_steps=5", r"Every step is logged"),
        ("rollout.top_p=0.9", r"whole distribution.*eval.top_p"),
        ("wandb=true", r"Did you mean logger\?"),
        ("task.train_path=x", r"Did you mean task.train_file"),
        ("algo=GRPO", r"Did you mean algo=grpo\?"),
        ("aqn=on", r"there is no aqn=on\. Choose aqn=constant"),
        ("gpus=2", r"no option gpus\. torchrun .*--nproc-per-node"),
        ("num_gpus=2", r"torchrun"),
        ("bf16=true", r"Did you mean model.dtype\?"),
        ("fp16=true", r"Did you mean model.dtype\?"),
        ("gradient_checkpointing=true", r"Did you mean train.recompute\?"),
        ("max_steps=3", r"Did you mean steps\?"),
        ("num_train_epochs=3", r"Did you mean steps\?"),
        ("num_generations=3", r"Did you mean rollout.group_size\?"),
        ("output_dir=x", r"Did you mean root"),
        ("lora=16", r"A number is lora.rank=16\. Choose lora=default\|none"),
        ("aqn=exp aqn.sigma_strat=1", r"aqn=exp has no option .* Did you mean aqn.sigma_start\?"),
        ("aqn.level=1", r"aqn=none has no option aqn.level, which belongs to aqn=constant$"),
        ("aqn=exp aqn.level=1", r"belongs to aqn=constant; it has aqn.sigma_start, aqn.sigma_end, aqn.stages"),
        ("eval=paper task=gsm8k eval.sample=3", r"eval=paper .*Did you mean eval.samples\?"),
        ("task=gsm8k task.train.revisio=x", r"Did you mean task.train.revision\?"),
        ("lr=1", r"Did you mean model.lr or optim.lr\?"),
        ("stages=3", r"aqn.stages belongs to aqn=cosine\|exp\|"),
        ("optm.lr=1", r"Did you mean optim.lr\?"),
        ("stes=3", r"Did you mean steps\?"),
        ("optim={lrr:1}", r"Did you mean optim.lr\?"),
        ("quant=nvfp", r"Did you mean quant=nvfp4\? Choose quant=bf16\|fp8\|int4\|int8\|mxfp4\|mxfp8\|nf4\|nvfp4;"),
        ("model=qwen3-4c", r"there is no model=qwen3-4c. Did you mean model=qwen3-4b .* All of them: --explain model"),
        ("experiment=tiny/rank", r"Did you mean experiment=tiny/ranks"),
        ("recipe=shipped", "renamed to recipe=as_released"),
        ("seed=0,1", r"seed=0,1 has several values: -m .* seed=\[0,1\]"),
        ("steps=[1", r"cannot read steps=\[1: "),
        ("name=läufe/ü", r"cannot read name=läufe/ü: .*quotes"),
    ],
)
def test_a_word_that_names_no_option_is_answered_with_one_that_does(words: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        compose(words.split())


def test_keys_of_launchers_are_explained_elsewhere() -> None:
    with pytest.raises(ConfigError, match=r"hydra\.launcher\.slots belongs to .* docs/runs\.md"):
        explain(["hydra.launcher.slots"])


def test_names_of_other_libraries_lead_to_options_that_exist_and_are_none_themselves() -> None:
    inside = {key for axis in AXES for key in keys_of_axis(axis, [CONF_DIR])}
    keys = {*inside, *(field.key for field in read_option(CONF_DIR / "run.yaml").fields), *AXES}
    assert {ours for names in OPTIONS_FOR.values() for ours in names} <= keys
    assert not {*OPTIONS_FOR, *WITHOUT_KEY} & keys and not OPTIONS_FOR.keys() & WITHOUT_KEY.keys()


def test_the_name_of_an_option_is_explained_with_its_values() -> None:
    said = explain(["constant"])
    assert said.startswith("aqn=constant  ") and "\n\naqn.level = 1.0e-2\n    " in said
    assert re.findall(r"^(\w+=none) ", explain(["none"]), flags=re.MULTILINE) == [
        "aqn=none",
        "lora=none",
        "eval=none",
        "recipe=none",
    ]


def test_the_suggested_option_of_another_folder(tmp_path: Path) -> None:
    (tmp_path / "aqn").mkdir()
    (tmp_path / "aqn" / "mine.yaml").write_text(
        "_target_: qerl_bench.aqn.none.NoNoise\nname: mine\nwidth: 1  # of it\n"
    )
    search = f"hydra.searchpath=[{tmp_path}]"
    with pytest.raises(ConfigError, match=r"aqn=none has no option aqn.width, which belongs to aqn=mine$"):
        compose([search, "aqn.width=2"])
    assert "aqn.width = 1   (aqn=mine)\n    of it" in explain(["aqn.width", "aqn=mine", search])


# --- short runs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "warmup"),
    [([], 5), (["steps=6"], 5), (["steps=3"], 2), (["steps=1"], 0), (["steps=3", "optim.warmup_steps=1"], 1)],
)
def test_the_default_warm_up_fits_short_runs(words: list[str], warmup: int) -> None:
    assert build(compose(words)).optim.warmup_steps == warmup


@pytest.mark.parametrize("key", ["mismatch/kl", "grad_norm", "mismatch", "entropy"])
def test_metrics_are_explained_too(key: str) -> None:
    said = " ".join(explain([key]).split())
    known = {name: text for name, text in definitions().items() if name == key or name.startswith(f"{key}/")}
    assert known
    for name, text in known.items():
        assert name in said and " ".join(text.partition(": ")[2].split()) in said


def test_what_is_neither_option_nor_metric_is_refused() -> None:
    with pytest.raises(ConfigError, match="mismatch/kx"):
        explain(["mismatch/kx"])
