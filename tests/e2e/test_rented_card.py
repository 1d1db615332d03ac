"""docs/how-to/rented-card.md as printed: a study runs from what the page says to carry, and comes back."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pandas as pd
import pytest
import yaml

from qerl_bench.__main__ import main
from tests.models import gguf_files
from tests.parallel.programs import UNDRAWN
from tests.unpacked import unpack

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "how-to" / "rented-card.md"
WORDS = "experiment=smoke model=hub model.id=there.gguf device=cpu task=even_characters steps=1"
WORDS += " task.max_completion_tokens=4"


@pytest.mark.slow
def test_a_rented_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As printed, but for MPS: a study runs from the archive and the wheels alone, and comes back without caches."""
    page = PAGE.read_text()
    (archive,) = re.findall(r"`(git archive [^`]*) studies/NAME`", page)
    subprocess.run(archive.replace("code.tar COMMIT", f"{tmp_path}/code.tar HEAD").split(), cwd=ROOT, check=True)
    (tmp_path / "wheels").mkdir()
    with zipfile.ZipFile(tmp_path / "wheels" / "carried-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("carried.py", "")
        wheel.writestr("carried-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: carried\nVersion: 1\n")
        wheel.writestr("carried-1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("carried-1.dist-info/RECORD", "")
    file = gguf_files.write(tmp_path / "mini.gguf", gguf_files.model_of("qwen2"), "Q4_1")
    design = {
        "common": WORDS.split(),
        "units": {"dither": [1, 2]},
        "seeds": 1,
        "arms": {name: {"tier": 1, "words": [f"quant={name}"]} for name in ("bf16", "nvfp4")},
        "probe": {"questions": 2, "samples": 2},
        "dose": {"rise": 0.1, "prompts": 2, "draws": 1},
    }
    (tmp_path / "studies" / "NAME").mkdir(parents=True)
    (tmp_path / "studies" / "NAME" / "study.yaml").write_text(yaml.safe_dump(design, sort_keys=False))
    subprocess.run(["tar", "rf", "code.tar", "studies"], cwd=tmp_path, check=True)
    commands = "\nwait\n".join(re.findall(r"```bash\n(.*?)```", page, flags=re.DOTALL))
    for words, others in {"nvidia-cuda-mps-control -d": "true", "FILE.gguf": str(file), "/tmp/mps": "../mps"}.items():
        assert words in commands
        commands = commands.replace(words, others)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    variables = {key: value for key, value in os.environ.items() if key != "QERL_ROOT"} | {"PATH": path, UNDRAWN: "1"}
    (digest,) = re.findall(r"`(python -c '[^`]*)`", page)
    commands += digest
    done = subprocess.run(
        ["sh", "-ec", commands], cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "carried.py").is_file()
    with tarfile.open(tmp_path / "code" / "out.tgz") as packed:
        assert not {"runs", "cache"} & {part for name in packed.getnames() for part in Path(name).parts}
    unpack(tmp_path / "code" / "out.tgz", tmp_path / "home")
    answers = pd.read_parquet(tmp_path / "home" / "out" / "NAME" / "tidy.parquet")
    assert answers["run"].nunique() == 4, (tmp_path / "NAME.log").read_text()
    environments = [json.loads(file.read_text()) for file in tmp_path.glob("code/runs/*/env.json")]
    assert {(one["commit"], one["code"]) for one in environments} == {(None, done.stdout.split()[-1])}
    monkeypatch.chdir(tmp_path / "home")
    assert main(["claims", "out/NAME"]) == 0 and "4 matched runs" in capsys.readouterr().out
