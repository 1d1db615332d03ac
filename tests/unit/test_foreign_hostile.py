"""Files of others may hold anything: names, HTML, paths, sizes and pickles do nothing but be shown or refused."""

from __future__ import annotations

import csv
import io
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from qerl_bench.__main__ import main
from qerl_core.checks import ConfigError
from qerl_core.process.arguments import whole
from qerl_studies.foreign import files, trl, verl
from qerl_studies.foreign.verdict import shown
from qerl_studies.runs import reported
from qerl_studies.runs.find import find_runs
from qerl_studies.runs.reported import ABOUT, COLUMNS, REPORTED, read_rows
from qerl_studies.runs.reported_runs import safe

EVIL = "<script>alert(1)</script>|`x`[a](javascript:b)"
PLACES = ["../../outside", "/etc/passwd", "..", ".hidden", "a/b/../../../c", "con\\nul"]


def trl_run(folder: Path, reward: float = 0.5, **state: Any) -> Path:
    folder.mkdir(parents=True)
    history = [{"step": step, "reward": reward * step, "entropy": 1.0 / step} for step in (1, 2)]
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": history, "max_steps": 2} | state))
    return folder


def arms(root: Path, first: str = "a", second: str = "b") -> Path:
    for place, arm in enumerate((first, second)):
        for seed in range(3):
            trl_run(root / f"{arm}-s{seed}", reward=0.5 + 0.1 * place + 0.01 * seed * place)
    return root


def lines_of(rows: list[dict[str, Any]]) -> str:
    return "\n".join(json.dumps(row) for row in rows) + "\n"


def import_trl(root: Path, out: Path, *words: str) -> Path:
    assert main(["import", "trl", str(root), f"out={out}", "model=m", "task=t", *words]) == 0
    return out


def rows_with(**cells: str) -> str:
    """The table of two arms, in each line of which a column has another text, questions included."""
    base = dict.fromkeys(COLUMNS, "") | {"study": "s", "model": "m", "task": "t", "definition": "d", "source": "f"}
    lines = []
    for place, arm in enumerate("ab"):
        for seed in range(3):
            own = base | {"arm": arm, "seed": str(seed), "step": "1"}
            lines.append(own | {"metric": "score", "value": str(0.1 * seed + (0.2 + 0.01 * seed) * place)} | cells)
            for question in ("q", "r"):
                asked = {"metric": "eval/accuracy_greedy", "question": question + cells.get("question", "")}
                right = str((place + seed + (question == "q")) % 2)
                lines.append(own | cells | asked | {"value": right, "n": "1"})
            lines[-3]["question"] = ""
    file = io.StringIO()
    writer = csv.DictWriter(file, COLUMNS)
    writer.writeheader()
    writer.writerows(lines)
    return file.getvalue()


def table(arm: str) -> str:
    cell = '"' + arm.replace('"', '""') + '"'
    head = ",".join(COLUMNS)
    rows = [
        f"s,{name},{seed},m,t,1,reward/mean,,{0.1 * seed + 0.2 * place + 0.01 * seed * place},,d,f"
        for place, name in enumerate(("a", cell))
        for seed in range(3)
    ]
    return "\n".join([head, *rows]) + "\n"


def test_names_with_markup_are_text_on_every_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "theirs.csv").write_text(table(EVIL))
    study = tmp_path / "study"
    assert main(["import", "csv", str(tmp_path / "theirs.csv"), f"out={study}", f"tool={EVIL}"]) == 0
    page = (study / "verdict.md").read_text()
    assert (
        "<script>" not in page
        and "](javascript" not in page.replace("\\[a](javascript", "")
        and "&lt;script&gt;" in page
    )
    assert "`" not in page and all(line.count("|") == 10 for line in page.splitlines() if "reward/mean" in line)
    assert main(["report", str(study), f"out={tmp_path / 'pages'}"]) == 0
    html = (tmp_path / "pages" / "index.html").read_text()
    assert "<script>alert" not in html and "&lt;script&gt;alert(1)" in html
    assert main(["compare", str(study / "*script*"), str(study / "a-*")]) == 0
    assert "\x1b" not in capsys.readouterr().out


@pytest.mark.parametrize("name", PLACES)
def test_a_name_leads_to_no_other_place(name: str, tmp_path: Path) -> None:
    """Names become parts of paths STUDY/NAME, where completions of a run are looked for."""
    (tmp_path / "theirs.csv").write_text(table(name))
    study = tmp_path / "study"
    assert main(["import", "csv", str(tmp_path / "theirs.csv"), f"out={study}"]) == 0
    for path in find_runs(study):
        assert path.parent == study and ".." not in path.name.split("/") and not path.name.startswith(".")
    assert main(["report", str(study), f"out={tmp_path / 'pages'}"]) == 0
    written = {path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()}
    assert written == {Path("theirs.csv"), Path("pages/index.html")} | {
        Path("study") / one for one in (REPORTED, ABOUT, "verdict.md")
    }


HOSTILE = f"{EVIL}**b**../../outside"


@pytest.mark.parametrize("column", [one for one in COLUMNS if one not in ("arm", "seed", "step", "value", "n")])
def test_markup_and_places_in_any_column_are_text(column: str, tmp_path: Path) -> None:
    (tmp_path / "theirs.csv").write_text(rows_with(**{column: HOSTILE}))
    study = tmp_path / "in" / "study"
    assert main(["import", "csv", str(tmp_path / "theirs.csv"), f"out={study}"]) == 0
    assert main(["report", str(study), f"out={tmp_path / 'in' / 'pages'}"]) == 0
    page = (study / "verdict.md").read_text()
    shown_on = page + (tmp_path / "in" / "pages" / "index.html").read_text()
    assert "<script>alert" not in shown_on and "**b**" not in page
    assert column not in ("model", "task", "metric") or "&lt;script&gt;alert(1)" in shown_on
    files = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert files == {"theirs.csv", "index.html", "verdict.md", REPORTED, ABOUT}
    assert {path.name for path in tmp_path.iterdir()} == {"theirs.csv", "in"}


# --- names that are very long, and numbers that are huge -------------------------------------------------------------


def with_logs(root: Path, **more: Any) -> Path:
    """Runs of TRL whose entries have `more`."""
    for folder in arms(root).iterdir():
        state = json.loads((folder / "trainer_state.json").read_text())
        state["log_history"] = [one | more for one in state["log_history"]]
        (folder / "trainer_state.json").write_text(json.dumps(state))
    return root


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(["import", *words])
    assert end.value.code == 2
    return whole(capsys.readouterr().err)


def test_names_that_are_too_long_are_refused_by_their_file_and_never_cut_to_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"out={tmp_path / 'study'}", "model=m", "task=t"]
    runs = with_logs(tmp_path / "runs", **{f"{'k' * 450}{end}": 1.0 for end in "xy"})
    said = refusal(capsys, "trl", str(runs), *words)
    assert "a-s0/trainer_state.json" in said and "metric has 455 characters" in said
    deep = tmp_path / "deep"
    for end in "xy":
        trl_run(deep / ("d" * 200) / ("e" * 200) / f"{end}-s0")
    assert "characters" in refusal(capsys, "trl", str(deep), *words)
    assert not (tmp_path / "study").exists()


@pytest.mark.parametrize("number", [10**400, 10**101, 1e308, -1e308], ids=["10^400", "10^101", "1e308", "-1e308"])
def test_numbers_that_no_run_has_are_missing_and_every_command_goes_on(number: float, tmp_path: Path) -> None:
    study = import_trl(with_logs(tmp_path / "runs", kl=number), tmp_path / "study")
    assert {str(row.value) for row in read_rows(study / REPORTED) if row.metric == "trl/kl"} == {"nan"}
    assert "no number of trl/kl" in (study / "verdict.md").read_text()
    assert main(["report", str(study), f"out={tmp_path / 'pages'}"]) == 0
    assert main(["compare", str(study / "b-*"), str(study / "a-*")]) == 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"value": "1e308"}, "value must be empty or at most 1e+100"),
        ({"value": "inf"}, "value must be empty or at most 1e+100"),
        ({"seed": "9" * 19}, "seed must be from 0 to"),
        ({"seed": "9" * 30}, "seed must be a whole number"),
        ({"step": "9" * 19}, "step must be from 0 to"),
        ({"n": "9" * 19}, "n must be"),
    ],
)
def test_huge_cells_are_refused_by_their_line(
    change: dict[str, str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "theirs.csv").write_text(rows_with(**change))
    told = refusal(capsys, "csv", str(tmp_path / "theirs.csv"), f"out={tmp_path / 'study'}")
    assert said in told and "line 2" in told and not (tmp_path / "study").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"seed": 10**30}, "seed must be from 0 to"),
        ({"seed": -1}, "seed must be from 0 to"),
        ({"logging_steps": 10**400}, ""),
        ({"note": "x" * 10**6, "<b>" * 300: 10**400}, ""),
    ],
    ids=["seed", "negative seed", "logging_steps", "long"],
)
def test_huge_options_are_refused_by_name_or_decide_nothing(
    options: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = arms(tmp_path / "runs")
    for folder in runs.iterdir():
        own = {key: value - int(folder.name[-1]) if key == "seed" else value for key, value in options.items()}
        (folder / "training_args.json").write_text(json.dumps(own))
    if said:
        told = refusal(capsys, "trl", str(runs), f"out={tmp_path / 'study'}", "model=m", "task=t")
        assert said in told and "trainer_state.json" in told
    else:
        assert "reward/mean" in (import_trl(runs, tmp_path / "study") / "verdict.md").read_text()


def test_a_step_beyond_all_and_weights_that_are_none_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"out={tmp_path / 'study'}", "model=m", "task=t"]
    runs = with_logs(tmp_path / "runs", step=10**30)
    assert "step must be from 0 to" in refusal(capsys, "trl", str(runs), *words)
    runs = arms(tmp_path / "weighted")
    parts = pa.table({"step": [2, 2], "graded": [1.0, 0.0]})
    (runs / "a-s0" / "completions").mkdir()
    pq.write_table(parts, runs / "a-s0" / "completions" / "completions_00002.parquet")
    (runs / "a-s0" / "training_args.json").write_text(json.dumps({"reward_weights": ["much"]}))
    assert "reward_weights" in refusal(capsys, "trl", str(runs), *words)


@pytest.mark.parametrize("line", [{"score": 10**400}, {"score": 1e400}, {"score": 1, "step": [2]}, {"score": "1"}])
def test_dumps_of_verl_with_other_kinds_are_refused_or_left_out(line: dict[str, Any], tmp_path: Path) -> None:
    for arm in "ab":
        log = [{"step": step, "data": {"critic/score/mean": 1.0}} for step in (1, 2)]
        tmp_path.joinpath(f"{arm}-s0.jsonl").write_text(lines_of(log))
    folder = tmp_path / "a-s0" / "rollout"
    folder.mkdir(parents=True)
    (folder / "2.jsonl").write_text(lines_of([{"input": "i", "output": "o", "step": 2} | line]))
    (folder / "\u00b2.jsonl").write_text("no dump\n")
    if line["score"] == 1:
        assert "other steps" in verl.read(tmp_path)[0].refused[0]
    else:
        with pytest.raises(ConfigError, match="needs a score"):
            verl.read(tmp_path)


def test_names_that_become_one_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert safe("a/b") == safe("a:b") == "a_b"
    (tmp_path / "theirs.csv").write_text(table("x/y").replace(",a,", ",x:y,"))
    with pytest.raises(SystemExit):
        main(["import", "csv", str(tmp_path / "theirs.csv"), f"out={tmp_path / 'study'}"])
    assert "two runs are called" in whole(capsys.readouterr().err) and not (tmp_path / "study").exists()


def test_control_characters_are_refused_and_never_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "theirs.csv").write_text(table("red\x1b[31m\u202e"))
    with pytest.raises(SystemExit):
        main(["import", "csv", str(tmp_path / "theirs.csv"), f"out={tmp_path / 'study'}"])
    said = capsys.readouterr()
    assert (
        "\x1b" not in said.err + said.out and "\u202e" not in said.err + said.out and "control characters" in said.err
    )
    assert "\x1b" not in shown("a\x1bb\nc") and "\n" not in shown("a\nb")


def test_options_of_others_are_shown_as_text_and_their_private_words_hidden(tmp_path: Path) -> None:
    runs = arms(tmp_path / "runs")
    for folder in runs.iterdir():
        token = "hf_" + "a" * 30
        options = {
            "seed": int(folder.name[-1]),
            "note": f"{EVIL} {folder.name[0]}",
            "reward_file": f"/home/ada/{token}.py",
        }
        options["data_files"] = f"/home/ada/{folder.name[0]}/train.jsonl {token}"
        (folder / "training_args.json").write_text(json.dumps(options))
    study = import_trl(runs, tmp_path / "study")
    text = (study / ABOUT).read_text() + (study / "verdict.md").read_text()
    assert "/home/ada" not in text and "hf_" not in text and "<script>" not in (study / "verdict.md").read_text()
    (study / ABOUT).write_text((study / ABOUT).read_text().replace("notes", "notes").replace("TRL", "TRL\\u001b[31m"))
    assert "\x1b" not in reported.read_about(study).tool


def test_pickles_beside_a_run_are_never_opened(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return os.system, (f"touch {tmp_path / 'done'}",)

    runs = arms(tmp_path / "runs")
    for name in ("training_args.bin", "optimizer.pt", "rng_state.pth", "scheduler.pt"):
        (runs / "a-s0" / name).write_bytes(pickle.dumps(Evil()))
    import_trl(runs, tmp_path / "study")
    assert not (tmp_path / "done").exists()


def test_a_yaml_file_makes_no_objects_and_does_not_unfold(tmp_path: Path) -> None:
    log = lines_of([{"step": step, "data": {"critic/score/mean": 0.5}} for step in (1, 2)])
    for place, text in enumerate((
        f"a: !!python/object/apply:os.system ['touch {tmp_path / 'done'}']",
        "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]",
    )):  # fmt: skip
        root = tmp_path / f"runs{place}"
        root.mkdir()
        (root / "a-s0.jsonl").write_text(log)
        (root / "a-s0.yaml").write_text(text)
        with pytest.raises(ConfigError, match=r"a-s0\.yaml"):
            verl.read(root)
    assert not (tmp_path / "done").exists()


def test_links_lead_nowhere_outside(tmp_path: Path) -> None:
    secret = trl_run(tmp_path / "secret" / "x-s0")
    runs = arms(tmp_path / "runs")
    (runs / "linked-s0").symlink_to(secret)
    (runs / "a-s9").mkdir()
    (runs / "a-s9" / "trainer_state.json").symlink_to(secret / "trainer_state.json")
    with pytest.raises(ConfigError, match="outside"):
        trl.read(runs)
    (runs / "a-s9" / "trainer_state.json").unlink()
    assert "linked-s0" not in {run.name for run in trl.read(runs)}


def test_sizes_are_limited_with_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "theirs.csv").write_text(table("b"))
    monkeypatch.setattr(reported, "MAX_ROWS", 3)
    with pytest.raises(ConfigError, match="more than 3 rows"):
        list(read_rows(tmp_path / "theirs.csv"))
    monkeypatch.setattr(reported, "MAX_BYTES", 100)
    with pytest.raises(ConfigError, match="MiB"):
        list(read_rows(tmp_path / "theirs.csv"))
    with pytest.raises(SystemExit):
        main(["import", "trl", str(arms(tmp_path / "runs")), f"out={tmp_path / 's'}", "model=m", "task=t"])
    assert "more than the" in whole(capsys.readouterr().err) and not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    "text",
    ["", "[", "[" * 100_000, '{"log_history": 3}', '{"log_history": [3]}', '{"log_history": [{"step": "1"}]}', "\xff"],
)
def test_a_log_that_is_none_is_named(text: str, tmp_path: Path) -> None:
    runs = arms(tmp_path / "runs")
    (runs / "a-s0" / "trainer_state.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match="a-s0"):
        trl.read(runs)


@pytest.mark.parametrize("line", ["{", '{"step": 1}', '{"step": "x", "data": {}}', '{"step": -1, "data": {}}', "3"])
def test_a_line_of_a_log_that_is_none_is_named(line: str, tmp_path: Path) -> None:
    good = json.dumps({"step": 1, "data": {"critic/score/mean": 0.5}})
    (tmp_path / "a-s0.jsonl").write_text(f"{good}\n{line}\n")
    with pytest.raises(ConfigError, match=r"a-s0\.jsonl"):
        verl.read(tmp_path)


def test_numbers_that_are_none_become_missing_and_are_not_judged(tmp_path: Path) -> None:
    runs = arms(tmp_path / "runs")
    for folder in runs.iterdir():
        state = (folder / "trainer_state.json").read_text().replace('"reward": ', '"kl": NaN, "x": "y", "reward": ')
        (folder / "trainer_state.json").write_text(state)
    study = import_trl(runs, tmp_path / "study")
    values = {row.metric: row.value for row in read_rows(study / REPORTED)}
    assert values["trl/kl"] != values["trl/kl"] and "trl/x" not in values
    assert "no number of trl/kl" in (study / "verdict.md").read_text()


def test_every_file_is_asked_whether_it_is_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reported, "MAX_BYTES", 10)
    (tmp_path / "x.json").write_text(json.dumps(["long enough to be too large"]))
    for read in (files.read_json, lambda path: [*files.read_lines(path)]):
        with pytest.raises(ConfigError, match="MiB"):
            read(tmp_path / "x.json")
