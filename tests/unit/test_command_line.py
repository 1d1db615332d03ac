"""`qerl-bench` and its words: commands, key=value, names of earlier versions, and the list of runs."""

from __future__ import annotations

import fcntl
import json
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hydra.errors import HydraException
from omegaconf import OmegaConf

from qerl_bench import __version__
from qerl_bench.__main__ import COMMANDS, GROUPS, USAGE, main
from qerl_bench.config import build, compose
from qerl_bench.sweep.check import check_point, check_points
from qerl_core.checks import ConfigError, TrainingStopped
from qerl_core.exits import exit_in_words, explain
from qerl_core.options.composer import Composer
from qerl_core.options.fingerprint import as_dict, flat
from qerl_core.options.renamed_keys import RENAMED, RENAMED_VALUES, new_name, outdated
from qerl_core.process.arguments import WIDTH, KeyValueParser, whole, wrap_lines
from qerl_core.rundir.finished_run import stored_config
from qerl_core.rundir.run_checks import RunDamaged, check_run_dir
from qerl_core.sweeps.points import with_swept_axes
from qerl_studies.runs.load import load_run
from tests.scripts import script

ROOT = Path(__file__).parents[2]
RUNS = ROOT / "tests" / "assets" / "runs"


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0 and main(["--version"]) == 0
    printed = capsys.readouterr().out
    assert all(f"  {name} " in printed for name in COMMANDS) and printed.endswith(f"{__version__}\n")
    assert main([]) == 2 and main(["colect"]) == 2
    assert "Did you mean collect?" in capsys.readouterr().err


def test_each_command_stands_in_one_of_four_groups() -> None:
    assert [*GROUPS] == ["train", "look", "decide", "share"]
    assert sorted(name for names in GROUPS.values() for name in names) == sorted(COMMANDS)
    for group, names in GROUPS.items():
        listed = USAGE.split(f"\n{group}:\n")[1].split("\n\n")[0].splitlines()
        assert [line.split()[0] for line in listed] == [*names]


PLACES = [*ROOT.glob("analysis/*.py"), *ROOT.glob("studies/*/*.py")]
SCRIPTS = sorted(path.relative_to(ROOT).as_posix() for path in PLACES)


@pytest.mark.parametrize("name", [*COMMANDS, *SCRIPTS])
def test_every_command_and_script_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It says what it is for and how it is called, within the columns of a terminal, and nothing else."""
    try:
        if name in COMMANDS:
            main([name, "--help"])
        if name in SCRIPTS:
            script(name).main(["--help"])
    except SystemExit as end:  # argparse
        assert end.code == 0
    said = capsys.readouterr()
    first, *rest = said.out.splitlines()
    assert first.startswith("usage: ") and len(rest) > 5 and said.err == "" and "\x1b" not in said.out
    assert max(map(len, said.out.splitlines())) <= WIDTH


@pytest.mark.parametrize(
    "words",
    [["--help"], ["--version"], ["nonsense"], ["eval", "-h"], ["run", "-h"], ["run", "--explain", "lora.rank"]],
)
def test_of_several_processes_the_first_tells_what_needs_no_run(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "2")
    said, codes = [], []
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        codes.append(main(words))
        said.append("".join(capsys.readouterr()))
    assert len(said[0]) > 3 and said[1] == "" and codes == [2 if words == ["nonsense"] else 0] * 2


def test_bad_input_of_any_command_ends_with_a_message_and_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["eval"], ["score"], ["status", "nowhere"], ["claims", "nowhere"], ["export", "quant=nvfp4"]):
        with pytest.raises(SystemExit) as end:
            main(words)
        assert end.value.code == 2 and capsys.readouterr().err.startswith("error: ")


def test_a_task_without_demonstrations_is_refused_before_a_supervised_run(tmp_path: Path) -> None:
    (train := tmp_path / "train.jsonl").write_text('{"prompt": "Half of 2?", "solution": "1"}\n')
    (test := tmp_path / "test.jsonl").write_text('{"problem": "Half of 4?", "answer": "2"}\n')
    files = f"task.train_file={train}", f"task.eval_file={test}"
    with pytest.raises(ConfigError, match="task=dapo_math has no worked solutions to imitate"):
        check_point(Composer(), [f"root={tmp_path}", "task=dapo_math", *files, "algo=sft"])
    assert not (tmp_path / "runs").exists()


def test_a_damaged_run_is_left_out_of_a_sweep_and_refused_alone(tmp_path: Path) -> None:
    """Of two points one has a folder with a checkpoint whose manifest is gone."""
    words = [f"root={tmp_path}", "experiment=smoke"]
    broken = tmp_path / "runs" / "b"
    (broken / "checkpoints" / "step_000003").mkdir(parents=True)
    good, damaged = check_points([[*words, "name=a"], [*words, "name=b"]])
    assert good.damage is None and damaged.damage is not None and not damaged.finished
    assert f"checkpoint {broken}/checkpoints/step_000003 is incomplete" in damaged.damage
    with pytest.raises(RunDamaged, match="is incomplete"):
        check_point(Composer(), damaged.overrides)


@pytest.mark.parametrize(
    ("words", "composed"),
    [
        ("-m aqn=exp,linear aqn.stages=5 steps=3", "-m aqn=exp,linear aqn.stages=choice(5) steps=3"),
        ("-m aqn=exp,linear aqn.stages=5,7", "-m aqn=exp,linear aqn.stages=5,7"),
        ("-m aqn=exp aqn.stages=5 lora.rank=8,16", "-m aqn=exp aqn.stages=5 lora.rank=8,16"),
        ("-m eval=task,quick eval.tasks=", "-m eval=task,quick eval.tasks="),
        ("-m model=hub,tiny model.template={a:1,b:[2]}", "-m model=hub,tiny model.template=choice({a:1,b:[2]})"),
    ],
)
def test_values_of_an_axis_that_is_swept(words: str, composed: str) -> None:
    assert with_swept_axes(words.split()) == composed.split()


def parser() -> KeyValueParser:
    made = KeyValueParser("text")
    made.add_argument("runs", nargs="+")
    made.add_argument("--out", default="figures")
    made.add_argument("--metrics", nargs="+")
    made.add_argument("--mixed-code", action="store_true")
    return made


def test_options_are_key_value_words_or_flags() -> None:
    for words in (
        ["a", "--out", "x=1", "--metrics", "m", "n", "--mixed-code"],
        ["out=x=1", "metrics=m,n", "mixed_code=true", "a"],
        ["a", "out=x=1", "metrics=m,n", "--mixed-code"],
        ["metrics=m,n", "a", "--mixed-code", "--out", "x=1"],
    ):
        assert vars(parser().parse_args(words)) == {
            "runs": ["a"],
            "out": "x=1",
            "metrics": ["m", "n"],
            "mixed_code": True,
        }
    assert parser().parse_args(["a", "mixed_code=false"]).mixed_code is False
    assert parser().parse_args(["seed=*", "--mixed-code"]).runs == ["seed=*"]
    nested = parser().parse_args(["a", "metrics=m=[[3,4],[5,6]],n={k:1,l:2},o"])
    assert nested.metrics == ["m=[[3,4],[5,6]]", "n={k:1,l:2}", "o"]


@pytest.mark.parametrize(("word", "says"), [("ot=x", "no option ot"), ("mixed_code=1", "mixed_code must be true")])
def test_a_wrong_word_is_refused(word: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["a", word])
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--experiment=smoke", "--experiment=smoke: no such flag. .* experiment=smoke;"),
        ("--experiment smoke", "--experiment: no such flag. .* experiment=VALUE;"),
        ("--config foo.yaml", "--config: no such flag. .* experiment=NAME.*--config-dir"),
        ("--multi seed=0,1", "--multi: no such flag"),
        ("--resume", "--resume: no such flag. The same command continues"),
        ("--lr=1e-5 -m", "--lr=1e-5: no such flag. .* lr=1e-5;"),
    ],
)
def test_flags_are_not_abbreviated(words: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["run", *words.split()])
    assert end.value.code == 2 and re.search(says, whole(capsys.readouterr().err), re.DOTALL)


# Commands in a folder with `runs`, in this order, and the one or two last lines of what each prints.
RESULTS = {
    "status": r"8 runs, 8 done\ncost of the finished runs: .*",
    "status json=true": r" \}\n\]",
    "collect runs out=study": r"8 runs, 0 of them unfinished, \d+ numbers: study\ncost of the finished runs: .*",
    "claims runs": r"figures/claims\.md\nfigures/claims\.svg",
    "report runs": r"report/index\.html  1 study, 8 runs, 0 pages of samples",
    "compare runs/bf16-none-* runs/nvfp4-none-*": r"[a-z_]+/[^\n]+\n\nwhat a number is: qerl-bench run --explain NAME",
    "publish runs out=published": r"\nNothing was sent\. To send these files: .*",
    "check published": r"published: 8 runs of 4 settings, complete",
    "matrix study": r"figures/matrix\.md",
}


@pytest.mark.slow
def test_stdout_has_the_result_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(RUNS, tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("QERL_ROOT", raising=False)
    for words, ends in RESULTS.items():
        assert main(words.split()) == 0
        said = capsys.readouterr()
        assert re.search(rf"(^|\n){ends}\s*$", said.out), (words, said.out[-500:])
        assert said.err == "", words


# --- earlier names ---------------------------------------------------------------------------------------------------


def test_new_names_exist_and_old_ones_do_not() -> None:
    engine, algo, quantizer = "engine=vllm", "algo=dapo", "quantizer=mse"
    known: set[str] = set()
    for words in ([], [engine], [algo, quantizer, "quant=nvfp4"]):
        config = as_dict(compose(words))
        known |= {*config, *flat(config)}
    assert known.issuperset(RENAMED.values()) and not known & {*RENAMED}


@pytest.mark.parametrize(
    ("word", "new"),
    [
        ("inject.site=old", "noise.site"),
        ("inject.cadence=run", "noise.cadence"),
        ("offpolicy.level=token", "importance_sampling.level"),
        ("optim.updates=4", "train.updates_per_batch"),
        ("rollout.prompts=4", "rollout.prompts_per_step"),
        ("recipe=shipped", "recipe=as_released"),
        ("noise.site=sampler", "noise.site=rollout"),
        ("+inject.batch_prompts=2", "noise.prompts_per_draw"),
        ("+optim.packing=true", "train.packing"),
    ],
)
def test_an_old_name_is_answered_with_the_new_one(word: str, new: str) -> None:
    with pytest.raises((HydraException, ConfigError)) as refusal:
        build(compose([word]))
    assert f"was renamed to {new}" in explain(refusal.value)


def earlier(run: Path) -> None:
    """Rewrite the config of a run as an earlier version wrote it."""
    config: Any = OmegaConf.to_container(OmegaConf.load(run / "config.yaml"))
    noise = config.pop("noise")
    config["inject"] = noise | {"site": "sampler", "_target_": "qerl_bench.aqn.injection.Injection"}
    (run / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(config)))


def test_a_run_of_an_earlier_version_is_refused_in_words(tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(next(RUNS.iterdir()), run)
    assert outdated(load_run(run).config) == []
    earlier(run)
    for read in (load_run, stored_config, partial(check_run_dir, cfg=compose())):
        with pytest.raises(ConfigError, match=r"inject.norms was renamed to noise.norms"):
            read(run)


def test_names_that_were_kept_have_no_new_one() -> None:
    assert new_name("optim.lr") is None and new_name("inject.norms") == "noise.norms"
    assert set(RENAMED_VALUES["noise.site"].values()) == {
        "rollout", "rollout_and_old_logprobs", "rollout_and_training",
    }  # fmt: skip


# --- status ----------------------------------------------------------------------------------------------------------


def test_status_lists_states_and_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ("a", "b", "c")
    for name, source in zip(names, sorted(RUNS.iterdir()), strict=False):
        shutil.copytree(source, tmp_path / name)
    for name in ("b", "c"):
        (tmp_path / name / "done.json").unlink()
        with open(tmp_path / name / "metrics.jsonl", "a") as file:
            file.write('{"kind": "train", "st')  # the writer is in the middle of a line
    (tmp_path / "a" / ".hydra").mkdir()
    (tmp_path / "a" / ".hydra" / "config.yaml").touch()
    with open(tmp_path / "c" / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        main(["status", str(tmp_path)])
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[:4] for line in printed[:3]] == [
        ["done", "10", "of", "10"], ["unfinished", "10", "of", "10"], ["running", "10", "of", "10"],
    ]  # fmt: skip
    assert " ".join(printed[3]) == "3 runs, 1 done, 1 running, 1 unfinished"
    main(["status", "--json", str(tmp_path)])
    listed = json.loads(capsys.readouterr().out)
    assert [(one["run"], one["state"], one["step"], one["steps"], one["note"]) for one in listed] == [
        (str(tmp_path / name), state, 10, 10, "")
        for name, state in zip(names, ("done", "unfinished", "unfinished"), strict=True)
    ]


def test_status_lists_damaged_runs_with_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in "abc":
        shutil.copytree(min(RUNS.iterdir()), tmp_path / name)
    (tmp_path / "a" / "config.yaml").write_text("device: !foreign {}")
    (tmp_path / "b" / "config.yaml").write_text("seed: 0")
    (tmp_path / "c" / "metrics.jsonl").write_bytes(b'{"step": 3}\n\x80\x00\n{"step\n[]\n')
    main(["status", str(tmp_path)])
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[:4] for line in printed[:3]] == [
        ["damaged", "10", "of", "?"], ["damaged", "10", "of", "?"], ["damaged", "3", "of", "10"],
    ]  # fmt: skip
    assert all(str(tmp_path / name / "config.yaml") in line for name, line in zip("ab", printed, strict=False))


def test_a_message_fits_a_terminal_and_words_and_commands_stay_whole(capsys: pytest.CaptureFixture[str]) -> None:
    path, command = Path("/", *["folder"] * 20), "torchrun --standalone --nproc-per-node 4 -m qerl_bench eval runs/NAME"
    reason = f"this cannot be as it was asked for, {path} is in the way. Leave it out, or share the work: {command}"
    with pytest.raises(SystemExit), exit_in_words("stopped"):
        raise TrainingStopped(f"2 runs failed:\n  {path}: {reason}\nrepeat it")
    with pytest.raises(SystemExit), exit_in_words("stopped"):
        raise ConfigError(reason)
    said = capsys.readouterr().err
    assert whole(said) == f"2 runs failed:\n  {path}: {reason}\nrepeat it\nerror: {reason}\n"
    lines = said.splitlines()
    assert {line.strip(" :") for line in lines if len(line) > WIDTH} == {str(path)}
    assert lines.count(f"    {command}") == 2 and "error: this cannot be as it was asked for," in lines
    told = f"{'a word ' * 12}in the way:"  # fits into a line of its own
    assert wrap_lines(f"error: {told} leave it out") == f"error: {told[:-5]}\n    way:\n    leave it out"


def test_ctrl_c_is_code_130(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end, exit_in_words("stopped; try again"):
        raise KeyboardInterrupt
    assert end.value.code == 130 and capsys.readouterr().err == "stopped; try again\n"
