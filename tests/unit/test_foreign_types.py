"""Values of another kind than they should be, in the files of somebody else's run or study: named, file and key."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from qerl_bench.commands.status import cost_of
from qerl_core.checks import ConfigError
from qerl_core.process.arguments import printable, wrap_lines
from qerl_core.process.terminal import lasting_output
from qerl_core.rundir import read_files
from qerl_core.rundir.finished_run import chosen_checkpoint, own_folders
from qerl_core.rundir.read_files import read_config, read_object
from qerl_core.sweeps.status import Status
from qerl_studies.claims.evaluate import evaluate_claims
from qerl_studies.claims.registry import shown_claims
from qerl_studies.runs.collect import write_study
from qerl_studies.runs.committed import read_study
from qerl_studies.runs.comparable import check_comparable
from qerl_studies.runs.find import find_runs
from qerl_studies.runs.load import load_run
from tests.run_folders import DONE, SHORT, write_run

LINES = [{"kind": "train", "step": step, "time": 1.0, "loss": 0.5} for step in (1, 2, 3)]
ODD: list[tuple[str, str, Any]] = [  # file, key, value
    *(("env.json", key, value) for key in ("metrics", "kernel_tables") for value in ([1], {"a": {}}, "text")),
    *(("env.json", "packages", value) for value in ("torch", ["torch"], {"torch": 2})),
    *(("env.json", key, value) for key in ("cpu", "gpu", "device", "code", "base") for value in (8, ["x"], {})),
    *(("env.json", "own_code", value) for value in ([1], {"a": 1})),
    *(("env.json", key, value) for key in ("ranks", "threads", "after") for value in ("2", 1.5, True)),
    ("env.json", "own_folders", "folder"),
    ("env.json", "gguf", ["x"]),
    ("env.json", "earlier", {"a": 1}),
    ("env.json", "earlier", [1]),
    *(("done.json", key, value) for key in ("wall_s", "energy_j", "peak_memory_gib") for value in ("1", [1])),
    ("done.json", "checkpoints", [1]),
    ("done.json", "final", 1),
    *(("config.yaml", key, value) for key in ("seed", "steps") for value in ("1", 1.5, None)),
    *(("config.yaml", key, value) for key in ("model", "quant", "lora", "rollout") for value in (None, "x", [1])),
    ("config.yaml", "name", ["a"]),
]


def a_run(folder: Path) -> Path:
    config = SHORT | {"optim": {"lr": 1e-5}, "rollout": {"prompts_per_step": 2, "group_size": 2}}
    return write_run(folder, config, LINES, DONE, {"code": "1f", "device": "cpu"})


def with_value(file: Path, key: str, value: Any) -> None:
    content = yaml.safe_load(file.read_text()) | {key: value}
    file.write_text(yaml.safe_dump(content) if file.suffix == ".yaml" else json.dumps(content))


@pytest.mark.parametrize(("file", "key", "value"), ODD)
def test_a_value_of_another_kind_is_named(file: str, key: str, value: Any, tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    with_value(run / file, key, value)
    for metrics in (True, False):
        with pytest.raises(ConfigError, match=rf"run/{file}.*: {key} must be .*, got .*Leave the run out"):
            load_run(run, metrics)
    assert cost_of([Status(run, "done", 3, 3, None)]).runs == (file == "config.yaml")


@pytest.mark.parametrize(
    "key", ["model.name", "quant.name", "task.name", "optim.lr", "rollout.group_size", "lora.rank"]
)
@pytest.mark.parametrize("value", [["a"], {"a": 1}, None])
def test_a_key_of_a_group_is_named(key: str, value: Any, tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    group, _, name = key.partition(".")
    content = yaml.safe_load((run / "config.yaml").read_text())
    with_value(run / "config.yaml", group, content[group] | {name: value})
    with pytest.raises(ConfigError, match=rf"config.yaml: {group}: {name} must be .*, got "):
        load_run(run)


def test_what_is_said_of_a_gguf_file_and_of_earlier_attempts_is_asked_too(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    for key, value, named in (
        ("gguf", {"digest": 1}, "gguf: digest must be"),
        ("gguf", {}, "gguf has no digest"),
        ("gguf", {"digest": "x", "dither": "1"}, "gguf: dither must be"),
        ("earlier", [{"packages": "torch"}], "earlier: packages must be"),
    ):
        with_value(run / "env.json", key, value)
        with pytest.raises(ConfigError, match=named):
            load_run(run)
        with_value(run / "env.json", "gguf", {"digest": "x"})


@pytest.mark.parametrize("value", [[[1, 2], [3]], [{"a": [1]}], {"a": [[1]]}])
def test_lists_of_lists_in_a_config_are_values_like_others(value: Any, tmp_path: Path) -> None:
    """As an option of one's own may have them."""
    for name in ("a", "b"):
        with_value(a_run(tmp_path / name) / "config.yaml", "own", {"values": value})
    runs = [load_run(path) for path in find_runs(tmp_path)]
    check_comparable(runs, mixed_code=False)
    assert evaluate_claims(shown_claims(), runs[:1])


OF_STUDY: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a list of runs": (lambda content: content.update(runs=[1]), "runs must be an object"),
    "a list of settings": (lambda content: content.update(settings=[1]), "settings must be an object"),
    "no config": (lambda content: content.update(config=None), "config must be an object"),
    "a text for environments": (lambda content: content.update(environments="x"), "environments must be objects"),
    "a run that is a text": (lambda content: content["runs"].update(a="x"), "runs: a must be an object"),
    "a text for an index": (lambda content: content["runs"]["a"].update(environment="0"), "a: environment must be"),
    "a negative index": (lambda content: content["runs"]["a"].update(environment=-1), "lacks the setting"),
    "an index behind the last": (lambda content: content["runs"]["a"].update(environment=9), "lacks the setting"),
    "true for a seed": (lambda content: content["runs"]["a"].update(seed=True), "a: seed must be a whole number"),
    "packages of a text": (lambda content: content["environment"].update(packages="x"), "packages must be"),
    "a key below a value": (lambda content: content["config"].update({"seed.x": 1, "steps.x": 1}), "which has a value"),
}


@pytest.mark.parametrize("name", OF_STUDY)
def test_a_study_with_a_value_of_another_kind_is_named(name: str, tmp_path: Path) -> None:
    a_run(tmp_path / "runs" / "a")
    write_study([tmp_path / "runs" / "a"], tmp_path / "study", mixed_code=False)
    harm, says = OF_STUDY[name]
    file = tmp_path / "study" / "settings.json"
    content = json.loads(file.read_text())
    harm(content)
    file.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=f"settings.json.*{says}"):
        read_study(tmp_path / "study")


def test_later_commands_ask_too(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    (run / "checkpoints" / "step_000003").mkdir(parents=True)
    with_value(run / "env.json", "own_folders", "here")
    with_value(run / "done.json", "checkpoints", [3])
    with pytest.raises(ConfigError, match="own_folders must be"):
        own_folders(run)
    with pytest.raises(ConfigError, match="checkpoints must be"):
        chosen_checkpoint(run, "best", 3)


def test_what_unpacks_to_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "settings.json.gz"
    file.write_bytes(gzip.compress(b'{"a": "' + b" " * 5000 + b'"}'))
    assert read_object(file, "")["a"].isspace()
    monkeypatch.setattr(read_files, "MAX_BYTES", 4096)
    with pytest.raises(ConfigError, match=r"settings.json.gz is not JSON \(it unpacks to more"):
        read_object(file, "")
    (tmp_path / "config.yaml").write_text("a: &x [1, 2]\nb: [*x, *x]\n")
    with pytest.raises(ConfigError, match=r"config.yaml is not a resolved config: it has an alias"):
        read_config(tmp_path / "config.yaml")
    (tmp_path / "config.yaml").write_text("a: 'x * y'\nb: 2\n")
    assert read_config(tmp_path / "config.yaml") == {"a": "x * y", "b": 2}


ODD_TEXTS = [
    "[" * 2000,
    "a: 1" + "0" * 5000,
    "- 1",
    "",
    "a: 1\n---\nb: 2",
    "a: !!set {b}",
    "? [1, 2]\n: 3",
    "a: 2026-11-29",
]


@pytest.mark.parametrize("text", [*ODD_TEXTS, "a: !!python/object:os.system {}", "a: &b {c: 1}\nd:\n  <<: *b"])
def test_what_is_no_object_of_plain_values_is_refused_by_name(text: str, tmp_path: Path) -> None:
    (tmp_path / "env.json.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"env\.json\.gz is not JSON"):
        read_object(tmp_path / "env.json.gz", "Leave it out")
    with pytest.raises(ConfigError, match=r"config\.yaml (is not|must)"):
        read_config(tmp_path / "config.yaml")


def test_no_sign_that_moves_or_hides_reaches_a_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    for sign in ("\x1b[2J", "\x1b]52;c;eA==\x07", "\x9b1m", *"\x00\x07\x08\x0b\r\x7f\x85\u061c\u200f\u202e\u2066"):
        with lasting_output():
            print(f"a{sign}b")
        for said in (capfd.readouterr().out, wrap_lines(f"a{sign}b\n")):
            assert sign not in said and said.startswith("a\\") and said.endswith("b\n")
    assert printable("a\r\nb\tc") == "a\r\nb\tc"


def test_control_characters_of_names_do_not_reach_the_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    name = "a\x1b[2J\x1b]0;mine\x07\x08\u202eb\x9b31m\tc"
    shown = r"a\x1b[2J\x1b]0;mine\x07\x08\u202eb\x9b31m" + "\tc"
    assert printable(name) == shown and printable("läufe 日本語 🦆\n") == "läufe 日本語 🦆\n"
    with lasting_output():
        print(name)
    assert capfd.readouterr().out == f"{shown}\n"


def test_an_adapter_under_another_name_is_refused_by_its_path(make_policy: Callable[..., Any], tmp_path: Path) -> None:
    policy = make_policy()
    policy.save(tmp_path)
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    policy.load(tmp_path)
    kept = shutil.copy(file, tmp_path / "kept")
    for harm, says in (
        (lambda: file.rename(file.with_name("adapter.safetensors")), "is missing"),
        (lambda: file.write_bytes(b"no tensors"), "must be a file of safetensors"),
    ):
        harm()
        with pytest.raises(ConfigError, match=rf"adapter_model\.safetensors {says}"):
            policy.load(tmp_path)
        shutil.copy(kept, file)
