"""Repeat tier 1 of the study on one machine, and hold the result against what is committed.

    python studies/real-2026/repeat.py 05b copies=1,2 slots=4 mps=true
    python studies/real-2026/repeat.py 15b copies=1 model=FILE.gguf data=FOLDER out=FOLDER

The model's GGUF file and GSM8K come from the Hugging Face hub where they are not given: `data` is a folder with
gsm8k_train.jsonl and gsm8k_test.jsonl. Files of another SHA-256 than the study's are refused. Three runs a copy; the
same command continues. The table has, for so many copies, where their mean falls in 95 % of repetitions if they are
draws of the same kind as the committed ones.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from qerl_bench.commands.study import main as conduct
from qerl_core.checks import require
from qerl_core.exits import guarded
from qerl_core.process.arguments import KeyValueParser
from qerl_core.rundir.checksums import digest
from qerl_core.rundir.durable import write_atomically
from qerl_core.statistics import mean_ci
from qerl_studies.claims.primary import effect_on
from qerl_studies.design.design import read_design
from qerl_studies.design.looks import at_last_look, counted
from qerl_studies.design.primary import MEASURES
from qerl_studies.design.sessions import Sessions, read_sessions, read_study
from qerl_studies.tables.markdown import markdown_table

HERE = Path(__file__).resolve().parent
MODELS = {  # repository and file on the hub, SHA-256
    "05b": (
        "Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF",
        "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    "15b": (
        "Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF",
        "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
}
QUESTIONS = {
    "train": "17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465",
    "test": "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14",
}
STOPS_NOTHING = "despite=pass,groups,headroom,mixed,lenient,rise,KL,gain,end,damage"  # as the protocol has it


def main(arguments: list[str] | None = None) -> None:
    parser = KeyValueParser(__doc__)
    parser.add_argument("size", choices=[*MODELS], help="of the model")
    parser.add_argument("--copies", type=int, nargs="+", default=[1], help="numbers of model.dither (default: 1)")
    parser.add_argument("--slots", type=int, default=1, help="runs at a time (default: 1)")
    parser.add_argument("--mps", action="store_true", help="runs of one GPU side by side, by NVIDIA's MPS")
    parser.add_argument("--model", type=Path, default=None, help="the GGUF file (default: fetched)")
    parser.add_argument("--data", type=Path, default=None, help="the folder of GSM8K (default: fetched)")
    parser.add_argument("--out", type=Path, default=None, help="folder of the result (default: repeat-SIZE)")
    options = parser.parse_args(arguments)
    out = options.out or Path(f"repeat-{options.size}")
    model = checked(options.model or fetched_model(options.size), MODELS[options.size][2])
    data = options.data or fetched_questions(out / "data")
    files = {part: checked(data / f"gsm8k_{part}.jsonl", sha256) for part, sha256 in QUESTIONS.items()}
    words = [f"model.id={model}", f"task.train_file={files['train']}", f"task.eval_file={files['test']}"]
    study = HERE / options.size / "study.yaml"
    chosen = ",".join(map(str, options.copies))
    conduct([
        str(study), f"bases={chosen}", "tiers=1", f"slots={options.slots}", f"mps={str(options.mps).lower()}",
        STOPS_NOTHING, "with_changes=true", f"out={out / 'packed'}", f"words={','.join(words)}",
    ])  # fmt: skip
    print(compared(read_study(study.parent), read_sessions(read_design(study, words), [out / "packed"])))


def checked(file: Path, sha256: str) -> Path:
    """The file's full path. Raises ConfigError if it is missing or another than the study's."""
    require(file.is_file(), f"there is no file {file}")
    found = digest(file)
    require(found == sha256, f"{file} has the SHA-256 {found}, the study's has {sha256}: give the file of the study")
    return file.resolve()


def fetched_model(size: str) -> Path:
    from huggingface_hub import hf_hub_download

    repository, name, _ = MODELS[size]
    return Path(hf_hub_download(repository, name))


def fetched_questions(folder: Path) -> Path:
    """GSM8K as the JSON Lines of its authors, byte for byte, from the hub's tables."""
    from datasets import load_dataset

    folder.mkdir(parents=True, exist_ok=True)
    for part in QUESTIONS:
        rows: Any = load_dataset("openai/gsm8k", "main", split=part)
        text = "".join(json.dumps({key: row[key] for key in ("question", "answer")}) + "\n" for row in rows)
        write_atomically(folder / f"gsm8k_{part}.jsonl", text)
    return folder


def compared(committed: Sessions, own: Sessions) -> str:
    """A table in Markdown: for each primary contrast the committed effect, where that of so many own copies was to be
    expected, and where it is. Before the first look of the study there is nothing to compare with."""
    primary, seen = committed.design.primary, at_last_look(committed)
    assert primary is not None
    own_copies = counted(own, primary).bases
    require(bool(own_copies), "no copy has all arms of tier 1 yet: the same command continues")
    if seen is None:
        return "the study has had no look at this size yet, so there is nothing to compare with"
    measure, lines = MEASURES[primary.measure], []
    for name, pair in primary.contrasts.items():
        theirs = effect_on(seen, primary, name, [*seen.probes]).by_unit
        mean = effect_on(own, primary, name, own_copies).fixed.value
        low, high = expected(theirs, len(own_copies))
        whole = mean_ci(theirs)
        lines.append([
            f"{name}: {' - '.join(pair)}",
            f"{measure.text(whole.value)} {measure.interval_text(whole.low, whole.high)}",
            measure.interval_text(low, high),
            measure.text(mean),
            "inside" if low <= mean <= high else "**outside**",
        ])  # fmt: skip
    heads = ["points", f"{len(seen.probes)} committed copies", f"expected of {len(own_copies)}", "yours", ""]
    return markdown_table(heads, lines)


def expected(effects: Sequence[float] | np.ndarray, copies: int) -> tuple[float, float]:
    """Where the mean of so many further copies falls in 95 % of cases: Student's t, for a prediction."""
    spread = float(np.std(effects, ddof=1)) * math.sqrt(1 / len(effects) + 1 / copies)
    half = float(stats.t.ppf(0.975, len(effects) - 1)) * spread
    return float(np.mean(effects)) - half, float(np.mean(effects)) + half


if __name__ == "__main__":
    guarded(main)
