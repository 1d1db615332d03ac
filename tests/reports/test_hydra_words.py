"""Hydra's own options, on the command line and in experiment files: obeyed, or refused with the word to type."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from qerl_bench.sweep.check import check_single
from qerl_core.checks import ConfigError
from qerl_core.options.composer import Composer
from qerl_core.options.user_options import search_path
from qerl_core.process.arguments import output_folder

GLOBAL = "# @package _global_\n"


def experiment(folder: Path, text: str) -> list[str]:
    """The words that choose an experiment file with this content."""
    file = folder / "experiment/mine.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(GLOBAL + text)
    return [*search_path([folder]), "experiment=mine"]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "qerl_bench", "run", *words], capture_output=True, text=True)


def refusal(words: Sequence[str]) -> str:
    with pytest.raises(ConfigError) as caught:
        check_single([*words])
    return str(caught.value)


# --- an experiment file that chooses a launcher or sweeper was passed over without a word: ----------------------------
# https://github.com/facebookresearch/hydra/issues/3231 and https://github.com/facebookresearch/hydra/issues/2946


@pytest.mark.parametrize(
    ("part", "chosen", "usual"), [("launcher", "slurm", "process"), ("sweeper", "basic", "unchecked")]
)
def test_an_experiment_file_chooses_launcher_and_sweeper(tmp_path: Path, part: str, chosen: str, usual: str) -> None:
    words = experiment(tmp_path, f"defaults:\n  - override /hydra/{part}: {chosen}\n")

    def choice(words: list[str]) -> object:
        return Composer().chosen(words)[1].choices[f"hydra/{part}"]

    assert choice([]) == choice(["experiment=smoke"]) == usual
    assert choice(words) == chosen
    assert choice([*words, f"hydra/{part}={usual}"]) == usual, "the command line has the last word"


# --- hydra.run.dir put run.log alone elsewhere: https://github.com/facebookresearch/hydra/issues/284 ------------------


def test_hydra_does_not_part_a_run_from_its_log() -> None:
    """`status` reads run.log; a folder of Hydra's own is no part of what a run seals."""
    file = "hydra.job_logging.handlers.file.filename"
    parting = [f"hydra.output_subdir={folder}" for folder in ("x", "/x", ".hydra")] + [f"{file}=/x", f"{file}=x.log"]
    for word in (*parting, *(f"hydra/job_logging={one}" for one in ("none", "disabled", "stdout"))):
        assert "root=DIR says" in refusal(["experiment=smoke", word]), word


@pytest.mark.parametrize("root", ["~/runs", "~me/runs", "$HOME/runs", "runs/$USER"])
def test_a_file_is_no_shell_and_makes_no_folder_of_its_signs(tmp_path: Path, root: str) -> None:
    assert f"root={root}" in refusal(experiment(tmp_path, f"root: {root}\n"))
    with pytest.raises(argparse.ArgumentTypeError, match="whole path"):
        output_folder("~/pages")


@pytest.mark.parametrize("sign", ["", "+", "++", "~"])
def test_the_grid_of_a_file_and_a_pickle_are_no_words_of_the_command_line(sign: str) -> None:
    for given in (".seed='0,1'", "={seed:'0,1'}", "=null"):
        for words in ([f"{sign}hydra.sweeper.params{given}"], ["-m", f"{sign}hydra.sweeper.params{given}"]):
            assert "-m seed=0,1" in refusal(words)
    assert "reads a pickle" in refusal(["--experimental-rerun", "config.pickle"])


@pytest.mark.parametrize("words", ["seed=0 seed=1", "quant=bf16 quant=nvfp4", "++seed=0 seed=1", "-m seed=0 seed=1"])
def test_words_that_a_shell_has_made_of_braces_are_counted(words: str, caplog: pytest.LogCaptureFixture) -> None:
    """`-m seed={0,1}` of bash is one run and no sweep."""
    check_single([*words.split(), "experiment=smoke", "steps=1", "steps=1"])
    (said,) = caplog.messages
    assert said.endswith(f"is given 2 times, and {words.split()[-1]} alone counts")


@pytest.mark.parametrize("key", ["run.dir", "sweep.dir", "sweep.subdir", "job.chdir"])
def test_hydra_does_not_part_a_run_from_its_files(tmp_path: Path, key: str) -> None:
    value = "true" if key == "job.chdir" else str(tmp_path / "elsewhere")
    node, name = key.split(".")
    asked = [[f"hydra.{key}={value}"], experiment(tmp_path, f"hydra:\n  {node}:\n    {name}: {value}\n")]
    for words in asked:
        said = refusal(["experiment=smoke", *words] if len(words) == 1 else words)
        assert f"hydra.{key}=" in said and "root=DIR" in said
    done = run("-m", *asked[0], "seed=0,1", "experiment=smoke", f"root={tmp_path}")
    assert done.returncode == 2 and f"hydra.{key}=" in done.stderr and not (tmp_path / "elsewhere").exists()


def test_a_run_that_a_file_makes_a_sweep_would_start_itself_for_ever(tmp_path: Path) -> None:
    """Each run of the sweep read the file again, and was another sweep."""
    words = ["experiment=smoke", "hydra.mode=MULTIRUN"], experiment(tmp_path, "hydra: {mode: MULTIRUN}\n")
    for one in words:
        assert "add -m" in refusal(one)
    done = run("-m", *words[1], "seed=0,1", f"root={tmp_path}")
    assert done.returncode == 2 and "hydra.mode=MULTIRUN" in done.stderr and not (tmp_path / "runs").exists()
    assert check_single(["experiment=smoke", "hydra.mode=RUN", f"root={tmp_path}"]) is not None


# --- sweeps without values: https://github.com/facebookresearch/hydra/issues/1513, .../2237 ---------------------------

WITHOUT_VALUES = {
    "optim.lr=interval(1e-5,1e-4)": "-m optim.lr=1e-05,0.0001",
    "aqn=glob(x*)": "no option is called so",
    "seed=glob(*)": "no option is called so",
    "seed=range(0)": "empty",
}


@pytest.mark.parametrize("word", WITHOUT_VALUES)
def test_a_sweep_without_values_names_its_word(tmp_path: Path, word: str) -> None:
    done = run("-m", word, "quant=bf16,nvfp4", "experiment=smoke", f"root={tmp_path}")
    said = " ".join(done.stderr.split())
    assert done.returncode == 2 and f"{word} " in said and WITHOUT_VALUES[word] in said
    assert not any(tmp_path.iterdir())


def test_several_values_of_one_run_get_the_word_to_type() -> None:
    for word, said in {
        "seed=range(3,5)": "one is seed=3",
        "optim.lr=interval(1e-5,1e-4)": "-m optim.lr=1e-05,0.0001",
        "aqn=glob(*)": "-m runs them all",
    }.items():
        assert said in refusal([word])


@pytest.mark.parametrize("flag", [[], ["-m"]])
def test_the_config_of_a_sweep_gets_the_words_of_its_first_run(flag: list[str]) -> None:
    said = refusal([*flag, "--cfg", "job", "seed=3,4", "quant=nvfp4", "optim.lr=choice(1e-5,2e-5)"])
    assert said.endswith("--cfg job seed=3 quant=nvfp4 optim.lr=1e-05")


# --- options of another launcher, and of none -------------------------------------------------------------------------

LAUNCHERS = {
    "hydra.launcher.dry_run=true": "hydra/launcher=slurm",
    "hydra.launcher.slot=2": "hydra.launcher.slots",
    "hydra.launcher.gres=2": "docs/cluster.md",
    "hydra.runn.dir=x": "--cfg hydra",
    "dry_run=true": "hydra.launcher.dry_run=true",
}


@pytest.mark.parametrize("word", LAUNCHERS)
def test_an_option_of_a_launcher_is_told_where_it_belongs(word: str) -> None:
    assert word.partition("=")[0] in (said := refusal([word])) and LAUNCHERS[word] in said
