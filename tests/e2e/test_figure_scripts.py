"""Each analysis/fig_*.py draws committed runs of a released model, or says which runs it lacks.

The runs are of Qwen2.5-Coder 0.5B on GSM8K: copies of its file, each with a seed of its own.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from qerl_core.checks import ConfigError
from tests.scripts import ROOT, script

STUDY = ROOT / "studies" / "real-2026"
FORMATS = STUDY / "05b" / "data" / "2026-11-26"
RATES = STUDY / "pilot" / "data" / "rates-05b"
OF = {
    "accuracy": [FORMATS, "except=*-matched-*"],
    "aqn": [FORMATS, "except=*-bf16-*"],
    "controls": [FORMATS],
    "entropy": [FORMATS],
    "learning_rates": [RATES],
    "overview": [FORMATS],
    "reward": [FORMATS],
}
LACKS = {
    "algorithms": "differ in algo ",
    "ranks": "two values of lora.rank",
    "schedules": "aqn=exp",
    "sigma": "aqn=constant",
    "speed": "speed/rollout_tok_s",
}


def test_there_are_scripts() -> None:
    assert {file.stem.removeprefix("fig_") for file in (ROOT / "analysis").glob("fig_*.py")} == {*OF, *LACKS}


@pytest.mark.parametrize("name", OF)
def test_it_draws(name: str, tmp_path: Path) -> None:
    script(f"analysis/fig_{name}.py").main([*map(str, OF[name]), f"out={tmp_path}", "mixed_code=true"])
    picture = (tmp_path / f"{name}.svg").read_text()
    assert "NVFP4" in picture and ("BF16" in picture) == (name != "aqn")


@pytest.mark.parametrize(("name", "lacks"), LACKS.items())
def test_it_says_what_it_lacks(name: str, lacks: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=lacks):
        script(f"analysis/fig_{name}.py").main([str(FORMATS), f"out={tmp_path}", "mixed_code=true"])
    assert not [*tmp_path.iterdir()]
