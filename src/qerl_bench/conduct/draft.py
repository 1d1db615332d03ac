"""`qerl-bench study init=FOLDER`: a design and a protocol from a question, with the power that a budget buys.

    qerl-bench study init=mine/noise model=qwen3-1.7b task=gsm8k quant=nvfp4 contrast=aqn=none,matched \\
        minutes=240 run_minutes=6
    qerl-bench study init=mine/noise ... runs=runs/         # time and spread are read from finished runs

The first value of `contrast` is the arm that others are compared with. Words with other keys are options of every run.
Of one model the units are seeds, so an interval is about that model; model=a,b,c makes each a case of its own. Of one
GGUF file they are copies of it (`model.dither`), each with a seed; as_is=true takes seeds of the file as it is. How
many units fit follows from `minutes`, `run_minutes` and `slots`, after the probe, which asks as many questions as a
tenth of the minutes buys at the price of an answer in a run, and after the search for a dose, if an arm has
aqn=matched, which has draws of noise of another tenth. `sd` is the standard deviation over units of the difference of
two arms, in points of held-out accuracy; `margin` the smallest difference that matters. Prints what the minutes buy,
and writes FOLDER/study.yaml and FOLDER/protocol.md, which is to be finished before the first run.
"""

from __future__ import annotations

import math
import shlex
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from qerl_bench.conduct.deadline import END_S
from qerl_bench.conduct.run_time import minutes_of
from qerl_bench.config import build, compose
from qerl_core.checks import ConfigError, check_fields, count, number, require
from qerl_core.options.composer import Composer
from qerl_core.options.files import options_of
from qerl_core.options.place_words import words_of
from qerl_core.options.user_options import folders, folders_in, split_search_path
from qerl_core.process.arguments import KeyValueParser, output_folder
from qerl_core.statistics import POWER, Estimate
from qerl_studies.claims.evaluate import DIRECTION
from qerl_studies.design.design import read_design
from qerl_studies.design.looks import shown_runs
from qerl_studies.figures.headline import SAMPLED, effect_on
from qerl_studies.runs.comparable import load_runs
from qerl_studies.runs.own_contrasts import factor_of, own_contrasts
from qerl_studies.runs.settings import group_by_setting
from qerl_studies.tables.templates import templates

MOST_SEEDS = 64
SHARE = 0.1  # of the minutes, for the probe and for the dose, at most but for the least number of each
SAMPLES = 16  # answers to each question of the probe
QUESTIONS = (16, 512)  # of the probe: to know the share of right answers to 12 points, and to 2
DRAWS = (1, 8)  # of noise, of the dose
PROMPTS = 32  # of each draw
TRIED = 7  # sizes of noise, as searches for a dose take in the studies of this project


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What a study may cost, and how noisy it is; differences and their spread in points of held-out accuracy."""

    minutes: float
    run_minutes: float
    slots: int
    models: int
    arms: int
    formats: int  # of weights, in each of which the probe asks
    answers: int  # of one run
    dosed: int  # answers to a prompt of the dose; 0: no arm has one
    copies: bool = False  # of a GGUF file, each probed and dosed: what `seeds` counts
    checked: bool = True
    margin: float
    sd: float

    def __post_init__(self) -> None:
        positive = number(above=0)
        checks = {"minutes": positive, "run_minutes": positive, "margin": positive, "sd": positive}
        counts = {"slots": count(), "models": count(), "arms": count(2), "formats": count(), "answers": count()}
        counts["dosed"] = count(0)
        check_fields(self, "", **checks, **counts)
        if not self.checked:
            return
        dose = f", {self.draws} draws of the dose" if self.dosed else ""
        require(
            self.seeds >= 2,
            f"minutes={self.minutes:g} are enough for a probe of {self.questions} questions{dose} and "
            f"{self.seeds} {self.unit} of {self.arms} arms at run_minutes={self.run_minutes:g}, and an interval needs "
            "two: give more minutes, or make runs shorter (steps)",
        )

    @property
    def seeds(self) -> int:
        """How many fit after probe and dose and before the end, in whole rounds of `slots` runs; of copies those with a
        run each."""
        if self.copies:
            each = (replace(self, copies=False, models=copies, checked=False) for copies in range(1, MOST_SEEDS + 1))
            return sum(one.seeds >= 1 for one in each)
        left = self.minutes - END_S / 60 - self.probe_minutes - self.dose_minutes
        rounds = max(0, math.floor(left / self.run_minutes))
        return min(MOST_SEEDS, rounds * self.slots // (self.arms * self.models))

    @property
    def unit(self) -> str:
        return "copies" if self.copies else "seeds"

    @property
    def probe_minutes(self) -> float:
        return self.questions * self.question_minutes

    @property
    def dose_minutes(self) -> float:
        return self.draws * self.draw_minutes

    @property
    def runs(self) -> int:
        return self.arms * self.seeds * self.models

    def bought(self) -> str:
        """What the minutes buy, in the order in which they are spent."""
        runs = math.ceil(self.runs / self.slots) * self.run_minutes
        dose = f"; {self.draws} draws of noise, {self.dose_minutes:.3g} min" if self.dosed else ""
        return (
            f"{self.minutes:g} minutes buy a probe of {self.questions} questions, {self.probe_minutes:.3g} min{dose}; "
            f"{self.runs} runs of {self.run_minutes:.3g} min, {self.slots} at a time, {runs:.3g} min"
        )

    @property
    def question_minutes(self) -> float:
        """What a question of the probe costs: its answers in all formats."""
        return SAMPLES * self.formats * self._answer_minutes

    @property
    def draw_minutes(self) -> float:
        """What a draw of the dose costs: a group to each prompt, without noise and with each size that is tried, and
        to as many others without and with the one found."""
        return PROMPTS * self.dosed * (1 + TRIED + 2) * self._answer_minutes

    @property
    def _answer_minutes(self) -> float:
        """What an answer costs before the runs, as in one of them, `slots` models at a time."""
        return self.run_minutes / self.answers * math.ceil(self.probed_models / self.slots)

    @property
    def probed_models(self) -> int:
        """Models that are probed, or copies of one."""
        return self.seeds if self.copies else self.models

    @property
    def questions(self) -> int:
        """How many the probe asks."""
        return self._bought(QUESTIONS, self.question_minutes)

    @property
    def draws(self) -> int:
        """How many the dose has."""
        return self._bought(DRAWS, self.draw_minutes)

    def _bought(self, span: tuple[int, int], minutes: float) -> int:
        """How many of `minutes` each a share of the whole buys, within a span."""
        least, most = span
        return min(most, max(least, math.floor(SHARE * self.minutes / minutes))) if minutes else most

    @property
    def probe_error(self) -> float:
        """The largest standard error of the share of right answers in the probe, in points."""
        return 50 / math.sqrt(self.questions)

    @property
    def level(self) -> float:
        """Of a one-sided test of each arm against the first."""
        return DIRECTION / 2 / (self.arms - 1)

    def power(self, seeds: int) -> float:
        """The probability of finding a difference of one margin."""
        return self._estimate(seeds).power(self.margin, self.level)

    def detectable(self, seeds: int) -> float:
        """The smallest difference that is found with a probability of POWER."""
        return self._estimate(seeds).detectable(self.level)

    @property
    def needed(self) -> int | None:
        """Seeds that find one margin with a probability of POWER; None if thousands would not."""
        return self._estimate(2).repetitions_needed(self.margin, self.level)

    def _estimate(self, seeds: int) -> Estimate:
        return Estimate(0.0, self.sd / math.sqrt(seeds), seeds, seeds - 1)


def parser() -> KeyValueParser:
    options = KeyValueParser(__doc__)
    options.add_argument(
        "--init", type=output_folder, required=True, help="folder to write study.yaml and protocol.md to"
    )
    options.add_argument("--model", nargs="+", required=True, help="an option, hub id, folder or GGUF file; or several")
    options.add_argument("--contrast", required=True, help="KEY=FIRST,OTHER: what the arms differ in")
    options.add_argument(
        "--margin", type=float, default=1.0, help="smallest difference that matters, points (default: 1)"
    )
    options.add_argument("--minutes", type=float, required=True, help="for the whole study")
    options.add_argument("--run-minutes", type=float, default=None, help="of one run, if no finished one tells")
    options.add_argument("--slots", type=int, default=1, help="runs at a time (default: 1)")
    options.add_argument("--sd", type=float, default=3.0, help="points, if no finished runs tell (default: 3)")
    options.add_argument("--as-is", action="store_true", help="seeds of a GGUF file as it is, in place of copies of it")
    options.add_argument("--runs", type=Path, nargs="+", default=[], help="finished runs of this model and task")
    return options


def draft(arguments: Sequence[str]) -> None:
    """Write the two files. Raises ConfigError for what cannot be a study, before anything is written."""
    search_path, given = split_search_path(arguments)
    reader = parser()
    own = [word for word in given if not word.startswith("-") and reader.is_own(word)]
    words = [word for word in given if "=" in word and not word.startswith("-") and word not in own]
    options = reader.parse_args([*own, *(word for word in given if word not in own and word not in words)])
    key, equals, values = options.contrast.partition("=")
    levels = values.split(",")
    require(
        bool(equals) and len(levels) > 1 and all(levels) and len({*levels}) == len(levels),
        f"contrast={options.contrast} must be KEY=FIRST,OTHER, each once, such as aqn=none,exp or optim.lr=1e-5,3e-5",
    )
    known = options_of(folders(), "model")
    first = words_of(options.model[0], known)
    for model in options.model:
        build(compose([*words_of(model, known), *words, *search_path])).model.check_files()
    trees = [Composer().tree([*first, *words, f"{key}={level}", *search_path]) for level in levels]
    copies = not options.as_is and len(options.model) == 1 and Path(str(trees[0]["model"].get("id"))).suffix == ".gguf"
    budget, measured = budget_of(options, key, trees, copies)
    own_folders = "".join(f"--config-dir {shlex.quote(str(folder))} " for folder in folders_in(search_path))
    content = {
        "title": options.init.name,
        "folder": shlex.quote(str(options.init)),
        "own_folders": own_folders,
        "copies": copies,
        "words": [*(first if copies else ()), *words],
        "models": options.model,
        "key": key,
        "arms": [(level.replace("/", "-"), f"{key}={level}") for level in levels],
        "budget": budget,
        "measured": measured,
        "samples": SAMPLES,
        "prompts": PROMPTS,
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "power": POWER,
        "rows": sorted({budget.seeds, *((budget.needed,) if budget.needed else ())}),
    }
    pages = templates("qerl_bench.conduct")
    texts = {name: pages.get_template(name).render(content) for name in ("study.yaml", "protocol.md")}
    with TemporaryDirectory() as folder:
        (Path(folder) / "study.yaml").write_text(texts["study.yaml"])
        read_design(Path(folder) / "study.yaml", search_path)
    files = {options.init / name: text for name, text in texts.items()}
    for file in files:
        require(not file.exists(), f"{file} is there already: choose another folder, init=FOLDER, or delete it")
    options.init.mkdir(parents=True, exist_ok=True)
    for file, text in files.items():
        file.write_text(text)
    print(*files, sep="\n")
    print(budget.bought())
    print(
        f"{budget.arms} arms x {budget.seeds} {budget.unit} find a difference of {budget.margin:g} points with a "
        f"probability of {budget.power(budget.seeds):.0%}, and one of {budget.detectable(budget.seeds):.1f} with "
        f"{POWER:.0%}"
    )


def answers_of(tree: Mapping[str, Any]) -> int:
    """How many answers a run of this config samples: in training, and in both evaluations if their size is given."""
    rollout, evaluation = tree["rollout"], tree["eval"]
    trained = tree["steps"] * rollout["prompts_per_step"] * rollout["group_size"]
    return max(1, trained + 2 * (evaluation.get("questions") or 0) * evaluation.get("samples", 0))


def budget_of(options: Namespace, key: str, arms: Sequence[Mapping[str, Any]], copies: bool) -> tuple[Budget, bool]:
    """The budget of arms with these configs, and whether its spread is that of finished runs: the largest of a
    contrast in `key`."""
    run_minutes, sd, spreads = options.run_minutes, options.sd, []
    if options.runs:
        runs = [run for run in load_runs(shown_runs(options.runs)) if run.finished]
        where = ", ".join(map(str, options.runs))
        run_minutes = run_minutes or minutes_of(runs, arms, where)
        for one in own_contrasts(group_by_setting(runs)):
            effect = effect_on(one.treated.by_cell, one.control.by_cell, SAMPLED)
            if one.factor == factor_of(key) and effect and effect.fixed.has_interval:
                spreads.append(100 * effect.fixed.stderr * math.sqrt(effect.fixed.n))
        sd = max(spreads, default=sd)
    if run_minutes is None:
        raise ConfigError(
            "how long a run takes is not known: give run_minutes=6, or runs=FOLDER with a finished run; "
            "qerl-bench estimate says it for a GPU"
        )
    given: dict[str, Any] = {key: getattr(options, key) for key in ("minutes", "slots", "margin")}
    given |= {"models": len(options.model), "arms": len(arms), "formats": len({arm["quant"]["name"] for arm in arms})}
    given["dosed"] = max(arm["rollout"]["group_size"] * arm["aqn"]["name"].startswith("matched") for arm in arms)
    given |= {"answers": min(map(answers_of, arms)), "run_minutes": run_minutes, "sd": sd, "copies": copies}
    return Budget(**given), bool(spreads)
