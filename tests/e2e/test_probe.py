"""Probes from the command line: copies of a GGUF file as units of a study, and one model by itself."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from qerl_bench.__main__ import main
from qerl_bench.probe import parts
from qerl_core.process.arguments import whole
from qerl_core.process.progress import watch
from tests.models.gguf_files import model_of, write
from tests.parallel.programs import UNDRAWN

STUDY: dict[str, Any] = {
    "common": [
        *("experiment=smoke", "model=hub", "steps=2", "task.max_completion_tokens=8"),
        *("rollout.group_size=4", "eval.questions=2", "eval.samples=2"),
    ],
    "units": {"dither": [1, 2]},
    "seeds": 1,
    "arms": {"bf16": {"tier": 1, "words": ["quant=bf16"]}, "nvfp4": {"tier": 1, "words": ["quant=nvfp4"]}},
    "probe": {"questions": 4, "samples": 3, "temperatures": [0, 1], "formats": ["mxfp4"], "texts": 1, "sigmas": [0.5]},
    "dose": {"rise": 0.1, "prompts": 2, "draws": 1},
}


def study_in(folder: Path, file: str, **changes: Any) -> Path:
    content = STUDY | changes
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump(content | {"common": [*content["common"], f"model.id={file}"]}))
    return path


@pytest.mark.slow
def test_a_study_of_two_copies_keeps_every_answer_and_trains_all_arms_on_the_same_copy(
    tmp_path: Path, programs: Path
) -> None:
    def command(*words: str) -> subprocess.CompletedProcess[str]:
        program, environment = [programs / "qerl-bench", *words], os.environ | {UNDRAWN: "1"}
        return subprocess.run(program, cwd=tmp_path, env=environment, capture_output=True, text=True)

    write(tmp_path / "two-layers.gguf", model_of("qwen2"), "Q4_1")
    path = study_in(tmp_path, "two-layers.gguf")
    gates = ["pass", "groups", "headroom", "rise", "gain"]
    done = command("study", str(path), "slots=2", "out=out", "with_changes=true", f"despite={','.join(gates)}")
    assert done.returncode == 0, done.stderr
    probes = {one["base"]: one for one in json.loads((tmp_path / "out" / "probes.json").read_text())}
    assert probes[1]["digest"] != probes[2]["digest"] and probes[1]["file"]["digest"] == probes[2]["file"]["digest"]
    trained = [json.loads(file.read_text()) for file in (tmp_path / "runs").glob("*/env.json")]
    assert sorted((env["base"], env["gguf"]["dither"]) for env in trained) == sorted(
        (one["digest"], copy) for copy, one in probes.items() for _ in STUDY["arms"]
    )
    answers = pd.read_parquet(tmp_path / "out" / "probe_answers.parquet")
    assert len(answers) == 2 * 3 * 4 * (1 + 3)
    for (base, quant, temperature), rows in answers.groupby(["base", "quant", "temperature"]):
        kept = probes[base]["formats"][quant]["temperatures"][f"{temperature:g}"]
        assert kept["correct"] == rows.groupby("question", sort=False)["correct"].sum().tolist()
        assert kept["entropy"] == pytest.approx(rows["entropy"].sum() / rows["tokens"].sum(), rel=1e-4)
        assert kept["finished"] == rows["finished"].mean() and rows["completion"].notna().sum() == kept["samples"]
    first = probes[1]["formats"]
    assert first["bf16"]["kl"]["own"] == first["bf16"]["kl"]["of_reference"] < 1e-3 < first["nvfp4"]["kl"]["own"]
    assert [dose["sigma"] for dose in first["nvfp4"]["curve"]] == [0.0, 0.5]

    alone = command(
        *("probe", "experiment=smoke", "model=hub", "model.id=two-layers.gguf", "task.max_completion_tokens=8"),
        *("formats=bf16,nvfp4", "questions=4", "samples=2", "temperatures=0,1", "rise=0", "out=alone"),
    )
    assert alone.returncode == 0, alone.stderr
    page = (tmp_path / "alone" / "probe.html").read_text()
    assert "<svg" in page and 'class="completion"' in page and "Write about" in page
    assert not re.findall(r"""(?:src|href)=["']?(?:https?:|//)""", page)
    record = json.loads((tmp_path / "alone" / "probe.json").read_text())
    assert [*record["formats"]] == ["bf16", "nvfp4"] and any("something to learn" in line for line in record["advice"])
    rows = pd.read_parquet(tmp_path / "alone" / "answers.parquet")
    assert rows.groupby("quant").size().tolist() == [4 * 3] * 2 and record["advice"][-1] in alone.stdout


@pytest.mark.slow
def test_a_probe_that_is_stopped_again_and_again_has_the_numbers_of_one_left_alone(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each attempt gets six parts further. Nothing is asked twice, and the tables so far are on a page."""
    write(tmp_path / "two-layers.gguf", model_of("qwen2"), "Q4_1")
    monkeypatch.chdir(tmp_path)
    words = [
        *("probe", "experiment=smoke", "model=two-layers.gguf", "task=word_problems", "task.max_completion_tokens=6"),
        *("rollout.group_size=2", "formats=bf16,nvfp4", "questions=2", "samples=2", "answer_formats=tags,boxed"),
        *("temperatures=0,1", "sigmas=0.5", "rise=0", "contamination=2"),
    ]
    asked: list[str] = []
    kept, ask = parts.write_atomically, parts.sample_answers

    def asks(*given: Any) -> Any:
        asked.append(", ".join(one.label for one in watch.phases))
        return ask(*given)

    monkeypatch.setattr(parts, "sample_answers", asks)
    main([*words, "out=alone"])
    first, second = (f"{quant} of 2 weight formats)" for quant in ("bf16 (1", "nvfp4 (2"))
    in_formats = [f"{first}, answers in {name}" for name in ("tags", "boxed")]
    assert asked == [*in_formats, first, first, second, second]
    (said,) = [line for line in caplog.messages if line.startswith("to ask: ")]
    assert said.startswith(
        "to ask: 2 questions of each part to complete; 4 greedy answers in 2 answer formats; in each of 2 weight "
        "formats 6 answers, noise of 1 sizes. Answers have up to 6 tokens"
    )
    assert len(pd.read_parquet(tmp_path / "alone" / "answers.parquet")) == 4 + 2 * 6
    assert len(asked) == 2 + 2 * 2 and not [*(tmp_path / "alone").glob("parts-*")]

    def stopping(limit: int) -> Callable[[Path, str], None]:
        left = [limit]

        def write_part(path: Path, text: str) -> None:
            kept(path, text)
            left[0] -= path.suffix == ".json"
            if left[0] == 0:
                raise KeyboardInterrupt

        return write_part

    attempts, pages, ended = 0, [], False
    while not ended:
        monkeypatch.setattr(parts, "write_atomically", stopping(6))
        attempts += 1
        capsys.readouterr()
        try:
            main([*words, "out=stopped"])
            ended = True
        except SystemExit as end:
            assert end.code == 130
            (folder,) = (tmp_path / "stopped").glob("parts-*")
            page = (folder / "probe.md").relative_to(tmp_path)
            said = f"stopped; {6 * attempts} parts are saved, tables so far in {page}, and the same command goes on"
            assert whole(capsys.readouterr().err).endswith(f"{said} behind them\n")
            pages.append((folder / "probe.md").read_text())
    assert attempts > 3 and len(asked) == 2 * (2 + 2 * 2)
    heads = [page.count("\n## ") for page in pages]
    assert (
        heads[0] == 2
        and "| tags |" in pages[0]
        and "| test part | 2 |" in pages[0]
        and "| nvfp4 | 0 |" in pages[-1]
        and "so far" in pages[-1]
    )

    def numbers(name: str) -> dict[str, Any]:
        record = json.loads((tmp_path / name / "probe.json").read_text())
        for one in record["formats"].values():
            one |= dict.fromkeys(("started", "ended", "tokens_per_s", "memory_gib"))
        return record | dict.fromkeys(("started", "ended", "environment"))

    assert numbers("stopped") == numbers("alone")
    tables = [pd.read_parquet(tmp_path / name / "answers.parquet") for name in ("alone", "stopped")]
    pd.testing.assert_frame_equal(*tables)


def test_a_single_answer_format_is_what_all_is_asked_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "two-layers.gguf", model_of("qwen2"), "Q4_1")
    monkeypatch.chdir(tmp_path)
    words = "experiment=smoke model=two-layers.gguf task=word_problems task.max_completion_tokens=2 formats=bf16 rise=0"
    for named, found in (("boxed", "boxed"), ("hash task.answer_format=boxed", "boxed"), ("tags", "tags")):
        given = f"{words} questions=2 samples=2 temperatures=1 answer_formats={named} out=asked"
        main(["probe", *given.split()])
        record = json.loads((tmp_path / "asked" / "probe.json").read_text())
        assert record["answer_format"] == found and ("boxed" in record["prompt"]) == (found == "boxed")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["gates", "study.yaml"], "missing.gguf: there is no such file"),
        (["gates", "study.yaml", "words=model.dither=3"], "words has model.dither=3"),
        (["probe", "model=hub", "model.id=missing.gguf", "task=arithmetic"], "missing.gguf: there is no such file"),
        (["probe", "model=tiny", "task=arithmetic", "sample=3"], "sample"),
        (["probe", "model=tiny", "task=arithmetic", "contamination=1"], "contamination must be 0 or at least 2"),
        (["probe", "model=tiny", "formats=nvfp5"], "quant=nvfp5"),
        (["probe", "model=tiny", "formats=bf16,nvfp4,bf16"], "formats=bf16,nvfp4,bf16 names one twice"),
    ],
)
def test_what_cannot_be_measured_ends_in_one_message(
    words: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    study_in(tmp_path, "missing.gguf")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        main(words)
    said = whole(capsys.readouterr().err)
    assert end.value.code == 2 and "Traceback" not in said
    assert says in said and not (tmp_path / "probes").exists()
