"""Ask a model before any training: which answer and weight format, which noise, and whether RL could teach it.

    qerl-bench probe model=hub model.id=X.gguf task=gsm8k formats=bf16,nvfp4 answer_formats=boxed
    qerl-bench probe model=qwen3-4b task=gsm8k questions=64 samples=8 temperatures=0,1 sigmas=0.1

Words with other keys are options of a run. The answer formats are compared on greedy answers in the first weight
format; all else is asked in the best of them, unless the words set task.answer_format. Temperatures below 1 have top-p
0.95. Noise is measured where the run's `noise` options put it: a curve over `sigmas`, and the sigma that raises the
entropy by `rise` (0: none). With `contamination=N` the first weight format completes N questions of each part of the
task, which shows whether it knows them by heart. With `budget=weights,inputs,keys,values,head,norms` all subsets of
these parts are rounded to the second of two `formats`, and nothing else is asked: budget.md says which part costs what,
of `copies=N` of a GGUF file with intervals; processes with copy=0, copy=1 and so on measure these side by side. Prints
tables and a recommendation, and writes probe.html, a page of these with some answers, probe.md, probe.json and
answers.parquet, a row for each answer. While it goes on parts-KEY/probe.md has the tables so far, and the same command
goes on behind a stop or kill. Weight formats that cannot run here are left out, with a line.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet

from qerl_bench.config import build, compose
from qerl_bench.experiment_spec import Experiment
from qerl_bench.task.grader.extract import ANSWER_FORMATS
from qerl_core.checks import TEMPERATURES, check_fields, count, is_number, number, one_of, require
from qerl_core.options.names import format_words
from qerl_core.options.user_options import split_search_path
from qerl_core.process.arguments import KeyValueParser, output_folder, unwritable
from qerl_core.process.cards import require_gpu
from qerl_core.process.terminal import log_to_stderr
from qerl_core.rundir.durable import write_atomically
from qerl_core.rundir.locks import Lock, wait_for_lock
from qerl_studies.probes.advice import advice
from qerl_studies.probes.budget import NAMES
from qerl_studies.probes.page import markdown

FORMATS = ("bf16", "nvfp4", "mxfp4", "nf4")
OF_ONE = "it is that of one format, and a probe compares several: formats=bf16,nvfp4+gptq lists them"
OF_BOTH = "sampler and scorer of a probe are one policy"
REFUSED = {  # keys of a run, and why a probe has none of their effect
    "quant": OF_ONE,
    "quantizer": OF_ONE,
    "rollout.quant": f"{OF_BOTH}: formats=bf16,nvfp4 lists what it has",
    "rollout.kv": f"{OF_BOTH}: train.kv rounds keys and values in both",
    "eval.kv": f"{OF_BOTH}: train.kv rounds keys and values in both",
}
REFUSED_IN_BUDGET = {
    "train.kv": "a budget rounds them itself: budget=keys,values",
    "quant.activations": "a budget rounds them itself: budget=inputs",
    "kernel": "a budget swaps weights of plain modules, kernel=torch",
    "aqn": "a budget has no noise",
    "rollout.temperature": "a budget samples at temperature 1",
}
ASKED_ELSE = ("answer_formats", "temperatures", "sigmas", "texts", "contamination", "rise")  # not by a budget


def parser() -> KeyValueParser:
    """The options of the command, all of which --help explains."""
    options = KeyValueParser(__doc__)
    options.add_argument("words", nargs="*", help="options of a run, such as model=qwen3-4b task=gsm8k")
    listed = {
        "formats": (
            str,
            list(FORMATS),
            "weight formats, nvfp4+gptq by a quantizer; others are compared with the first",
        ),
        "answer-formats": (str, None, f"of {', '.join(ANSWER_FORMATS)} (default: all)"),
        "temperatures": (float, [0.0, 0.6, 1.0], "to answer at, 0 is greedy (default: 0,0.6,1)"),
        "sigmas": (float, [], "sizes of noise to measure (default: none)"),
        "budget": (str, [], f"parts to round in all subsets, and nothing else: of {', '.join(NAMES)}"),
    }
    for name, (kind, default, told_of) in listed.items():
        options.add_argument(f"--{name}", type=kind, nargs="+", default=default, help=told_of)
    for name, default, told_of in (
        ("questions", 256, "how many to ask (default: 256)"),
        ("samples", 8, "answers to each, one at temperature 0 (default: 8)"),
        ("texts", 64, "questions of which answers.parquet has the texts (default: 64)"),
        ("contamination", 0, "questions of each part to complete from their beginnings (default: none)"),
        ("copies", 0, "of a GGUF file that a budget is measured on (default: the file itself)"),
        ("copy", None, "measure this one of the copies alone, 0 the first, beside processes that measure the others"),
    ):
        options.add_argument(f"--{name}", type=int, default=default, help=told_of)
    options.add_argument(
        "--rise", type=float, default=0.1, help="of entropy, whose sigma is found (default: 0.1; 0: none)"
    )
    options.add_argument("--split", default="train", help="train (default; what RL could draw) or held_out questions")
    options.add_argument(
        "--out", type=output_folder, default=None, help="folder to write to (default: ROOT/probes/MODEL-TASK)"
    )
    return options


def main(arguments: list[str]) -> None:
    log_to_stderr()
    for package in ("bitsandbytes", "torchao", "torch.utils._pytree"):  # as in conf/run.yaml
        logging.getLogger(package).setLevel(logging.ERROR)
    options, words = parse_options(arguments)
    check(options, words)
    if options.budget:
        budget(options, words)
        return
    experiments: dict[str, Experiment] = {}
    for quant in options.formats:
        experiments[quant] = build(compose([*words, *format_words(quant)]))
        require_gpu(experiments[quant].device)
    first = experiments[options.formats[0]]
    first.model.check_files()
    first.task.check()
    for experiment in experiments.values():
        experiment.check_calibration()
    out = options.out or Path(first.root) / "probes" / f"{first.model.name}-{first.task.name}"
    reason = unwritable(out)
    require(reason is None, f"cannot write to {out}: {reason}; give another folder, out=DIR")
    from qerl_bench.probe.one_model import probe, runnable  # with torch, which nothing above waits for
    from qerl_studies.report.model_page import model_page

    experiments = runnable(experiments)
    first = next(iter(experiments.values()))
    first.check_model()
    out.mkdir(parents=True, exist_ok=True)
    record, rows, parts = probe(experiments, options, "task.answer_format" in keys_of(words), out)
    record = {"words": words, **record}
    record["advice"] = advice(record)
    with written_by_one(out):
        write_atomically(out / "probe.json", json.dumps(record, indent=1))
        write_atomically(out / "probe.md", text := markdown(record))
        parquet.write_table(rows, out / "answers.parquet", compression="zstd")
        write_atomically(out / "probe.html", model_page(record, rows.to_pylist()))
        parts.drop()
    print(text, *(out / name for name in ("probe.html", "probe.md", "probe.json", "answers.parquet")), sep="\n")


def budget(options: Any, words: Sequence[str]) -> None:
    """Measure all cells of a precision budget and write its page, figure and tables."""
    from qerl_bench.probe.budget import budget_of  # with torch
    from qerl_studies.figures.style import save  # with matplotlib, as the next
    from qerl_studies.probes import budget_page

    record, out, parts = budget_of(options, words)
    if options.copy is not None:
        print(f"copy={options.copy} is measured. When all copies are, the same command without copy= writes the page")
        return
    with written_by_one(out):
        write_atomically(out / "budget.json", json.dumps(record, indent=1))
        write_atomically(out / "budget.csv", budget_page.table(record))
        write_atomically(out / "budget.md", text := budget_page.markdown(record))
        save(budget_page.figure(record), out / "budget")
        parts.drop()
    print(text, *(out / f"budget.{kind}" for kind in ("md", "svg", "csv", "json")), sep="\n")


def written_by_one(out: Path) -> Lock:
    """Of processes that measured the same, each writes its results by itself."""
    return wait_for_lock(out / ".writing.lock", f"the writing of {out}")


def parse_options(arguments: Sequence[str]) -> tuple[Any, list[str]]:
    """The options of this command, and the words of a run among `arguments`."""
    search_path, others = split_search_path(arguments)
    reader = parser()
    own = [word for word in others if word.startswith("-") or reader.is_own(word)]
    options = reader.parse_args(own)
    return options, [*(word for word in others if word not in own), *search_path]


def keys_of(words: Sequence[str]) -> set[str]:
    return {word.lstrip("+").partition("=")[0] for word in words}


def check(options: Any, words: Sequence[str]) -> None:
    """Raise ConfigError for values that cannot be."""
    low, high = TEMPERATURES
    require(
        bool({"model", "experiment"} & keys_of(words)),
        "a probe looks at a model: give one, model=ORG/NAME, a folder, or a GGUF file, and a task",
    )
    check_fields(options, "", questions=count(2), texts=count(0), rise=number(0, 1))
    check_fields(options, "", samples=count(1 if options.budget else 2))
    check_fields(options, "", split=one_of("train", "held_out"), contamination=count(0), copies=count(0))
    for name in options.budget:
        one_of(*NAMES)("each of budget", name)
    require(options.copies == 0 or bool(options.budget), "copies are of a budget: give its parts, budget=weights,keys")
    require(
        options.copy is None or 0 <= options.copy < options.copies,
        f"copy is one of copies, from 0: copy={options.copy} with copies={options.copies} is none",
    )
    require(
        not options.copies or "model.dither" not in keys_of(words),
        "copies are model.dither=0, 1 and so on: leave model.dither out, or copies",
    )
    require(options.contamination != 1, "contamination must be 0 or at least 2 questions of each part, got 1")
    for sigma in options.sigmas:
        number(above=0)("each of sigmas", sigma)
    require(
        1 in options.temperatures
        and all(is_number(one) and (one == 0 or low <= one <= high) for one in options.temperatures),
        f"temperatures must be 0 (greedy) or from {low:g} to {high:g}, with 1, which training samples at, got "
        f"{', '.join(f'{one:g}' for one in options.temperatures)}",
    )
    for name in options.answer_formats or ():
        one_of(*ANSWER_FORMATS)("each of answer_formats", name)
    for key in ("formats", "answer_formats", "temperatures", "sigmas", "budget"):
        values = [f"{one}" for one in getattr(options, key) or ()]
        require(len({*values}) == len(values), f"{key}={','.join(values)} names one twice")
    for key, why in (REFUSED | REFUSED_IN_BUDGET if options.budget else REFUSED).items():
        given = any(one == key or (key == "aqn" and one.startswith("aqn.")) for one in keys_of(words))
        require(not given, f"a probe takes no {key}: {why}")
    default = parser()
    named = [key for key in ASKED_ELSE if getattr(options, key) != default.get_default(key)]
    require(not (options.budget and named), f"a budget asks nothing else: leave out {', '.join(named)}")
