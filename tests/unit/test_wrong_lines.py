"""Lines that somebody typed wrongly: each is answered in words with a way on, before PyTorch is imported."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hydra_plugins.process_launcher.launcher import ProcessLauncher
from hydra_plugins.slurm_launcher.launcher import SlurmLauncher
from qerl_bench.__main__ import main
from qerl_bench.commands.probe import parser as probe_options
from qerl_bench.conduct.draft import parser as draft_options
from qerl_bench.config import compose
from qerl_bench.sweep.check import check_points
from qerl_core.checks import ConfigError
from qerl_core.options.files import plain_keys
from qerl_core.process.arguments import KeyValueParser, whole
from qerl_core.process.installation import CONF_DIR

RUNS = Path(__file__).parents[1] / "assets" / "runs"
FILE = "notes.md"  # a file of another kind, with what YAML does not read
DRAFT = "study contrast=aqn=none,exp minutes=9"
WRONG = {  # line -> what is said
    "model=tiny steps=3": "Did you mean run model=tiny steps=3?",
    "probe": "model=ORG/NAME",
    "probe task=arithmetic": "model=ORG/NAME",
    "probe model=tiny task=arithmetic formats=nvfp5": "Did you mean quant=nvfp4?",
    "probe model=./none task=arithmetic": "model.id=./none: there is no such folder",
    f"probe model=tiny task=arithmetic out={FILE}": f"{FILE} is a file; give a folder",
    f"collect . out={FILE}": f"{FILE} is a file; give a folder",
    f"report . out={FILE}": f"{FILE} is a file; give a folder",
    f"publish . out={FILE}": f"{FILE} is a file; give a folder",
    f"study {FILE}": f"{FILE} is no study.*line 2.*study init=FOLDER",
    f"gates {FILE}": f"{FILE} is no study.*line 2.*study init=FOLDER",
    "collect runs=none": "no option runs: none stands alone",
    f"collect . out={FILE}/x": f"cannot write to {FILE}/x: .*{FILE} is not a writable folder.*give another folder",
    "collect . out=": "--out: empty; give a folder",
    "collect . out=a out=b": "out=a and out=b set one option: give it once",
    "compare a b mixed_cod=true": "Did you mean mixed_code=true?",
    "compare a b mixed_code=maybe": "mixed_code must be true or false, got 'maybe'",
    "compare none none": "no run matches none: give a run",
    "verdicts none": "none is not a folder: pass a study",
    f"verdicts {FILE}": f"{FILE} is not a folder: pass a study",
    "verdicts . out=new": "no study in .: a study is made by qerl-bench collect",
    f"verdicts . out={FILE}/x": f"cannot write to {FILE}/x.*give another folder",
    f"publish . out={FILE}/x": f"cannot write to {FILE}/x.*give another folder",
    f"{DRAFT} model=tiny init={FILE}": f"{FILE} is a file; give a folder",
    f"{DRAFT} model=tiny init=": "--init: empty; give a folder",
    f"{DRAFT} model=tiny init=new/": "run_minutes=6, or runs=FOLDER",
    f"{DRAFT} model=tiny init=new run_minute=1": "no option run_minute. Did you mean run_minutes=1?",
    f"{DRAFT} model=tiny --init new run_minutes=ten": "invalid float value: 'ten'",
    f"{DRAFT} model=./none.gguf init=new run_minutes=1": "none.gguf: there is no such file.*Give",
    f"{DRAFT} model=tiny init=new contrast=quant=bf16,nvfp4": "set one option: give it once",
    "study init=new model=tiny minutes=9 run_minutes=1 contrast=aqn=none,none": "KEY=FIRST,OTHER, each once",
    "probe model=tiny task=arithmetic question=3": "no option question. Did you mean questions=3?",
    f"probe model=tiny task=arithmetic out={FILE}/x": f"cannot write to {FILE}/x.*give another folder",
    f"probe model=tiny task=arithmetic root={FILE}": f"cannot write to {FILE}/probes/.*give another folder, out=DIR",
    f"export {FILE} out=new": f"{FILE} is not a run: it has no config.yaml",
    f"export model=tiny quant=nvfp4 out={FILE}/x": f"cannot write to out={FILE}/x: .*choose another folder",
    "export": "model= and out= must be given; usage",
    "export model=./none quant=nvfp4 out=new": "model.id=./none: there is no such folder",
    "export model=tiny quant=bf16 out=new": "quant=bf16 packs nothing.*quant=nvfp4",
    f"export model=tiny quant=nvfp4 out={FILE}": f"out={FILE} exists and is not an empty folder",
}
PROGRAM = """
import sys
from qerl_bench.__main__ import main
try:
    main(sys.argv[1:])
finally:
    print("torch" in sys.modules)
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / FILE).write_text("# Notes\na: b: c\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_line_is_answered_with_the_way_on(line: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(line.split())
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    assert re.search(WRONG[line], whole(capsys.readouterr().err))
    assert [*place.iterdir()] == [place / FILE]


def test_the_folder_that_no_word_names_is_checked_too(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "report").write_text("")
    with pytest.raises(SystemExit):
        main(["report", "."])
    assert "report is a file; give a folder" in capsys.readouterr().err


def test_metrics_that_no_run_has_and_runs_that_no_claim_is_about_write_nothing(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, message in (
        (["collect", str(RUNS), "out=new", "metrics=rewrd,study"], "no run has rewrd: metrics= takes names"),
        (["verdicts", "packed", "out=new"], "^error: packed has no verdict: .*qerl-bench claims"),
    ):
        main(["collect", str(RUNS), "out=packed", "metrics=reward/mean"])
        with pytest.raises(SystemExit, match=r"^2$"):
            main(words)
        assert re.search(message, whole(capsys.readouterr().err)) and not (place / "new").exists()


EMPTY = "run -m experiment=smoke seed=range(0)"  # a sweep without a point
WITHOUT_TORCH = WRONG | {EMPTY: "no point.*seed=0,1,2"}
GYM, SLURM, TWO = "run task=reasoning_gym", "run hydra/launcher=slurm", "-m seed=0,1"
KEYS = {  # of options that a line does not have -> what is said
    f"{GYM} task.options.n_people=5": r"task.options.n_people is not set.* \+task.options.n_people=VALUE",
    f"{GYM} task.options={{n_people:5}}": r"task.options.* \+task.options.KEYWORD=VALUE",
    f"{GYM} task.options.n_people=5 {TWO}": r" \+task.options.n_people=VALUE",
    "run task=gsm8k task.options.n_people=5": "has no option task.options.n_people",
    "run model=tiny model.template.a=1": "has no option model.template.a",
    "run model=llama-3.1-8b model.template.a=1": r" \+model.template.a=VALUE",
    f"{SLURM} hydra.launcher.additional.reservation=x {TWO}": r" \+hydra.launcher.additional.reservation=VALUE",
    f"run optm.lr=1 {TWO}": "Did you mean optim.lr?",
    f"run quant=nvfp5 {TWO}": "Did you mean quant=nvfp4?",
    f"run hydra/launcher=procss {TWO}": "hydra/launcher/procss.*process.*slurm",
}


@pytest.mark.parametrize("line", KEYS)
def test_what_a_key_would_be_is_said_for_a_run_and_a_sweep(line: str, place: Path) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, *line.split()], capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout.strip() == "False", done.stderr
    assert re.search(KEYS[line], whole(done.stderr))
    assert [*place.iterdir()] == [place / FILE]


@pytest.mark.parametrize(("parser", "shared"), [(probe_options(), set()), (draft_options(), {"model"})])
def test_no_option_of_a_run_is_near_one_of_a_command_that_takes_both(parser: KeyValueParser, shared: set[str]) -> None:
    keys = {*plain_keys(), *(folder.name for folder in CONF_DIR.iterdir() if folder.is_dir())}
    assert {key for key in keys if parser.is_own(f"{key}=1")} == shared
    assert not parser.is_own("task.answer_format=boxed")


NEW = "model=tiny quant=nvfp4 out=new"
DESIGN = """
common: [model=tiny_untrained, task=even_characters, device=cuda]
bases: 1
seeds: 1
arms: {a: {tier: 1, words: []}}
probe: {questions: 4, samples: 2}
dose: {rise: 0.1, prompts: 2, draws: 1}
"""
NO_CARD = {  # lines that would need one -> what is said
    "run -m experiment=smoke seed=0,1 device=cuda": "seed=0 device=cuda: device=cuda.*no GPU.*use device=cpu",
    "run -m experiment=smoke seed=0,1 device=cuda:7": "auto, cpu, cuda, got 'cuda:7'.*use device=cpu",
    f"export {NEW} device=cuda": "device=cuda.*no GPU.*use device=cpu",
    f"export {NEW} device=cuda:7": "auto, cpu, cuda, got 'cuda:7'.*use device=cpu",
    "study design.yaml with_changes=true": "device=cuda.*no GPU.*use device=cpu",
}


@pytest.mark.parametrize("line", NO_CARD)
def test_nothing_is_loaded_for_a_card_that_is_not_there(line: str, place: Path) -> None:
    if "design" in line:
        (place / "design.yaml").write_text(DESIGN)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *line.split()],
        capture_output=True,
        text=True,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 2 and done.stdout.strip() == "False", done.stderr
    assert re.search(NO_CARD[line], whole(done.stderr))
    assert not {"runs", "new", "probes"} & {path.name for path in place.iterdir()}


def test_the_cards_of_another_machine_are_asked_for_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    words = ["model=tiny_untrained", "task=even_characters", "device=cuda"]
    assert len(check_points([words], here=False)) == 1
    assert ProcessLauncher.here and not SlurmLauncher.here
    with pytest.raises(ConfigError, match="device=cuda"):
        check_points([words])


@pytest.mark.parametrize(
    "line", ["export", "probe model=./none task=arithmetic", f"export model=tiny out={FILE}", EMPTY]
)
def test_nothing_waits_for_torch(line: str, place: Path) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, *line.split()], capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout.strip() == "False", done.stderr
    assert re.search(WITHOUT_TORCH.get(line, "exists and is not"), whole(done.stderr))


def test_the_size_of_a_group_is_found_under_another_name() -> None:
    with pytest.raises(ConfigError, match=r"rollout.group_size"):
        compose(["rollout.completions_per_prompt=4"])
