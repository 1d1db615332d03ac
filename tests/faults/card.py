"""`python -m tests.faults.card [--minutes N] [--out FILE.csv]`: runs side by side on a card, some short of memory.

Two and three runs share a card. One is left alone; in each other one a phase runs out of memory: an error of PyTorch is
raised there, once or from there on, or another process takes the card's memory at that moment and holds it for a while.
A run ends whole, or in words and whole when the same command follows; its numbers are those of runs to which nothing
happens. Exits with 1 if one is lost. Each card of CUDA_VISIBLE_DEVICES has rounds of its own at the same time. With
`--device cpu` the errors are raised alone, for a rehearsal.

On a GPU equal runs differ by rounding, so a run is compared with one left alone: up to the step in which its texts
differ, its metrics must agree as nearly as those of undisturbed runs do among each other.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from tests.faults.attempt import Ended
from tests.faults.run import WORDS

ROOT = Path(__file__).parents[2]
LIMIT_S = 400.0  # for one run, from its start to its end
COMPARED = ("reward/mean", "entropy", "grad_norm")
ROUNDING = 1e-3  # relative, of these metrics; three times the gap of undisturbed runs counts if it is larger
LARGER = (  # what a card gets: wide enough for the fused kernels, and in the dtype of their recorded steps
    "model.dtype=bfloat16",
    *("model.layers=4", "model.hidden_size=512", "model.heads=8", "model.kv_heads=4", "model.intermediate_size=1024"),
    *("task.max_completion_tokens=64", "rollout.prompts_per_step=8", "rollout.group_size=8", "eval.questions=32"),
    *("engine.invariant=true", "lora.rank=16"),
)
PLACES = {  # phase: the function that runs out of memory, and the one inside of which it does, in a given call
    "load": ("qerl_bench.model_setup", "load_packed", None),
    "preflight": ("qerl_bench.model.preflight", "trainer_logits", None),
    "sampling": ("qerl_bench.engine.hf", "HFEngine._sample", ("qerl_bench.experiment", "train_step", 2)),
    "training": ("qerl_bench.train.update", "forward_backward", ("qerl_bench.experiment", "train_step", 2)),
    "evaluation": ("qerl_bench.engine.hf", "HFEngine._sample", ("qerl_bench.experiment", "evaluate", 2)),
    "saving": ("qerl_bench.train.trainer_state", "save_checkpoint", None),
}
HOW = ("raised once", "raised from there on", "taken by another process")
NO_MEMORY = "no memory is left"
SAID = "said.txt"  # in the folder of a run: where it is, while the campaign waits for it


@dataclass(frozen=True)
class Plant:
    """What happens to a run: nothing, or a shortage."""

    place: str = ""
    how: str = ""

    def __str__(self) -> str:
        return f"{self.place}, {self.how}" if self.place else "left alone"


@dataclass(frozen=True)
class Result:
    """What became of one run. `texts_differ` is the first step whose completions are not those of the run left alone, 0
    if none is; `gap` the largest relative difference of COMPARED before it."""

    card: str
    runs: int
    shares: bool
    plant: str
    result: str
    texts_differ: int = 0
    gap: float = 0.0
    seconds: float = 0.0
    said: str = ""


# --- inside of a run -------------------------------------------------------------------------------------------------


def child(plan: dict[str, Any], words: list[str]) -> int:
    """The run itself, with its shortage planted."""
    import qerl_studies.figures.run as figures
    from qerl_bench.__main__ import main

    figures.run_figures = lambda run_dir: []
    if plan["place"]:
        plant(plan)
    return main(words)


def plant(plan: dict[str, Any]) -> None:
    import torch

    from tests.faults.kinds import cuda_error, replace_function

    module, name, inside = PLACES[plan["place"]]
    on = plan["how"] == "raised from there on"
    entered, open_, struck = 0, inside is None, 0

    def within(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal entered, open_
            entered += 1
            open_ = inside is not None and (entered >= inside[2] if on else entered == inside[2])
            try:
                return function(*arguments, **options)
            finally:
                open_ = False

        return call

    def short(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal struck
            if open_ and (on or not struck):
                struck += 1
                Path(plan["flag"]).touch()
                if plan["how"] != "taken by another process":
                    raise cuda_error()
                if torch.cuda.is_initialized():
                    torch.cuda.empty_cache()  # the other process takes that too
                wait_until(Path(plan["flag"]).with_suffix(".taken").exists, 60)
            return function(*arguments, **options)

        return call

    if inside is not None:
        replace_function(inside[0], inside[1], within)
    replace_function(module, name, short)


def wait_until(happened: Callable[[], bool], limit_s: float) -> bool:
    end = time.monotonic() + limit_s
    while not happened() and time.monotonic() < end:
        time.sleep(0.02)
    return happened()


def hog(flag: Path, gib: float, seconds: float, device: str) -> int:
    """When the file `flag` appears, take `gib` GiB of the device, or all that is free, for some seconds."""
    import torch

    torch.empty(1, device=device)  # a context is there before memory is short
    if not wait_until(flag.exists, LIMIT_S):
        return 0
    held, piece, wanted = [], 2**28, gib * 2**30
    while piece >= 2**20 and sum(one.numel() for one in held) < wanted:
        try:
            held.append(torch.zeros(piece, dtype=torch.uint8, device=device))
        except (torch.OutOfMemoryError, MemoryError, RuntimeError):
            piece //= 2
    print(f"{sum(one.numel() for one in held) / 2**30:.2f} GiB", flush=True)
    flag.with_suffix(".taken").touch()
    time.sleep(seconds)
    return 0


# --- beside the runs -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """What all rounds of a campaign have in common."""

    device: str
    words: tuple[str, ...]
    gib: float
    seconds: float


def environment(root: Path, card: str, runs: int) -> dict[str, str]:
    packages = (str(ROOT / "src"), str(ROOT / "kernels"), *filter(None, [os.environ.get("PYTHONPATH")]))
    shared = {"QERL_BENCH_RUNS_ON_GPU": str(runs)} if runs > 1 else {}
    chosen = {"PYTHONPATH": os.pathsep.join(packages), "CUDA_VISIBLE_DEVICES": card, "OMP_NUM_THREADS": "1"}
    chosen["XDG_CACHE_HOME"] = str(root / "home")  # no check is remembered
    return {**os.environ, **chosen, **shared}  # the launcher's own variable: how many runs share the card


def start(setting: Setting, root: Path, plant: Plant, card: str, shared: int) -> list[subprocess.Popen[bytes]]:
    """The process of a run, whose words go to its file SAID, and that of who takes its memory."""
    plan = json.dumps(asdict(plant) | {"flag": str(root / "flag")})
    root.mkdir(exist_ok=True)
    words = [*setting.words, f"root={root}"]
    commands = [["child", plan, *words]]
    if plant.how == "taken by another process":
        commands.append(["hog", str(root / "flag"), str(setting.gib), str(setting.seconds), setting.device])
    where = environment(root, card, shared)
    with open(root / SAID, "w") as said:
        return [
            subprocess.Popen(
                [sys.executable, "-m", "tests.faults.card", *command],
                cwd=ROOT,
                env=where,
                stdin=subprocess.DEVNULL,
                stdout=said if command[0] == "child" else subprocess.DEVNULL,
                stderr=subprocess.STDOUT,
            )
            for command in commands
        ]


def ended(root: Path, processes: list[subprocess.Popen[bytes]]) -> tuple[int, str]:
    """Exit code and words of a run; -1000 if it hung. Whoever holds its memory goes."""
    process, *others = processes
    try:
        code = process.wait(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        code = -1000
    for one in (process, *others):
        one.kill()
        one.wait()
    return code, (root / SAID).read_text(errors="replace")


def records(root: Path) -> tuple[dict[int, list[str]], dict[int, dict[str, float]]]:
    """Completions and metrics of each step of a run."""
    folder = root / "runs" / "run"
    texts: dict[int, list[str]] = {}
    for line in (folder / "rollouts.jsonl").read_text().splitlines():
        row = json.loads(line)
        texts.setdefault(row["step"], []).append(row["completion"])
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return texts, {row["step"]: row for row in rows if row["kind"] == "train"}


def apart(one: Path, other: Path) -> tuple[int, float]:
    """The first step whose texts differ, 0 if none does, and the largest relative gap of COMPARED before it."""
    (texts, metrics), (other_texts, other_metrics) = records(one), records(other)
    steps = sorted(metrics.keys() | other_metrics.keys())
    if metrics.keys() != other_metrics.keys():
        return steps[0], math.inf
    differ = next((step for step in steps if texts[step] != other_texts[step]), 0)
    pairs = [
        (metrics[step][name], other_metrics[step][name])
        for step in steps
        if not differ or step < differ
        for name in COMPARED
        if name in metrics[step]
    ]
    return differ, max((abs(a - b) / max(abs(a), abs(b), 1e-9) for a, b in pairs), default=0.0)


def judged(setting: Setting, root: Path, code: int, said: str, alone: Path, limit: float, card: str) -> dict[str, Any]:
    """Whether the run ended whole or in words, and whole then; and how far its numbers are from the run `alone`."""
    words = ""
    if "Traceback (most recent call last)" in said or code in (-1000, *range(-64, 0)):
        return {"result": "lost", "said": f"exit code {code}: {Ended(code, said).words}"}
    if code:
        words = Ended(code, said).words
        if NO_MEMORY not in said:
            return {"result": "lost", "said": f"exit code {code}, not about memory: {words}"}
        code, again = ended(root, start(setting, root, Plant(), card, 1))
        if code:
            return {"result": "lost", "said": f"does not continue: exit code {code}: {Ended(code, again).words}"}
    if not (root / "runs" / "run" / "done.json").exists():
        return {"result": "lost", "said": "exit code 0 without done.json"}
    differ, gap = apart(alone, root)
    if gap > limit:
        return {"result": "lost", "said": f"other numbers than {limit:.2g}", "texts_differ": differ, "gap": gap}
    result = "in words, then whole" if words else "whole, in smaller pieces" if NO_MEMORY in said else "whole"
    return {"result": result, "said": words, "texts_differ": differ, "gap": gap}


def rounds(seed: int, setting: Setting) -> Iterator[tuple[list[Plant], bool]]:
    """The runs of each round: one left alone, and one or two short of memory; and whether they keep to equal shares."""
    draw = random.Random(seed)
    while True:
        plants = [Plant(place, how) for place in PLACES for how in HOW]
        draw.shuffle(plants)
        while plants:
            taken = [plants.pop() for _ in range(min(draw.choice((1, 2)), len(plants)))]
            yield [Plant(), *taken], draw.random() < 0.5


def on_card(card: str, place: Path, setting: Setting, seed: int, until: float, add: Callable[[Result], None]) -> None:
    """Rounds on one card until the time is over; first what undisturbed runs differ by."""
    place.mkdir()
    alone, *beside = (place / name for name in ("alone", "beside1", "beside2"))
    for roots in ([alone], beside):
        running = [start(setting, root, Plant(), card, 1) for root in roots]
        for code, said in map(ended, roots, running):
            if code:
                add(
                    Result(
                        card,
                        len(roots),
                        False,
                        "undisturbed",
                        "lost",
                        said=f"exit code {code}: {Ended(code, said).words}",
                    )
                )
                return
    gaps = [apart(alone, root) for root in beside]
    for differ, gap in gaps:
        add(Result(card, len(beside), False, "undisturbed", "whole", differ, gap))
    limit = max(ROUNDING, *(3 * gap for _, gap in gaps))
    for number, (plants, shares) in enumerate(rounds(seed, setting)):
        if time.monotonic() > until:
            return
        began = time.monotonic()
        shared = len(plants) if shares else 1
        roots = [place / f"{number}-{index}" for index in range(len(plants))]
        running = [start(setting, root, plant, card, shared) for root, plant in zip(roots, plants, strict=True)]
        ends = [(*ended(*one), time.monotonic() - began) for one in zip(roots, running, strict=True)]
        for root, plant, (code, said, seconds) in zip(roots, plants, ends, strict=True):
            found = judged(setting, root, code, said, alone, limit, card)
            if not plant.place and NO_MEMORY in said and found["result"] != "lost":
                found["result"] += ", short beside others"
            add(Result(card, len(plants), shares, str(plant), seconds=round(seconds, 1), **found))


def table(results: list[Result]) -> str:
    names = list(dict.fromkeys(result.result for result in results))
    counts = {plant: Counter[str]() for plant in sorted({result.plant for result in results})}
    for result in results:
        counts[result.plant][result.result] += 1
    rows = [f"| {plant} | {' | '.join(str(of[name]) for name in names)} |" for plant, of in counts.items()]
    return "\n".join([f"| shortage | {' | '.join(names)} |", "|---|" + "---:|" * len(names), *rows])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--minutes", type=float, default=10.0, help="begin no round after this time")
    parser.add_argument("--gib", type=float, default=math.inf, help="GiB that another process takes; inf = all")
    parser.add_argument("--seconds", type=float, default=20.0, help="for which it holds them")
    parser.add_argument("--words", nargs="*", default=[], help="further options of the runs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="file for a row of each run")
    chosen = parser.parse_args()
    until = time.monotonic() + 60 * chosen.minutes
    larger = LARGER if chosen.device == "cuda" else ()
    words = (*WORDS, *larger, f"device={chosen.device}", *chosen.words)
    setting = Setting(chosen.device, words, chosen.gib, chosen.seconds)
    if chosen.device == "cpu":
        setting = replace(setting, gib=min(chosen.gib, 0.25))
    results: list[Result] = []
    lock = threading.Lock()

    def add(result: Result) -> None:
        with lock:
            results.append(result)
            print(*asdict(result).values(), sep=", ", flush=True)
            if chosen.out:
                chosen.out.parent.mkdir(parents=True, exist_ok=True)
                with open(chosen.out, "a" if len(results) > 1 else "w", newline="") as file:
                    writer = csv.writer(file, lineterminator="\n")
                    writer.writerows(
                        [[field.name for field in fields(Result)]] * (len(results) == 1)
                        + [list(asdict(result).values())]
                    )

    cards = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",") if chosen.device == "cuda" else [""]
    with tempfile.TemporaryDirectory(prefix="card-") as folder:
        threads = [
            threading.Thread(
                target=on_card, args=(card, Path(folder) / f"card{number}", setting, chosen.seed + number, until, add)
            )
            for number, card in enumerate(cards)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    print(table(results))
    return int(not results or any(result.result == "lost" for result in results))


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        sys.exit(child(json.loads(sys.argv[2]), sys.argv[3:]))
    if sys.argv[1:2] == ["hog"]:
        sys.exit(hog(Path(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]), sys.argv[5]))
    sys.exit(main())
