"""What bash completes of a command line, asked of bash itself."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from qerl_bench.__main__ import COMMANDS, completion
from qerl_bench.config import compose
from qerl_core.options.completion import keys

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
ASK = """
{script}
COMP_LINE=$1 COMP_POINT=${{#1}}
_qerl_bench
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def completed(line: str, folder: Path | None = None) -> list[str]:
    """What stands in place of the last word of `line`, or behind its = as bash takes it."""
    words = ["bash", "--norc", "-c", ASK.format(script=completion()), "bash", line]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout.split("\n")[:-1] if done.stdout.strip() else []


def test_commands_flags_keys_and_options() -> None:
    assert completed("qerl-bench re") == [name for name in COMMANDS if name.startswith("re")]
    assert completed("qerl-bench run --ex") == ["--explain"]
    assert completed("qerl-bench run lora.ra") == ["lora.rank="]
    assert completed("qerl-bench run quant=nv") == ["nvfp4"]
    assert completed("qerl-bench run -m aqn=exp quant=bf16,mx") == ["bf16,mxfp4", "bf16,mxfp8"]
    assert completed("qerl-bench run experiment=tiny/ran") == ["tiny/ranks"]
    assert completed("qerl-bench run quant=no_such") == [] == completed("qerl-bench run steps=")


def test_options_of_ones_own_and_files(tmp_path: Path) -> None:
    own = tmp_path / "mine" / "aqn" / "halving.yaml"
    own.parent.mkdir(parents=True)
    own.touch()
    for flag in ("--config-dir mine", "--config-dir=mine"):
        assert completed(f"qerl-bench run {flag} aqn=hal", tmp_path) == ["halving"]
    assert completed("qerl-bench compare mi", tmp_path) == ["mine"]  # which has no options of a run


def test_keys_are_those_of_configs() -> None:
    found = keys()
    assert len(found) > 200 and {"steps", "quant", "optim.lr", "rollout.group_size"} <= {*found}
    for key in ("aqn.stages=5", "optim.lr=1e-4", "rollout.group_size=4", "steps=3"):
        assert key.partition("=")[0] in found
        compose(["aqn=exp", key])
