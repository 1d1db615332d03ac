"""The pages of the pilot, from what was packed: what the rules of pilot.md say.

    python studies/real-2026/pilot.py

Writes pilot/results/rates-MODEL/rates.md from the folders pilot/data/rates-MODEL and pilot/data/rates-MODEL-*, and
controls.md and full.md likewise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from qerl_core.exits import guarded
from qerl_core.process.arguments import KeyValueParser
from qerl_core.rundir.durable import write_atomically
from qerl_core.statistics import Estimate, mean_ci
from qerl_studies.runs.comparable import load_runs
from qerl_studies.runs.load import Run
from qerl_studies.runs.measure import late_mean
from qerl_studies.tables.markdown import markdown_table

HERE = Path(__file__).resolve().parent / "pilot"
EARLY, LATE = (1, 5), (31, 40)  # steps
PAYS = 0.01  # by how much an arm with more exploration ends above BF16
SPARE = 1e-4  # of full training: counts only if the rule takes the rate before it (amendments 7 and 8)


def main(arguments: list[str] | None = None) -> None:
    KeyValueParser(__doc__).parse_args(arguments)
    for kind, page_of in PAGES.items():
        for name in folders_of(kind):
            file = HERE / "results" / name / f"{kind}.md"
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, page_of(name))
            print(file)


def runs_in(name: str) -> list[Run]:
    return load_runs(folders_of(name.partition("-")[0])[name], mixed_code=True)


def folders_of(kind: str) -> dict[str, list[Path]]:
    """The folders of each model, by the name of its first: rates-15b has rates-15b and rates-15b-up."""
    found: dict[str, list[Path]] = {}
    for folder in sorted((HERE / "data").glob(f"{kind}-*")):
        found.setdefault("-".join(folder.name.split("-")[:2]), []).append(folder)
    return found


def taken_rate(runs: Sequence[Run], spare: float | None = None) -> tuple[float, float, float, float]:
    """What the rule takes, the rate with the best late reward, that reward and its standard error.

    The rate `spare` counts only if the rule takes the largest of the others without it.
    """
    pairs = pairs_of(runs)
    others = [run for run in runs if run.option("optim.lr") != spare]
    if len(others) < len(runs):
        found = taken_rate(others)
        if found[0] < max(pairs_of(others)):
            return found
    late = {rate: late_reward(pair) for rate, pair in pairs.items() if not any(map(diverged, pair))}
    best = max(late, key=lambda rate: late[rate])
    error = (late[best] * (1 - late[best]) / completions_of(pairs[best])) ** 0.5
    return max(rate for rate in late if late[rate] >= late[best] - error), best, late[best], error


def pairs_of(runs: Sequence[Run]) -> dict[float, list[Run]]:
    """Of the rates with a run in each format that there is, those."""
    by_rate = {(run.option("optim.lr"), run.option("quant.name")): run for run in runs}
    formats = sorted({quant for _, quant in by_rate})
    rates = sorted(rate for rate in {rate for rate, _ in by_rate} if all((rate, quant) in by_rate for quant in formats))
    return {rate: [by_rate[rate, quant] for quant in formats] for rate in rates}


def late_reward(pair: Sequence[Run]) -> float:
    return sum(mean_of(run, "reward/mean", LATE) for run in pair) / len(pair)


def rates_of(name: str) -> str:
    return rates_page(runs_in(name), HERE / "data" / name / "unfinished.csv")


def controls_of(name: str) -> str:
    return controls_page(runs_in(name))


def full_of(name: str) -> str:
    return rates_page(runs_in(name), HERE / "data" / name / "unfinished.csv", SPARE)


PAGES = {"rates": rates_of, "controls": controls_of, "full": full_of}


def rates_page(runs: Sequence[Run], unfinished: Path, spare: float | None = None) -> str:
    """Reward by rate and format, what the rule takes, and held-out accuracy, which chooses nothing."""
    pairs = pairs_of(runs)
    heads = ["rate", "quant", "reward, steps 1 to 5", "reward, steps 31 to 40", "mean of formats", "entropy, 1 to 5"]
    heads += ["entropy, 31 to 40", "tokens, 1 to 5", "tokens, 31 to 40"]
    lines = [
        [
            f"{rate:g}",
            run.option("quant.name"),
            f"{mean_of(run, 'reward/mean', EARLY):.3f}",
            f"{mean_of(run, 'reward/mean', LATE):.3f}",
            f"{late_reward(pair):.3f}",
            *(f"{mean_of(run, 'entropy', steps):.3f}" for steps in (EARLY, LATE)),
            *(f"{mean_of(run, 'completions/mean_length', steps):.0f}" for steps in (EARLY, LATE)),
        ]
        for rate, pair in pairs.items()
        for run in pair
    ]
    taken, best, reward, error = taken_rate(runs, spare)
    end = max(pairs)
    another = "" if end == spare else f", so {2 * end if spare is None else spare:g} is run too"
    text = (
        f"Best late reward: {reward:.3f} at {best:g}, with a standard error of {error:.4f}. The rule takes "
        f"{taken:g}{f'; it is the end of the range{another}' if taken == end else ''}."
    )
    parts = ["# Rates", markdown_table(heads, lines), text]
    if unfinished.is_file():
        parts += [
            "## Not finished",
            markdown_table(["arm", "steps", "reward, 1 to 5", "reward, 11 on"], stopped(unfinished)),
        ]
    heads = [
        "rate",
        "quant",
        "lenient at 0.6 before",
        "after",
        "gain",
        "gain where both ends are complete",
        "questions",
    ]
    parts += [
        "## Held-out accuracy, per cent and points",
        markdown_table(heads, [accuracy(run) for run in runs_of(pairs)]),
    ]
    return "\n\n".join(parts) + "\n"


def controls_page(runs: Sequence[Run]) -> str:
    """Accuracy of each arm on each copy before, at half time and late, and what the rules of pilot.md say of it."""
    by_arm = {(arm_of(run), run.option("model.dither")): run for run in runs}
    copies = sorted({copy for _, copy in by_arm})
    heads = ["copy", "arm", "before", "half time", "late", "gain", "gain where both ends are complete", "after, greedy"]
    heads += ["tokens before", "late", "cut"]
    lines = [[str(copy), arm, *levels(by_arm[arm, copy])] for copy in copies for arm in ARMS if (arm, copy) in by_arm]
    parts = [
        "# Controls",
        f"Learning rate {' and '.join(f'{rate:g}' for rate in sorted({run.option('optim.lr') for run in runs}))}. "
        "Lenient accuracy at temperature 0.6, per cent; late is the mean of steps 32, 36 and 40; points with intervals "
        "over questions.",
        markdown_table(heads, lines),
        "## The rules",
    ]
    heads = [
        "copy",
        "it learns",
        "late above half time",
        "a random reward's share of the gain",
        "1.2 above",
        "16 above",
    ]
    return "\n\n".join([*parts, markdown_table(heads, [rules(by_arm, copy) for copy in copies])]) + "\n"


ARMS = ("bf16", "nvfp4", "bf16-hot", "bf16-group16", "bf16-random")


def arm_of(run: Run) -> str:
    """The arm of controls.yaml that a run is of."""
    told = {
        "-hot": run.option("rollout.temperature") > 1,
        "-group16": run.option("rollout.group_size") == 16,
        "-random": run.option("reward.name") == "random",
    }
    return run.option("quant.name") + "".join(suffix for suffix, holds in told.items() if holds)


def late_accuracy(run: Run) -> pd.Series:
    return late_mean("sampled", "lenient")(run)


def levels(run: Run) -> list[str]:
    right, ends, tokens = (run.answers("sampled", column) for column in ("lenient", "finished", "tokens"))
    half, last = run.option("steps") // 2, run.option("steps")
    whole = (ends[0] == 1) & (ends[last] == 1)
    late, greedy = late_accuracy(run), run.answers("greedy", "lenient")[last]
    return [
        *(f"{100 * column.mean():.1f}" for column in (right[0], right[half], late)),
        in_points(mean_ci((late - right[0]).tolist())),
        in_points(mean_ci((right[last] - right[0])[whole].tolist())),
        f"{100 * greedy.mean():.1f}",
        *(f"{tokens[step].mean():.0f}" for step in (0, last)),
        f"{1 - ends[last].mean():.1%}",
    ]


def rules(by_arm: Mapping[tuple[str, int], Run], copy: int) -> list[str]:
    """A cell for each rule about controls; a dash where a run is missing."""
    late = {arm: late_accuracy(by_arm[arm, copy]).mean() for arm in ARMS if (arm, copy) in by_arm}
    answers = by_arm["bf16", copy].answers("sampled", "lenient")
    before, half = answers[0].mean(), answers[by_arm["bf16", copy].option("steps") // 2].mean()
    gain = late["bf16"] - before
    above = [late[arm] - late["bf16"] if arm in late else None for arm in ("bf16-hot", "bf16-group16")]
    return [
        str(copy),
        f"{100 * gain:+.1f}",
        f"{100 * (late['bf16'] - half):+.1f}",
        f"{(late['bf16-random'] - before) / gain:.2f}" if "bf16-random" in late else "-",
        *("-" if by is None else f"{100 * by:+.1f}: {'pays' if by >= PAYS else 'does not'}" for by in above),
    ]


def runs_of(pairs: dict[float, list[Run]]) -> list[Run]:
    return [run for pair in pairs.values() for run in pair]


def mean_of(run: Run, metric: str, steps: tuple[int, int]) -> float:
    return float(run.series("train", metric).loc[steps[0] : steps[1]].mean())


def completions_of(pair: Sequence[Run]) -> int:
    """Completions of the late steps, of both formats."""
    each = [run.option("rollout.prompts_per_step") * run.option("rollout.group_size") for run in pair]
    return sum(each) * (LATE[1] - LATE[0] + 1)


def diverged(run: Run) -> bool:
    return bool(run.done.get("collapsed")) or mean_of(run, "reward/mean", LATE) < mean_of(run, "reward/mean", EARLY)


def stopped(file: Path) -> list[list[str]]:
    rows = pd.read_csv(file)
    return [
        [
            str(arm),
            str(of_arm["step"].max()),
            f"{of_arm.loc[of_arm['step'] <= EARLY[1], 'reward/mean'].mean():.3f}",
            f"{of_arm.loc[of_arm['step'] > 10, 'reward/mean'].mean():.3f}",
        ]
        for arm, of_arm in rows.groupby("arm", sort=False)
    ]


def accuracy(run: Run) -> list[str]:
    right, ends = run.answers("sampled", "lenient"), run.answers("sampled", "finished")
    last = run.option("steps")
    gain, whole = right[last] - right[0], (ends[0] == 1) & (ends[last] == 1)
    return [
        f"{run.option('optim.lr'):g}",
        run.option("quant.name"),
        f"{right[0].mean():.1%}",
        f"{right[last].mean():.1%}",
        in_points(mean_ci(gain.tolist())),
        in_points(mean_ci(gain[whole].tolist())) if len(gain[whole]) else "-",
        str(len(gain[whole])),
    ]


def in_points(estimate: Estimate) -> str:
    low, value, high = (100 * number for number in (estimate.low, estimate.value, estimate.high))
    return f"{value:+.1f} [{low:+.1f}, {high:+.1f}]"


if __name__ == "__main__":
    guarded(main)
