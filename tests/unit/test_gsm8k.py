"""task=gsm8k and its data files: on invented problems always, on the real files where QERL_DATA names their folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from qerl_bench.errors import BadInput
from qerl_bench.task import datafile, gsm8k
from qerl_bench.task.answers import parse_number
from qerl_bench.task.base import INSTRUCTION
from qerl_bench.task.datafile import epoch_order, read_rows, training_rows
from qerl_bench.task.gsm8k import Gsm8k

ROOT = Path(__file__).parents[2]
TINY = ROOT / "tests" / "assets" / "gsm8k_tiny.jsonl"


def spec(train: Path | str | None, test: Path | str | None) -> Gsm8k:
    """The task exactly as conf/task/gsm8k.yaml has it, but for the files."""
    options = yaml.safe_load((ROOT / "conf" / "task" / "gsm8k.yaml").read_text())
    assert options.pop("_target_") == "qerl_bench.task.gsm8k.Gsm8k"
    files = {"train_file": train and str(train), "eval_file": test and str(test)}
    return Gsm8k(**options | files)


@pytest.fixture
def tiny(tmp_path: Path) -> Gsm8k:
    """The first eight invented problems to train on, the last four held out."""
    lines = TINY.read_text(encoding="utf-8").splitlines(keepends=True)
    (tmp_path / "train.jsonl").write_text("".join(lines[:8]), encoding="utf-8")
    (tmp_path / "test.jsonl").write_text("".join(lines[8:]), encoding="utf-8")
    return spec(tmp_path / "train.jsonl", tmp_path / "test.jsonl")


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def problem(question: str, gold: str) -> dict[str, str]:
    return {"question": question, "answer": f"Because.\n#### {gold}"}


# --- the data file ---


def test_rows_come_in_file_order_with_only_the_keys_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": "1", "b": 2}\r\n{"a": "x\\u2028y\xe2\x80\xa8z", "c": null}')
    assert read_rows(path, ("a",)) == [{"a": "1"}, {"a": "x\u2028y\u2028z"}]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"\n", "is empty"),
        (b'{"a": "1"}\n{"a": \n', "line 2: not a line of JSON"),
        (b'{"a": "1"}\n\n{"a": "1"}\n', "line 2: not a line of JSON"),
        (b'{"a": "1"}\n{"a": "\xff"}\n', "line 2: not a line of JSON"),
        (b'{"a": "1"}\n' + b"[" * 200_000, "line 2: not a line of JSON"),
        (b'{"a": "1"}\n["a"]\n', "line 2: a JSON object with 'a' is needed, got list"),
        (b'{"a": "1"}\n{"b": "1"}\n', "line 2: the key 'a' is missing; the line has 'b'"),
        (b'{"a": "1"}\n{"a": 1}\n', "line 2: the value of 'a' must be a string, got int"),
        (b'{"a": null}\n', "line 1: the value of 'a' must be a string, got NoneType"),
    ],
)
def test_a_broken_file_is_refused_with_its_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(BadInput) as refusal:
        read_rows(path, ("a",))
    assert message in str(refusal.value)
    assert str(path) in str(refusal.value)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="No such file"):
        read_rows(tmp_path / "absent.jsonl", ("a",))
    with pytest.raises(BadInput, match="directory"):
        read_rows(tmp_path, ("a",))


# --- the order of training ---


def test_an_epoch_is_a_permutation_and_each_one_is_another() -> None:
    orders = {epoch_order(seed, epoch, 50) for seed in (0, 1) for epoch in (0, 1, 2)}
    assert len(orders) == 6
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert tuple(range(50)) not in orders


def test_the_order_stays_the_same_between_versions() -> None:
    # Rows 0..7 by the little-endian BLAKE2b-64 of "0/epoch/0/<row>", worked out apart from the project's code.
    assert epoch_order(0, 0, 8) == (6, 2, 3, 0, 7, 5, 1, 4)


@pytest.mark.parametrize("count", [1, 3, 8, 11, 20])
def test_batches_read_one_epoch_after_the_other(count: int) -> None:
    steps = 24
    stream = [row for step in range(1, steps + 1) for row in training_rows(step, count, seed=5, size=8)]
    expected = [row for epoch in range(steps * count // 8 + 1) for row in epoch_order(5, epoch, 8)]
    assert stream == expected[: steps * count]


def test_a_step_does_not_depend_on_the_steps_before_it() -> None:
    late = training_rows(1_000_003, 4, seed=1, size=8)
    datafile.epoch_order.cache_clear()
    assert training_rows(1_000_003, 4, seed=1, size=8) == late
    assert training_rows(1_000_003, 4, seed=2, size=8) != late


# --- prompts, demonstrations, reward ---


def test_prompts_hold_the_instruction_and_the_bare_question(tiny: Gsm8k) -> None:
    tiny.check()
    first = tiny.eval_prompts(1)[0]
    assert first.id == "gsm8k/test/1"
    assert first.answer == "68"
    assert first.messages == (
        {"role": "system", "content": INSTRUCTION},
        {
            "role": "user",
            "content": "A jacket costs $80 and is sold at 15% off.  What is the new price in dollars?",
        },
    )


def test_eval_prompts_are_the_test_file_in_order(tiny: Gsm8k) -> None:
    prompts = tiny.eval_prompts(None)
    assert [(prompt.id, prompt.answer) for prompt in prompts] == [
        ("gsm8k/test/1", "68"),
        ("gsm8k/test/2", "98"),
        ("gsm8k/test/3", "750"),
        ("gsm8k/test/4", "2"),
    ]
    assert tiny.eval_prompts(2) == prompts[:2]
    for count in (0, 5):
        with pytest.raises(BadInput, match=f"has 4 test questions, got count={count}"):
            tiny.eval_prompts(count)


def test_train_prompts_follow_the_epoch_order(tiny: Gsm8k) -> None:
    ids = [prompt.id for step in range(1, 5) for prompt in tiny.train_prompts(step, 4, seed=3)]
    lines = [row + 1 for epoch in (0, 1) for row in epoch_order(3, epoch, 8)]
    assert ids == [f"gsm8k/train/{line}" for line in lines]


def test_a_demonstration_is_the_solution_without_annotations(tiny: Gsm8k) -> None:
    demonstrations = {demo.prompt.id: demo.completion for demo in tiny.demonstrations(1, 8, seed=0)}
    assert demonstrations["gsm8k/train/5"] == (
        "<think>A pen costs 9 / 6 = $1.5 in shop A.\nA pen costs 10 / 5 = $2 in shop B.\n"
        "Shop A is cheaper because 1.5 < 2.\nSo 12 pens cost 12 * 1.5 = $18.</think><answer>18</answer>"
    )
    assert demonstrations["gsm8k/train/3"] == "<think>There are 25 * 50 = 1,250 seats.</think><answer>1,250</answer>"


def test_demonstrations_go_with_the_prompts_of_their_step_and_earn_everything(tiny: Gsm8k) -> None:
    for step in range(1, 4):
        demonstrations = tiny.demonstrations(step, 5, seed=7)
        assert [demo.prompt for demo in demonstrations] == tiny.train_prompts(step, 5, seed=7)
        for demo in demonstrations:
            assert tiny.reward(demo.prompt, demo.completion).parts == {"correct": 1.0, "format": 1.0}


@pytest.mark.parametrize(
    ("completion", "total", "parts"),
    [
        ("<think>a</think><answer>$68.00</answer>", 1.2, (1.0, 1.0)),
        ("I say <answer>68 dollars</answer>", 1.0, (1.0, 0.0)),
        ("<think>a</think><answer>60</answer>", 0.2, (0.0, 1.0)),
        ("<think>a</think><answer></answer>", 0.2, (0.0, 1.0)),
        ("<think>68</think>68", 0.0, (0.0, 0.0)),
        ("", 0.0, (0.0, 0.0)),
    ],
)
def test_the_reward_adds_its_weighted_parts(
    tiny: Gsm8k, completion: str, total: float, parts: tuple[float, float]
) -> None:
    reward = tiny.reward(tiny.eval_prompts(1)[0], completion)
    assert reward.total == pytest.approx(total, abs=1e-12)
    assert reward.parts == {"correct": parts[0], "format": parts[1]}
    assert reward.correct is bool(parts[0])


def test_the_weights_of_the_spec_are_used(tiny: Gsm8k) -> None:
    heavy = replace(tiny, correct_weight=2.0, format_weight=0.0)
    completion = "<think>a</think><answer>68</answer>"
    assert heavy.reward(heavy.eval_prompts(1)[0], completion).total == 2.0


def test_rows_are_read_once_and_the_spec_stays_hashable(tiny: Gsm8k, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[str] = []

    def counted(path: str, keys: tuple[str, ...]) -> list[dict[str, str]]:
        reads.append(Path(path).name)
        return read_rows(path, keys)

    monkeypatch.setattr(gsm8k, "read_rows", counted)
    tiny.check()
    tiny.train_prompts(1, 2, seed=0)
    replace(tiny, format_weight=0.5).eval_prompts(None)
    assert sorted(reads) == ["test.jsonl", "train.jsonl"]
    assert hash(tiny) == hash(replace(tiny))


# --- refusals ---


def test_a_question_in_both_splits_is_refused_with_count_and_example(tmp_path: Path) -> None:
    train = write(tmp_path / "a", problem("How many?", "1"), problem("What is  2 + 2?", "4"), problem("Why?", "5"))
    test = write(tmp_path / "b", problem("Who?", "3"), problem(" why?", "5"), problem("what IS 2 +\n2?", "4"))
    with pytest.raises(BadInput) as refusal:
        spec(train, test).check()
    assert "2 training question(s)" in str(refusal.value)
    assert "train line 2 = test line 3: 'What is  2 + 2?'" in str(refusal.value)


def test_the_same_file_twice_is_refused() -> None:
    with pytest.raises(BadInput, match=r"12 training question\(s\)"):
        spec(TINY, TINY).check()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (problem("  ", "1"), "line 2: the question is empty"),
        (problem("How many?", "ten"), "line 2: the text after #### must be one number"),
        (problem("How many?", ""), "line 2: the text after #### must be one number"),
        (problem("How many?", "3 or 4"), "got '3 or 4'"),
        (problem("How many?", "3 #### 4"), "line 2: the text after #### must be one number"),
        ({"question": "How many?", "answer": "3"}, "line 2: the answer lacks ####"),
        ({"question": "How many?", "answer": "a</think>b\n#### 3"}, "line 2: the solution holds think or answer tags"),
        ({"question": "How many?"}, "line 2: the key 'answer' is missing"),
    ],
)
@pytest.mark.parametrize("split", ["train", "test"])
def test_malformed_rows_are_refused_with_their_line(tmp_path: Path, split: str, row: object, message: str) -> None:
    good = write(tmp_path / "good.jsonl", problem("Who?", "1"))
    bad = write(tmp_path / "bad.jsonl", problem("When?", "1"), row)
    task = spec(bad, good) if split == "train" else spec(good, bad)
    with pytest.raises(BadInput) as refusal:
        task.check()
    assert message in str(refusal.value)
    assert "bad.jsonl" in str(refusal.value)


def test_one_file_alone_is_refused() -> None:
    for files in [(TINY, None), (None, TINY)]:
        with pytest.raises(BadInput, match=r"both task\.train_file and task\.eval_file, or neither"):
            spec(*files)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_completion_tokens": 0}, "max_completion_tokens must be a whole number from 1, got 0"),
        ({"correct_weight": 0.0}, "correct_weight > 0"),
        ({"correct_weight": float("nan")}, "finite"),
        ({"format_weight": -0.1}, "format_weight=-0.1"),
        ({"format_weight": float("inf")}, "finite"),
    ],
)
def test_options_out_of_range_are_refused(change: dict[str, float], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        replace(spec(None, None), **change)


# --- the hub, played by a stand-in: no test touches the network ---


class Columns(dict[str, list[object]]):
    """What the task uses of datasets.Dataset."""

    @property
    def column_names(self) -> list[str]:
        return list(self)


def play_hub(monkeypatch: pytest.MonkeyPatch, splits: dict[str, Columns] | Exception) -> list[tuple[object, ...]]:
    calls: list[tuple[object, ...]] = []

    def load_dataset(path: str, name: str, *, split: str, revision: str | None) -> Columns:
        calls.append((path, name, split, revision))
        if isinstance(splits, Exception):
            raise splits
        return splits[split]

    module = ModuleType("datasets")
    module.__dict__["load_dataset"] = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", module)
    gsm8k._hub_rows.cache_clear()
    return calls


def test_without_files_the_rows_come_from_the_hub_once(monkeypatch: pytest.MonkeyPatch) -> None:
    train = Columns(question=["How many?", "Who?"], answer=["a <<1+1=2>>2\n#### 2", "#### 3"])
    test = Columns(question=["When?"], answer=["b\n#### 4"])
    calls = play_hub(monkeypatch, {"train": train, "test": test})
    task = replace(spec(None, None), revision="abc")
    task.check()
    assert [prompt.id for prompt in task.eval_prompts(None)] == ["gsm8k/test/1"]
    completions = {demo.completion for demo in task.demonstrations(1, 2, seed=0)}
    assert completions == {"<think>a 2</think><answer>2</answer>", "<think></think><answer>3</answer>"}
    assert sorted(calls) == [("openai/gsm8k", "main", "test", "abc"), ("openai/gsm8k", "main", "train", "abc")]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (ConnectionError("unreachable"), "from the hub: unreachable; check the network"),
        (FileNotFoundError("no such data set"), "from the hub: no such data set"),
        (ValueError("unknown config"), "from the hub: unknown config"),
        ({"test": Columns(text=["a"])}, r"needs the columns question and answer, has \['text'\]"),
        ({"test": Columns(question=["How many?"], answer=[None])}, "not text"),
        ({"test": Columns(question=["How many?"], answer=["3"])}, "split test, line 1: the answer lacks ####"),
    ],
)
def test_a_hub_that_fails_is_bad_input(
    monkeypatch: pytest.MonkeyPatch, answer: dict[str, Columns] | Exception, message: str
) -> None:
    play_hub(monkeypatch, answer)
    with pytest.raises(BadInput, match=message):
        spec(None, None).check()


def test_without_the_datasets_package_the_message_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    gsm8k._hub_rows.cache_clear()
    with pytest.raises(BadInput, match=r"pip install datasets, or set task\.train_file and task\.eval_file"):
        spec(None, None).check()


def test_importing_the_task_imports_neither_torch_nor_datasets() -> None:
    code = "import sys, qerl_bench.task.gsm8k; print([m for m in ('torch', 'datasets') if m in sys.modules])"
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


# --- the real files ---

# Test lines whose gold answer is also that of the next line: 15 of 1,319.
EQUAL_NEIGHBOURS = [
    *[(54, "40"), (125, "10"), (205, "98"), (435, "5"), (534, "300"), (656, "10"), (671, "4"), (704, "50")],
    *[(774, "10"), (913, "6"), (929, "60"), (1037, "10"), (1083, "2"), (1170, "2"), (1178, "17")],
]


@pytest.fixture(scope="module")
def real() -> Gsm8k:
    folder = os.environ.get("QERL_DATA")
    if not folder:
        pytest.skip("QERL_DATA does not name a folder with gsm8k_train.jsonl and gsm8k_test.jsonl")
    files = Path(folder) / "gsm8k_train.jsonl", Path(folder) / "gsm8k_test.jsonl"
    for file in files:
        if not file.is_file():
            pytest.skip(f"QERL_DATA names a folder without {file.name}")
    return spec(*files)


def test_real_files_pass_the_check_and_have_the_known_sizes(real: Gsm8k) -> None:
    real.check()
    assert len(real.eval_prompts(None)) == 1319
    ids = [prompt.id for prompt in real.train_prompts(1, 7473, seed=0)]
    assert len(set(ids)) == 7473


def test_real_demonstrations_all_earn_the_full_reward_and_carry_no_annotation(real: Gsm8k) -> None:
    for demo in real.demonstrations(1, 7473, seed=0):
        reward = real.reward(demo.prompt, demo.completion)
        assert reward.parts == {"correct": 1.0, "format": 1.0}, demo
        assert "<<" not in demo.completion and ">>" not in demo.completion and "####" not in demo.completion, demo


def test_every_real_gold_answer_matches_itself_and_only_equal_ones_match_the_next_question(real: Gsm8k) -> None:
    prompts = real.eval_prompts(None)
    own = [real.reward(prompt, f"<think>So.</think><answer>{prompt.answer}</answer>") for prompt in prompts]
    assert all(reward.parts == {"correct": 1.0, "format": 1.0} for reward in own)

    shifted = prompts[1:] + prompts[:1]
    matches = [
        (prompt.id, prompt.answer)
        for prompt, other in zip(prompts, shifted, strict=True)
        if real.reward(prompt, f"<think>So.</think><answer>{other.answer}</answer>").correct
    ]
    # Without the task's own parser: every real gold answer is a plain integer, but for thousands separators.
    integers = [int(prompt.answer.replace(",", "")) for prompt in prompts]
    assert [parse_number(prompt.answer) for prompt in prompts] == integers
    equal = [
        (prompt.id, prompt.answer)
        for prompt, value, other in zip(prompts, integers, integers[1:] + integers[:1], strict=True)
        if value == other
    ]
    assert matches == equal == [(f"gsm8k/test/{line}", gold) for line, gold in EQUAL_NEIGHBOURS]


def test_a_constant_answer_earns_only_its_own_share_of_the_real_test_split(real: Gsm8k) -> None:
    prompts = real.eval_prompts(None)
    golds = Counter(int(prompt.answer.replace(",", "")) for prompt in prompts)
    hits = sum(real.reward(prompt, "<think>So.</think><answer>18</answer>").correct for prompt in prompts)
    assert hits == golds[18] == 15
