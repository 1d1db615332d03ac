"""A GGUF file from the command line to a finished run, and copies of it as bases of their own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.test_run import run_dirs
from tests.models.gguf_files import model_of, write
from tests.parallel import ranks

WORDS = ["experiment=smoke", "model=hub", "quant=nvfp4", "aqn=constant", "steps=2", "task.max_completion_tokens=8"]
WORDS += ["rollout.group_size=4", "eval.questions=2", "eval.samples=1"]


def run(root: Path, file: Path, *words: str) -> ranks.Ended:
    return ranks.run([*WORDS, f"model.id={file}", f"root={root}", *words], 1, root / "said")


@pytest.mark.slow
def test_a_file_trains_for_two_steps_and_says_that_it_was_rounded(tmp_path: Path) -> None:
    file = write(tmp_path / "Tiny Qwen.gguf", model_of("qwen2"), "Q4_1")
    ended = run(tmp_path, file)
    assert ended.codes == [0], ended.said
    (folder,) = run_dirs(tmp_path)
    assert folder.name.startswith("tiny-qwen-nvfp4-constant-")
    env = json.loads((folder / "env.json").read_text())
    assert env["gguf"]["bits_per_weight"] == 5.0 and env["gguf"]["dither"] is None
    said = (folder / "run.log").read_text()
    assert "these 16-bit weights were rounded to 5.0 bits a weight before" in said
    assert "a GGUF file, a qwen2 model, asked in plain text" in " ".join(said.split()) and "unknown" not in said
    assert said.index("rounded to 5.0") < said.index("step 1")
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert max(steps) == 2
    (kept,) = (path for path in (tmp_path / "cache" / "gguf").iterdir() if path.is_dir())
    made = (kept / "model.safetensors").stat().st_mtime_ns

    copy = run(tmp_path, file, "model.dither=3")
    assert copy.codes == [0], copy.said
    first, second = (json.loads((path / "env.json").read_text()) for path in sorted(run_dirs(tmp_path), key=dithered))
    assert second["gguf"]["dither"] == 3 and first["gguf"]["digest"] == second["gguf"]["digest"]
    assert first["base"] != second["base"]
    again = run(tmp_path, file, "seed=1")
    assert again.codes == [0] and (kept / "model.safetensors").stat().st_mtime_ns == made


def dithered(folder: Path) -> bool:
    return json.loads((folder / "env.json").read_text())["gguf"]["dither"] is not None


@pytest.mark.parametrize("content", [b"GGUF", b"PK\3\4" + bytes(100)])
def test_a_bad_file_ends_in_one_message(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(content)
    ended = run(tmp_path, file)
    assert ended.codes == [2] and "Traceback" not in ended.said
    assert "x.gguf" in ended.said and not (tmp_path / "runs").exists()
