"""What happens to files while a run is alive, between its attempts, and to what is kept of an untrained base.

Whoever ends with 0 has the numbers of an undisturbed run; anything else is said in words, and what they ask for helps.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests.faults.attempt import Ended
from tests.faults.damage import DAMAGES
from tests.faults.foreign import FOLDER, killed_in_step_3, own_copy
from tests.faults.run import SURVIVED, Case, Lost, Outcome, numbers, remedy, require_killed, require_whole

Harm = Callable[[Path], object]
ALIVE = (
    *("metrics.jsonl", "rollouts.jsonl", "seals.jsonl", "config.yaml", "env.json", "eval.json", "samples.parquet"),
    *("prompt.txt", "engine.json", "layers.parquet"),
)
CHECKPOINT = "checkpoints/step_000002/trainer.pt"


def while_alive() -> dict[str, Callable[[Case], Outcome]]:
    return {
        f"{file} before step {step}: {name}": partial(harmed_alive, file, step, harm)
        for file in (*ALIVE, CHECKPOINT)
        for step in (2, 3, 4)
        if file != CHECKPOINT or step > 2
        for name, harm in DAMAGES.items()
    } | {
        f"the folder before step {step} is {name}": partial(harmed_alive, ".", step, harm)
        for step in (3, 4)
        for name, harm in (("emptied", emptied), ("as before step 2", put_back))
    }


def emptied(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def put_back(folder: Path) -> None:
    shutil.rmtree(folder)
    (folder.parent / "snapshot").rename(folder)


def before_step(number: int, folder: Path, harm: Callable[[], object]) -> None:
    """Call `harm` before step `number` of this process; a copy of the folder as it was before step 2 is beside it."""
    import qerl_bench.experiment as loop

    step = loop.train_step

    def train_step(*given: Any) -> Any:
        if given[-1] == 2:
            shutil.copytree(folder, folder.parent / "snapshot", ignore=shutil.ignore_patterns(".lock*"))
        if given[-1] == number:
            harm()
        return step(*given)

    loop.train_step = train_step


def harmed_alive(file: str, step: int, harm: Harm, case: Case) -> Outcome:
    path = case.folder / file
    ended = case.attempt(partial(before_step, step, case.folder, partial(harm, path)))
    shutil.rmtree(case.folder.parent / "snapshot", ignore_errors=True)
    if ended.code == 0:
        case.require_numbers()
        require_whole(case.folder)
        return SURVIVED
    said = case.in_words(ended, 1, 2, 75)
    for _ in range(4):
        ended = case.attempt()
        if ended.code == 0:
            break
        remedy(case, case.in_words(ended, 2), Path(file).name)
    return case.ends(said=said)


# Between a kill and the next attempt.


def put(file: str, key: str, value: Any) -> Harm:
    def harm(folder: Path) -> None:
        content = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps(content | {key: value}))

    return harm


def edit(file: str, old: str, new: str) -> Harm:
    def harm(folder: Path) -> None:
        text = (folder / file).read_text()
        assert old in text, f"{file} has no {old}"
        (folder / file).write_text(text.replace(old, new))

    return harm


CHANGES: dict[str, tuple[str, Harm]] = {  # what is changed, and by what name it is refused
    "one merge more": ("tokenizer.json", edit("tokenizer.json", '"merges": []', '"merges": [["a", "b"]]')),
    "another template": ("chat_template", lambda folder: (folder / "chat_template.jinja").write_text("{{ messages }}")),
    "another end": ("generation_config.json", put("generation_config.json", "eos_token_id", 3)),
    "another epsilon": ("config.json", put("config.json", "rms_norm_eps", 1e-3)),
    "a training answer": ("the training data", edit("train.jsonl", "#### 6", "#### 7")),
    "another vocabulary": ("tokenizer_config.json", put("tokenizer_config.json", "extra_special_tokens", {})),
}


def between_attempts() -> dict[str, Callable[[Case], Outcome]]:
    return {name: partial(changed, named, harm) for name, (named, harm) in CHANGES.items()}


def of_file(name: str, harm: Callable[[Path], object]) -> Harm:
    return lambda folder: harm(folder / name)


def reordered(file: Path) -> None:
    file.write_text("".join(reversed(file.read_text().splitlines(keepends=True))))


def one_row_more(file: Path) -> None:
    file.write_text(file.read_text() + json.dumps({"question": "What is 99 + 1?", "answer": "#### 100"}) + "\n")


EVALUATION: dict[str, tuple[str, Harm]] = {  # what an evaluation reads
    "a question": ("the held-out data", edit("eval.jsonl", "What is 22 +", "How much is 22 +")),
    "an answer": ("the held-out data", edit("eval.jsonl", "#### 25", "#### 26")),
    "every answer": ("the held-out data", edit("eval.jsonl", "#### ", "#### 1")),
    "the order of questions": ("the held-out data", of_file("eval.jsonl", reordered)),
    "the training questions in their place": (
        "training questions of task=gsm8k are also in its test",
        lambda folder: shutil.copy(folder / "train.jsonl", folder / "eval.jsonl"),
    ),
    "a question more": ("eval", of_file("eval.jsonl", one_row_more)),
    "a token's number": ("tokenizer.json", edit("tokenizer.json", '"a": ', '"a ": ')),
    "the template's begin": ("chat_template", edit("chat_template.jinja", "{%", " {%")),
    "no template": ("chat_template", of_file("chat_template.jinja", Path.unlink)),
    **{
        f"{file}: {name}": (file.partition(".")[0].replace("_config", ""), of_file(file, harm))
        for file in ("eval.jsonl", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
        for name, harm in DAMAGES.items()
    },
}


def killed_in_last_evaluation() -> None:
    import qerl_bench.experiment as loop

    evaluate = loop.evaluate
    count = [0]

    def evaluated(*given: Any, **more: Any) -> Any:
        count[0] += 1
        if count[0] == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return evaluate(*given, **more)

    loop.evaluate = evaluated


STOPS = {"in step 3": killed_in_step_3, "in the last evaluation": killed_in_last_evaluation}


def evaluation_inputs() -> dict[str, Callable[[Case], Outcome]]:
    return {
        f"{name}, {where}": partial(changed, named, harm, stop=stop, may_pass=": " in name or "more" in name)
        for where, stop in STOPS.items()
        for name, (named, harm) in EVALUATION.items()
    }


def changed(
    named: str | None,
    harm: Harm,
    case: Case,
    stop: Callable[[], object] = killed_in_step_3,
    may_pass: bool = False,
) -> Outcome:
    """A run of a model and data of one's own is killed, one input changes, and comes back after the refusal. With
    `named` None nothing is refused; what `may_pass` is refused, or ends with the same numbers."""
    path, hub = own_copy(FOLDER, case)
    for name, first in (("train", 0), ("eval", 20)):
        lines = [{"question": f"What is {n} + 1?", "answer": f"#### {n + 1}"} for n in range(first, first + 20)]
        (path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    files = [f"task.{name}_file='{path}/{name}.jsonl'" for name in ("train", "eval")]
    words = ["task=gsm8k", "task.max_completion_tokens=6", *files, "eval.questions=8"]

    def attempt(sabotage: Callable[[], object] | None = None) -> Ended:
        return hub.attempt(sabotage, *words)

    undisturbed = attempt()
    if undisturbed.code != 0:
        raise Lost(f"the run without faults ended with {undisturbed.code}: {undisturbed.words}")
    expected = Case(case.root, numbers(case.folder), case.stock, base=hub.base)
    shutil.rmtree(case.folder)
    require_killed(attempt(stop))
    kept = {file.name: file.read_bytes() for file in path.iterdir()}
    harm(path)
    ended = attempt()
    said = ""
    if ended.code != 0 or not (named is None or may_pass):
        said = case.in_words(ended, 2)
        if str(named) not in said and not ("tokenizer" in said and str(named) == "chat_template"):
            raise Lost(f"does not name {named}: {said}")
        for file in path.iterdir():
            file.unlink()
        for name, content in kept.items():
            (path / name).write_bytes(content)
    return expected.ends(*words, said=said)


# What was measured of an untrained base.


def other_score(file: Path) -> None:
    content = json.loads(file.read_text())
    content["measured"]["scores"][0]["value"] += 0.5
    file.write_text(json.dumps(content))


def other_verdicts(file: Path) -> None:
    file.write_text(file.read_text().replace('"correct": false', '"correct": true'))


def evaluations() -> dict[str, Callable[[Case], Outcome]]:
    harms = DAMAGES | {"another score": other_score, "other verdicts": other_verdicts}
    return {name: partial(damaged_evaluation, harm) for name, harm in harms.items()}


def damaged_evaluation(harm: Harm, case: Case) -> Outcome:
    """The next run of that base has the numbers of the first, whatever became of the file."""
    if (ended := case.attempt()).code != 0:
        raise Lost(f"exit code {ended.code}: {ended.words}")
    shutil.rmtree(case.folder)
    (file,) = case.root.glob("cache/evaluations/*.json")
    harm(file)
    return case.ends()
