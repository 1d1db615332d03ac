"""Files of others may hold anything: names, HTML, paths, sizes and pickles do nothing but be shown or refused."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

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
    assert "`" not in page and all(line.count("|") == 9 for line in page.splitlines() if "reward/mean" in line)
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
