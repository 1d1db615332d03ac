"""logger=wandb with the real package, offline: what its file holds, before and after a kill."""

from __future__ import annotations

import json
import os
import shlex
import struct
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from qerl_bench.logger.wandb import WandB, WandbMirror, login_problem
from qerl_core.checks import ConfigError
from qerl_core.options.fingerprint import as_dict
from tests.parallel import ranks

BLOCK = 32 * 1024  # a .wandb file is a LevelDB log: blocks of records with a header of 7 bytes each


def records(path: Path) -> Iterator[Any]:
    """The messages of a .wandb file, whose last one may be cut off."""
    wandb_internal_pb2 = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    data, position, parts = path.read_bytes(), 7, b""
    while position + 7 <= len(data):
        left = BLOCK - position % BLOCK
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        if kind == 0:  # never written: the file was laid out ahead
            return
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield wandb_internal_pb2.Record.FromString(parts)
            parts = b""


def values(items: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def labels(path: Path) -> tuple[str, str, str, list[str]]:
    """Id, name, group and tags of the run in a .wandb file."""
    run = next(record.run for record in records(path) if record.WhichOneof("record_type") == "run")
    return run.run_id, run.display_name, run.run_group, list(run.tags)


def mirrored(path: Path) -> tuple[dict[int, dict[str, Any]], dict[str, Any], dict[str, Any]]:
    """History by step, config and summary of a .wandb file. Fails if a step is there twice."""
    history: dict[int, dict[str, Any]] = {}
    config: dict[str, Any] = {}
    summary: dict[str, Any] = {}
    for record in records(path):
        if record.WhichOneof("record_type") == "history":
            row = values(record.history.item)
            step = row["_step"]
            assert step not in history, f"step {step} is there twice"
            history[step] = {key: value for key, value in row.items() if not key.startswith("_")}
        elif record.WhichOneof("record_type") == "run":
            config |= values(record.run.config.update)
        elif record.WhichOneof("record_type") == "summary":
            summary |= values(record.summary.update)
    return history, config, summary


def local(run_dir: Path) -> dict[int, dict[str, Any]]:
    """metrics.jsonl by step, training and evaluation of a step together."""
    found: dict[int, dict[str, Any]] = {}
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        step = record.pop("step")
        found.setdefault(step, {}).update({k: v for k, v in record.items() if k not in ("kind", "time")})
    return found


def without_settings(rank: int) -> None:
    """In a process of its own."""
    for key in [key for key in os.environ if key.startswith("WANDB_")]:
        del os.environ[key]
    os.environ["WANDB_SILENT"] = "true"


@pytest.mark.slow
def test_a_killed_run_continues_without_lost_or_doubled_steps(tmp_path: Path) -> None:
    words = ["experiment=smoke", "steps=14", "save_every=4", "name=x-s0-y", f"root={tmp_path}"]
    words += ["logger=wandb", "logger.mode=offline", "rollout.group_size=4"]
    run_dir = tmp_path / "runs" / "x-s0-y"
    metrics = run_dir / "metrics.jsonl"
    process = ranks.start(words, tmp_path / "killed", sabotage=without_settings)
    deadline = time.time() + 100
    while time.time() < deadline and not (metrics.exists() and '"step": 6' in metrics.read_text()):
        assert process.is_alive()
        time.sleep(0.002)
    process.kill()
    process.join()
    time.sleep(1.1)  # W&B names its folders by the second
    ended = ranks.run(words, 1, tmp_path / "continued", sabotage=without_settings)
    assert ended.codes == [0] and "continuing after step" in ended.said, ended.said

    id = json.loads((run_dir / "mirror.json").read_text())["wandb"]
    first, second = sorted((run_dir / "wandb").glob(f"offline-run-*-{id}/run-{id}.wandb"))
    killed, _, _ = mirrored(first)
    history, config, summary = mirrored(second)
    *names, tags = labels(second)
    assert names == [id, "x-s0-y", "x-y"] and id.startswith("x-s0-y-")  # of a killed run W&B may not have written them
    assert {"quant=bf16", "aqn=none", "task=even_characters", "engine=hf"} <= {*tags}
    expected = local(run_dir)
    assert history == expected and list(history) == list(range(15))
    assert len(killed) < 15  # W&B writes late: it may have lost steps that the local record has
    written = as_dict(OmegaConf.load(run_dir / "config.yaml"))
    assert {key: value for key, value in config.items() if key != "_wandb"} == written
    final = {key: value for step in sorted(expected) for key, value in expected[step].items()}
    assert {key: summary[key] for key in final} == final


CONFIG = {"name": "a-s3-b", "seed": 3, "quant": {"name": "nvfp4"}, "logger": {"name": "wandb"}}


class Online:
    """A run that W&B holds up to some step."""

    def __init__(self, starting_step: int) -> None:
        self.starting_step = starting_step
        self.steps: list[int] = []
        self.summary: dict[str, float] = {}

    def log(self, metrics: dict[str, float], step: int) -> None:
        self.steps.append(step)

    def finish(self, exit_code: int) -> None:
        raise ConnectionError("the server is gone")


class AuthenticationError(Exception):
    pass


def package(monkeypatch: pytest.MonkeyPatch, init: Callable[..., Any]) -> None:
    """Put a W&B of our own in place of the package."""
    errors = SimpleNamespace(AuthenticationError=AuthenticationError, UsageError=AuthenticationError)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, errors=errors, Settings=dict))
    monkeypatch.setitem(sys.modules, "wandb.errors", errors)


def resumed(
    monkeypatch: pytest.MonkeyPatch, folder: Path, starting_step: int, local_steps: int
) -> tuple[WandbMirror, Online]:
    online = Online(starting_step)
    package(monkeypatch, lambda **_: online)
    lines = [{"kind": "eval", "step": 0, "time": 0.0, "eval/a": 0.5}]
    lines += [{"kind": "train", "step": step, "time": 0.0, "loss": 1.0} for step in range(1, local_steps + 1)]
    spec = WandB(name="wandb", project="p", entity=None, mode="online", names=None)
    return WandbMirror(spec, folder, lines, CONFIG), online


def test_steps_that_the_server_has_are_not_sent_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mirror, online = resumed(
        monkeypatch, tmp_path, starting_step=7, local_steps=4
    )  # it saw 0 to 6, the checkpoint is of step 4
    for step in (5, 6, 7, 8):
        mirror.log("train", step, {"loss": 1.0})
    assert online.steps == [7, 8]


def test_steps_that_the_server_lacks_are_sent_from_the_local_record(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mirror, online = resumed(monkeypatch, tmp_path, starting_step=2, local_steps=4)  # it saw 0 and 1 only
    mirror.log("train", 5, {"loss": 1.0})
    assert online.steps == [2, 3, 4, 5]


def test_an_evaluation_reaches_the_summary_of_a_step_that_is_closed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mirror, online = resumed(monkeypatch, tmp_path, starting_step=5, local_steps=4)
    mirror.log("eval", 4, {"eval/a": 0.75})
    assert online.steps == [] and online.summary == {"eval/a": 0.75}


def test_a_mirror_that_fails_at_the_end_does_not_fail_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mirror, _ = resumed(monkeypatch, tmp_path, starting_step=5, local_steps=4)
    with mirror:
        pass
    assert "failed at its end: the server is gone" in caplog.text


def test_a_server_that_is_gone_is_a_warning_and_a_missing_login_a_refusal(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec = WandB(name="wandb", project="p", entity=None, mode="online", names=None)
    lines = [{"kind": "train", "step": 1, "time": 0.0, "loss": 1.0}]

    def fail(error: Exception) -> Callable[..., Any]:
        def init(**_: Any) -> None:
            raise error

        return init

    package(monkeypatch, fail(OSError("No space left on device")))
    with WandbMirror(spec, tmp_path, lines, CONFIG) as mirror:
        mirror.log("train", 2, {"loss": 1.0})
    assert len(caplog.messages) == 1 and "is off" in caplog.text and "No space left" in caplog.text
    package(monkeypatch, fail(AuthenticationError("no key")))
    with pytest.raises(ConfigError, match=r"logger=wandb cannot start: no key. .*logger.mode=offline"):
        WandbMirror(spec, tmp_path, lines, CONFIG)


def test_runs_are_grouped_by_setting_and_tagged_by_option(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given: dict[str, Any] = {}
    package(monkeypatch, lambda **words: given.update(words) or Online(0))
    for variable in ("WANDB_RUN_GROUP", "WANDB_TAGS"):
        monkeypatch.delenv(variable, raising=False)
    spec = WandB(name="wandb", project="p", entity=None, mode=None, names=None)
    WandbMirror(spec, tmp_path, [], CONFIG)
    assert (given["group"], given["tags"], given["mode"]) == ("a-b", ["quant=nvfp4"], None)
    monkeypatch.setenv("WANDB_RUN_GROUP", "mine")
    monkeypatch.setenv("WANDB_TAGS", "pilot,h200")
    WandbMirror(spec, tmp_path, [], CONFIG)
    assert (given["group"], given["tags"]) == ("mine", ["quant=nvfp4", "pilot", "h200"])


@pytest.mark.parametrize(
    ("mode", "environment", "login", "problem"),
    [
        ("offline", "online", False, None),
        ("disabled", "online", False, None),
        (None, "offline", False, None),
        (None, "disabled", False, None),
        (None, "online", True, None),
        (None, "online", False, "not logged in"),
        ("online", "offline", False, "not logged in"),  # the option wins over WANDB_MODE
        ("online", "offline", AuthenticationError("bad key"), "bad key"),
    ],
)
def test_a_login_is_needed_only_to_be_online(
    mode: str | None, environment: str, login: bool | Exception, problem: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def setup(settings: dict[str, str] | None = None) -> Any:
        return SimpleNamespace(settings=SimpleNamespace(mode=(settings or {}).get("mode", environment)))

    def log_in(prompt: bool) -> bool:
        assert not prompt
        if isinstance(login, Exception):
            raise login
        return login

    package(monkeypatch, lambda **_: None)
    sys.modules["wandb"].__dict__.update(setup=setup, login=log_in)
    login_problem.cache_clear()
    found = login_problem(mode)
    login_problem.cache_clear()
    assert found is None if problem is None else problem in str(found)


def logged_out(home: Path, rank: int) -> None:
    """In a process of its own."""
    without_settings(rank)
    os.environ |= {"HOME": str(home), "NETRC": str(home / "netrc")}


@pytest.mark.slow
def test_a_missing_login_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    words = ["experiment=smoke", "logger=wandb", f"root={tmp_path / 'root'}"]
    ended = ranks.run(words, 1, tmp_path / "said", sabotage=partial(logged_out, tmp_path / "home"))
    assert ended.codes == [2] and "logger=wandb cannot start" in ended.said and "logger.mode=offline" in ended.said
    assert not (tmp_path / "root").exists()


@pytest.mark.slow
def test_an_offline_run_says_how_it_is_uploaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    folder = tmp_path / "a run"  # whose name a shell would cut
    folder.mkdir()
    spec = WandB(name="wandb", project="p", entity=None, mode="offline", names=None)
    with caplog.at_level("INFO"), spec.mirror(folder, [], {"name": "a", "seed": 0}) as mirror:
        mirror.log("train", 1, {"loss": 1.0})
    (said,) = [record.getMessage() for record in caplog.records if "wandb sync" in record.getMessage()]
    command, synced, pattern = said.partition(": ")[2].partition("wandb sync ")
    assert not command and synced
    (place,) = shlex.split(pattern)
    assert [*Path("/").glob(place.lstrip("/"))] != []
