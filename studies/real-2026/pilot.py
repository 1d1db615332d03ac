"""The pages of the pilot, from what was packed: what the rules of pilot.md say.

    python studies/real-2026/pilot.py

Writes pilot/results/rates-MODEL/rates.md from the folders pilot/data/rates-MODEL and pilot/data/rates-MODEL-*.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from qerl_bench.commands.exits import guarded
from qerl_bench.process.arguments import KeyValueParser
from qerl_bench.rundir.durable import write_atomically
from qerl_bench.statistics import Estimate, mean_ci
from qerl_bench.studies.runs.comparable import load_runs
from qerl_bench.studies.runs.load import Run
from qerl_bench.studies.tables.markdown import markdown_table

HERE = Path(__file__).resolve().parent / "pilot"
FORMATS = ("bf16", "nvfp4")
EARLY, LATE = (1, 5), (31, 40)  # steps
END = 1e-4  # of the range of rates


def main(arguments: list[str] | None = None) -> None:
    KeyValueParser(__doc__).parse_args(arguments)
    for name, folders in folders_of("rates").items():
        out = HERE / "results" / name
        out.mkdir(parents=True, exist_ok=True)
        write_atomically(out / "rates.md", rates_page(load_runs(folders), HERE / "data" / name / "unfinished.csv"))
        print(out / "rates.md")


def folders_of(kind: str) -> dict[str, list[Path]]:
    """The folders of each model, by the name of its first: rates-15b has rates-15b and rates-15b-up."""
    found: dict[str, list[Path]] = {}
    for folder in sorted((HERE / "data").glob(f"{kind}-*")):
        found.setdefault("-".join(folder.name.split("-")[:2]), []).append(folder)
    return found


def taken_rate(runs: Sequence[Run]) -> tuple[float, float, float, float]:
    """What the rule takes, the rate with the best late reward, that reward and its standard error."""
    pairs = pairs_of(runs)
    late = {rate: late_reward(pair) for rate, pair in pairs.items() if not any(map(diverged, pair))}
    best = max(late, key=lambda rate: late[rate])
    error = (late[best] * (1 - late[best]) / completions_of(pairs[best])) ** 0.5
    return max(rate for rate in late if late[rate] >= late[best] - error), best, late[best], error


def pairs_of(runs: Sequence[Run]) -> dict[float, list[Run]]:
    """Of the rates with a run in both formats, those two."""
    by_rate = {(run.option("optim.lr"), run.option("quant.name")): run for run in runs}
    rates = sorted(rate for rate in {rate for rate, _ in by_rate} if all((rate, quant) in by_rate for quant in FORMATS))
    return {rate: [by_rate[rate, quant] for quant in FORMATS] for rate in rates}


def late_reward(pair: Sequence[Run]) -> float:
    return sum(mean_of(run, "reward/mean", LATE) for run in pair) / len(pair)


def rates_page(runs: Sequence[Run], unfinished: Path) -> str:
    """Reward by rate and format, what the rule takes, and held-out accuracy, which chooses nothing."""
    pairs = pairs_of(runs)
    heads = ["rate", "quant", "reward, steps 1 to 5", "reward, steps 31 to 40", "both formats", "entropy, 1 to 5"]
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
    taken, best, reward, error = taken_rate(runs)
    text = (
        f"Best late reward: {reward:.3f} at {best:g}, with a standard error of {error:.4f}. The rule takes "
        f"{taken:g}{f'; it is the end of the range, so {2 * END:g} is run too' if taken == END else ''}."
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
        in_points(mean_ci(gain[whole].tolist())),
        str(len(gain[whole])),
    ]


def in_points(estimate: Estimate) -> str:
    low, value, high = (100 * number for number in (estimate.low, estimate.value, estimate.high))
    return f"{value:+.1f} [{low:+.1f}, {high:+.1f}]"


if __name__ == "__main__":
    guarded(main)
