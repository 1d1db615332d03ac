"""Many runs: each file is parsed once, what runs share is held once, and both are what slower ways give."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from pandas.testing import assert_frame_equal, assert_series_equal

from qerl_core.checks import ConfigError
from qerl_core.rundir import read_files
from qerl_studies.runs.answers import counted
from qerl_studies.runs.load import load_run
from tests.run_folders import DONE, SHORT, write_run

# --- configs ---------------------------------------------------------------------------------------------------------

CONFIGS = {
    "as a run writes it": "name: a\nseed: 3\noptim:\n  lr: 1e-5\n  betas:\n  - 0.9\ntext: 'it''s\n\n  so'\n",
    "a list that is not indented": "names:\n- a\n- b\nseed: 3\n",
    "a text of several lines": "a: |\n  b: 1\n\n  c: 2\nd: 3\n",
    "a quotation over what looks like a key": 'a: "x\nb: y"\nc: 3\n',
    "a mapping over what looks like a key": "a: {x: 1,\nb: 2}\nc: 3\n",
    "a key twice": "a: 1\nb: 2\na: 3\n",
    "comments": "# about\na: 1  # one\n# two\nb: 2\n",
    "no end of the last line": "a: 1\nb: 2",
    "Windows": "a: 1\r\nb:\r\n  c: 2\r\n",
    "a line break of Unicode": "a: x\u2028b: y\nc: 3\n",
    "keys that are no texts": "true: 1\n2: 3\nb: 2\n",
    "parts that are merged": "<<: {a: 1}\nb: 2\na: 3\n",
}
BROKEN = {
    "two documents": "a: 1\n---\nb: 2\n",
    "an alias of another part": "a: &x {b: 1}\nc: *x\n",
    "no mapping": "a\nb: 1\n",
    "a key without a space": "a:1\nb:2\n",
    "a date": "a: 2026-11-29\nb: 2\n",
    "a bracket": "a: [1\nb: 2\n",
}


@pytest.mark.parametrize("text", CONFIGS.values(), ids=CONFIGS)
def test_a_config_in_parts_is_the_config_as_a_whole(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.yaml").write_text(text, newline="")
    whole = json.loads(json.dumps(yaml.load((tmp_path / "config.yaml").read_text(), read_files._Loader)))
    found = read_files.read_config(tmp_path / "config.yaml")
    assert found == whole and [*found] == [*whole] and str(found) == str(whole)


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
def test_what_is_no_config_is_none_in_parts(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        read_files.read_config(tmp_path / "config.yaml")


def test_configs_that_differ_in_a_seed_are_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []
    monkeypatch.setattr(
        read_files, "_parsed", lambda text, parse=read_files._parsed: (parsed.append(text), parse(text))[1]
    )
    read_files._members.cache_clear()
    for seed in range(3):
        (tmp_path / "config.yaml").write_text(f"seed: {seed}\noptim:\n  lr: 1e-5\n  warmup_steps: 5\n")
        assert read_files.read_config(tmp_path / "config.yaml")["optim"] == {"lr": 1e-5, "warmup_steps": 5}
    assert parsed == ["seed: 0\n", "optim:\n  lr: 1e-5\n  warmup_steps: 5\n", "seed: 1\n", "seed: 2\n"]


# --- answers ---------------------------------------------------------------------------------------------------------


def table(draw: np.random.Generator, **more: Any) -> pd.DataFrame:
    """Samples in no order, of which a question lacks a step and another a mode."""
    rows = [
        {"mode": mode, "question": f"test/{question}", "step": step}
        for question in range(5)
        for mode, samples in (("greedy", 1), ("sampled", 3))
        for step in (0, 4)
        for _ in range(samples)
        if (question, step) != (2, 4) and (question, mode) != (3, "greedy")
    ]
    found = pd.DataFrame(rows).assign(correct=draw.random(len(rows)) < 0.5, tokens=draw.integers(1, 300, len(rows)))
    return found.assign(**more).sample(frac=1, random_state=0, ignore_index=True)


@pytest.mark.parametrize("more", [{}, {"finished": True, "lenient": False}, {"finished": True, "lenient": None}])
def test_answers_are_counted_as_pandas_does(tmp_path: Path, more: dict[str, Any]) -> None:
    samples = table(np.random.default_rng(0), **more)
    run = load_run(write_run(tmp_path / "a", SHORT, [], DONE, {}, samples))
    later = [name for name in ("lenient", "finished", "tokens") if name in samples]
    names = [name for name in later if bool(samples[name].notna().all())]
    grouped = samples.astype(dict.fromkeys(("correct", *names), "int64")).groupby(["mode", "question", "step"])
    sums = {name: (name, "sum") for name in names}
    expected = grouped.agg(correct=("correct", "sum"), samples=("correct", "count"), **sums).reset_index()
    found = run.answer_counts()
    assert found is not None
    assert_frame_equal(found, expected)
    for mode in ("greedy", "sampled"):
        of_mode = expected[expected["mode"] == mode]
        for name in ("correct", *names):
            shares = of_mode.assign(share=of_mode[name] / of_mode["samples"])
            pivoted = shares.pivot(index="question", columns="step", values="share")
            assert_frame_equal(run.answers(mode, name), pivoted)
            assert_frame_equal(counted(expected).shares(mode, name), pivoted)


def test_what_was_asked_is_held_once(tmp_path: Path) -> None:
    runs = [
        load_run(write_run(tmp_path / name, SHORT, [], DONE, {}, table(np.random.default_rng(seed))))
        for seed, name in enumerate("ab")
    ]
    first, second = (run.counted for run in runs)
    assert first is not None and second is not None and first.asked is second.asked
    assert first.counts["tokens"].tolist() != second.counts["tokens"].tolist()


# --- numbers ---------------------------------------------------------------------------------------------------------


def lines(draw: np.random.Generator) -> list[dict[str, Any]]:
    """Steps in no order, of which one lacks a metric and one has a null."""
    found = [{"kind": "train", "step": step, "entropy": draw.random(), "loss": draw.random()} for step in (3, 1, 2, 4)]
    del found[0]["loss"]
    found[1]["entropy"] = None
    return [{"kind": "eval", "step": 0, "entropy": 7.0}, *found]


def test_runs_share_all_of_their_tables_but_values(tmp_path: Path) -> None:
    written = [lines(np.random.default_rng(seed)) for seed in (0, 1)]
    first, second = (
        load_run(write_run(tmp_path / name, SHORT, of_run, DONE, {}))
        for name, of_run in zip("ab", written, strict=True)
    )
    for run, of_run in ((first, written[0]), (second, written[1])):
        for metric in ("entropy", "loss"):
            known = {one["step"]: one[metric] for one in of_run if one["kind"] == "train" and metric in one}
            expected = pd.Series(known, name=metric, dtype=float).sort_index()
            assert_series_equal(run.series("train", metric), expected)
            np.testing.assert_array_equal(run.numbers("train", metric), expected.to_numpy())
        assert {*run.written} == {("eval", "entropy"), ("train", "entropy"), ("train", "loss")}
    assert np.shares_memory(first.metrics["step"], second.metrics["step"]) and first._places is second._places
    assert first.series("train", "kl").empty and not first.records("train", "kl")
    before = second.metrics.copy()
    first.metrics.loc[:, "step"] = 9
    assert_frame_equal(second.metrics, before)


def test_runs_share_equal_parts_and_no_others(tmp_path: Path) -> None:
    made = {"metrics": {"loss": "nats"}, "base": "1f"}
    environments = [made | {"argv": ["a"]}, made | {"argv": ["b"]}, {"metrics": {"loss": "bits"}, "base": "1f"}]
    optim = [{"optim": {"lr": lr}} for lr in (1, 1.0, 1)]
    first, second, third = (
        load_run(write_run(tmp_path / str(number), SHORT | optim[number], [], DONE, environment))
        for number, environment in enumerate(environments)
    )
    assert first.environment["metrics"] is second.environment["metrics"] is not third.environment["metrics"]
    assert first.config["quant"] is second.config["quant"] and first.config_items is third.config_items
    assert str(second.config["optim"]) == "{'lr': 1.0}" and str(first.config["optim"]) == "{'lr': 1}"
    assert first.setting_items is second.setting_items, "1 and 1.0 are one setting"


def test_each_line_of_metrics_is_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from qerl_core.rundir.checksums import seal

    steps = [{"kind": "train", "step": step, "loss": 1.0} for step in (1, 2, 3)]
    folder = write_run(tmp_path / "a", SHORT, steps)
    (folder / "done.json").write_text(json.dumps({"seals": {"metrics.jsonl": seal(folder / "metrics.jsonl")}}))
    decoded: list[str] = []

    class Counting(json.JSONDecoder):
        def decode(self, s: str, *more: Any) -> Any:
            decoded.append(s)
            return super().decode(s, *more)

    monkeypatch.setattr(json, "JSONDecoder", Counting)
    monkeypatch.setattr(json, "_default_decoder", Counting())
    assert load_run(folder).last_step == 3
    assert sum('"loss"' in text for text in decoded) == 3
