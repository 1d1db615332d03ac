"""`qerl-bench report` and `compare` on small studies and on bad input, without a browser."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from qerl_core.checks import ConfigError
from qerl_core.process.arguments import whole
from qerl_core.sweeps.status import Status
from qerl_studies.commands import compare
from qerl_studies.commands import report as command
from qerl_studies.figures.headline import HEADLINES
from qerl_studies.report import study_page
from qerl_studies.report.page import embedded
from qerl_studies.report.run_page import evenly, run_page
from qerl_studies.report.sessions import read_once
from qerl_studies.runs.comparable import load_runs

ASSETS = Path(__file__).parents[1] / "assets" / "runs"
WORLDS = Path(__file__).parents[2] / "studies" / "worlds-2026"
RUN = "nvfp4-exp-grpo-r32-s0-a101d16e"


def data_of(page: Path) -> dict:
    """The data inside a page."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.S)
    assert found is not None
    return json.loads(found[1])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A copy of eight runs in a folder `runs`."""
    shutil.copytree(ASSETS, tmp_path / "runs")
    return tmp_path / "runs"


@pytest.fixture(autouse=True)
def one_claim(show_claims: Callable[[int], None]) -> None:
    """Claims, which test_claims.py tests, take most of the time."""
    show_claims(1)


def test_a_page_is_one_file_that_asks_no_network(root: Path, tmp_path: Path) -> None:
    command.main([str(root), f"out={tmp_path}/report"])
    text = (tmp_path / "report" / "index.html").read_text()
    assert not re.findall(r"""(?:src|href)=["']?(?:https?:|//|[^"'#]*\.(?:js|css))""", text)
    assert sorted(path.name for path in (tmp_path / "report").iterdir()) == ["index.html"]
    data = data_of(tmp_path / "report" / "index.html")
    assert [run["name"] for run in data["runs"]] == [run.name for run in load_runs([root])]


def test_doses_are_means_of_the_runs_they_name(root: Path, tmp_path: Path) -> None:
    command.main([str(root), f"out={tmp_path}/report"])
    data, runs = data_of(tmp_path / "report" / "index.html"), load_runs([root])
    assert {dose["axes"]["format"] for dose in data["doses"]} == {"bf16", "nvfp4"} and len(data["doses"]) == 4
    for dose in data["doses"]:
        named = [runs[place] for place in dose["runs"]]
        noisy = dose["axes"]["noise"] != "none"
        assert {run.option("aqn.name") != "none" for run in named} == {noisy} and (dose["sigma"] > 0) == noisy
        entropy = dose["measures"][0]
        assert entropy["mean"][0] == pytest.approx(sum(entropy["values"]) / 2, rel=1e-5) and entropy["n"] == 2
        assert entropy["mean"][1] < entropy["mean"][0] < entropy["mean"][2]


def test_noise_on_adapters_is_a_noise_of_its_own_with_doses_of_its_own(root: Path, tmp_path: Path) -> None:
    for config in root.glob("bf16-exp-*/config.yaml"):  # one of two formats
        config.write_text(re.sub(r"(?m)^noise:\n", "noise:\n  where: adapters\n", config.read_text()))
    command.main([str(root), f"out={tmp_path}/report"])
    data = data_of(tmp_path / "report" / "index.html")
    assert data["axes"]["noise"] == ["exp", "exp on adapters", "none"]
    assert {(dose["axes"]["format"], dose["axes"]["noise"]) for dose in data["doses"]} == {
        ("bf16", "none"), ("bf16", "exp on adapters"), ("nvfp4", "none"), ("nvfp4", "exp"),
    }  # fmt: skip
    assert any(dose["label"] == "BF16, noise exp on adapters" for dose in data["doses"])


def test_a_study_in_sessions_has_one_page(tmp_path: Path) -> None:
    command.main([str(WORLDS), f"out={tmp_path}/report"])
    page, study = tmp_path / "report" / "index.html", read_once(WORLDS)
    data = data_of(page)
    assert [*(tmp_path / "report").rglob("*")] == [page] and data["title"] == "worlds-2026"
    assert sorted(run["name"] for run in data["runs"]) == sorted(run.name for run in study.runs.values())
    (primary,) = (effect for effect in data["effects"] if effect["role"] == "primary" and "pairs" in effect)
    assert {pair["base"] for pair in primary["pairs"]} == {run.base for run in study.of_arm("nvfp4")}
    noisy = study.of_arm("nvfp4-noise")
    doses = {dose["axes"]["noise"]: dose for dose in data["doses"]}
    asked = [float(run.series("train", "aqn/sigma_realised").mean()) for run in noisy]
    assert doses["matched"]["sigma"] == pytest.approx(sum(asked) / len(asked), rel=1e-3)
    command.main([str(WORLDS), str(ASSETS), f"out={tmp_path}/both", "except=*-s1-*"])
    pages = re.findall(r'<a href="([^"]+)">', (tmp_path / "both" / "index.html").read_text())
    assert sorted(Path(page).parent.name for page in pages) == ["runs", "worlds-2026"]
    (page,) = (one for one in pages if "worlds" in one)
    assert all("-s0-" in run["name"] for run in data_of(tmp_path / "both" / page)["runs"])


def test_five_hundred_runs_stay_below_a_megabyte(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = load_runs([root])
    monkeypatch.setattr(study_page, "doses_of", lambda runs, place: [])
    sizes = [len(study_page.study_page("s", runs * times, {}, {}).encode()) for times in (1, 2)]
    per_run = (sizes[1] - sizes[0]) / len(runs)
    assert sizes[0] + 500 * per_run < 800_000  # and effects, of which there are as many as settings


def test_several_studies_have_an_index(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root, tmp_path / "other")
    command.main([str(root), str(tmp_path / "other"), f"out={tmp_path}/report"])
    text = (tmp_path / "report" / "index.html").read_text()
    for name in ("runs", "other"):
        assert f'href="{name}/index.html"' in text and (tmp_path / "report" / name / "index.html").is_file()


def test_studies_whose_paths_look_alike_have_pages_of_their_own(root: Path, tmp_path: Path) -> None:
    """a-b and a/b; a folder of runs within a folder of runs."""
    runs = sorted(root.iterdir())
    for study, run in zip(("a-b", "a/b", "a/b/runs", "a/b-runs"), runs, strict=False):
        shutil.copytree(run, tmp_path / "in" / study / run.name)
    command.main([str(tmp_path / "in"), f"out={tmp_path}/report"])
    pages = re.findall(r'<a href="([^"]+)">', (tmp_path / "report" / "index.html").read_text())
    shown = [[run["name"] for run in data_of(tmp_path / "report" / page)["runs"]] for page in pages]
    assert sorted(shown) == [[run.name] for run in runs[:4]]
    command.main([str(tmp_path / "in" / "a" / "b"), f"out={tmp_path}/inner"])
    inner = tmp_path / "inner"
    folders = {page.parent.relative_to(inner).as_posix() for page in inner.rglob("*.html")}
    assert folders == {".", "b", "b/runs"}


def test_runs_can_be_left_out(root: Path, tmp_path: Path) -> None:
    command.main([str(root), f"out={tmp_path}/report", "except=*-s0-*"])
    data = data_of(tmp_path / "report" / "index.html")
    assert [run["name"] for run in data["runs"]] == [run.name for run in load_runs([root]) if "-s1-" in run.name]


def test_texts_of_a_run_cannot_end_the_script() -> None:
    text = embedded({"a": "</script><script>alert(1)</script>", "b": [float("nan"), 1.23456789]})
    assert "<" not in text
    assert json.loads(text) == {"a": "</script><script>alert(1)</script>", "b": [None, 1.23457]}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda root: shutil.rmtree(root) or root.mkdir(), "no run in .*runs"),
        (
            lambda root: [file.write_text("{") for file in root.glob("*/metrics.jsonl")],
            "none of the 8 runs can be read",
        ),
        (
            lambda root: (root / RUN / "env.json").write_text(
                (root / RUN / "env.json").read_text().replace('"code": "', '"code": "0')
            ),
            "2 versions of the code.*--mixed-code",
        ),
    ],
    ids=["empty", "all damaged", "mixed code"],
)
def test_bad_input_is_named_and_nothing_is_written(root: Path, tmp_path: Path, damage: object, message: str) -> None:
    assert callable(damage)
    damage(root)
    with pytest.raises(ConfigError, match=re.compile(message, re.S)):
        command.main([str(root), f"out={tmp_path}/report"])
    assert not (tmp_path / "report").exists()


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda run: (run / "metrics.jsonl").write_text("{"), "metrics.jsonl, line 1: not JSON"),
        (lambda run: (run / "config.yaml").unlink(), "it has no config.yaml"),
        (lambda run: (run / "env.json").write_text('{"packages": "torch"}'), "packages must be"),
    ],
    ids=["damaged", "no config", "another type"],
)
def test_a_run_that_cannot_be_read_is_left_out_with_the_reason(
    root: Path, tmp_path: Path, damage: Callable[[Path], object], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(root / RUN)
    command.main([str(root), f"out={tmp_path}/report"])
    text = (tmp_path / "report" / "index.html").read_text()
    assert "Left out, because they cannot be read (1)" in text and f"<li>{RUN}: {RUN}" in text
    said = capsys.readouterr()
    assert f"left out: {root / RUN}" in whole(said.err) and says in whole(said.err) and "7 runs" in said.out
    assert str(root) not in text.partition("Left out")[2].partition("</ul>")[0]


def test_a_study_too_large_for_a_page_is_refused(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study_page, "MOST_RUNS", 7)
    with pytest.raises(ConfigError, match=r"8 runs, .*\(7\)"):
        command.main([str(root), f"out={tmp_path}/report"])


def test_an_unfinished_run_with_half_a_line_is_listed(root: Path, tmp_path: Path) -> None:
    for name in ("done.json", "seals.jsonl"):
        (root / RUN / name).unlink(missing_ok=True)
    with open(root / RUN / "metrics.jsonl", "a") as file:
        file.write('{"kind": "tra')
    with pytest.warns(UserWarning, match="half-written"):
        command.main([str(root), f"out={tmp_path}/report"])
    states = {run["name"]: run["state"] for run in data_of(tmp_path / "report" / "index.html")["runs"]}
    assert states.pop(RUN).startswith("step ") and {*states.values()} == {"finished"}


def test_watching_writes_again_until_nothing_goes_on(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """First a sweep without a number, then one that runs, then one that is done."""
    late = shutil.copytree(root, tmp_path / "later")
    shutil.rmtree(root)
    root.mkdir()
    sleeps: list[float] = []

    def states(folders: list[Path]) -> list[Status]:
        return [Status(folders[0], "running" if len(sleeps) < 2 else "done", 0, 1, None)]

    def sleep(seconds: float) -> None:
        page = tmp_path / "report" / "index.html"
        sleeps.append(seconds)
        if len(sleeps) == 1:
            assert not page.exists()
            shutil.copytree(late, root, dirs_exist_ok=True)
        else:
            assert 'http-equiv="refresh"' in page.read_text()

    monkeypatch.setattr(command, "statuses", states)
    monkeypatch.setattr(command.time, "sleep", sleep)
    command.main([str(root), f"out={tmp_path}/report", "watch=true"])
    assert len(sleeps) == 2 and 'http-equiv="refresh"' not in (tmp_path / "report" / "index.html").read_text()
    assert "not yet: no run in" in capsys.readouterr().err


def test_steps_of_a_sample_page_are_spread_evenly() -> None:
    assert evenly(3, 5) == [0, 1, 2] and evenly(101, 5) == [0, 25, 50, 75, 100] and evenly(0, 5) == []


def test_a_page_has_the_prompt_and_an_answer_of_nothing_but_line_ends_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "rollouts.jsonl").write_text("")
    rows = [
        {"mode": "greedy", "step": step, "question": "q", "gold": "1", "completion": text, "correct": step > 0}
        for step, text in ((0, "\n" * 40), (3, "a\n\nb"))
    ]
    pd.DataFrame(rows).to_parquet(tmp_path / "samples.parquet")
    page = run_page(tmp_path, "index.html")
    assert "<details>" not in page
    (tmp_path / "prompt.txt").write_text("<|user|>two & two")
    assert "&lt;|user|&gt;two &amp; two</p></details>" in run_page(tmp_path, "index.html")
    assert "[40 line ends]" in page and "a\n\nb" in page and "1 wrong, then right" in page


def test_a_damaged_line_of_samples_is_named(tmp_path: Path) -> None:
    line = {"step": 1, "prompt": "p", "completion": "c", "reward": 1.0}
    (tmp_path / "rollouts.jsonl").write_text(f"{json.dumps(line)}\n[1]\n{json.dumps(line)}\n")
    with pytest.raises(ConfigError, match=r"rollouts\.jsonl, line 2"):
        run_page(tmp_path, "index.html")


# --- compare ---


def test_two_runs_differ_in_an_option_and_in_numbers(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (sorted(root.glob(f"{name}-s0-*"))[0] for name in ("nvfp4-none-grpo-r32", "bf16-none-grpo-r32"))
    compare.main([str(first), str(second)])
    said = capsys.readouterr().out
    assert re.search(r"^quant\.name +nvfp4 +bf16$", said, re.M) and "lora.rank" not in said and "\nseed" not in said
    runs = load_runs([first, second])
    values = [run.series("train", "reward/mean").iloc[-math.ceil(run.last_step / 5) :].mean() for run in runs]
    found = re.search(r"^reward/mean +(\S+) +(\S+) +(\S+)", said, re.M)
    assert found is not None and float(found[3]) == pytest.approx(values[0] - values[1], abs=1e-3) != 0
    assert "One pair" in said and "run --explain NAME" in said
    config = runs[0].config
    rounded = replace(runs[0], config=config | {"quant": config["quant"] | {"activations": "fp8"}})
    rows = compare.option_rows(*({run.cell: run} for run in (rounded, runs[1])))
    assert [row[0] for row in rows] == ["quant.name", "quant.activations"]


def test_arms_have_paired_intervals(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compare.main([f"{root}/nvfp4-none-*", f"{root}/bf16-none-*"])
    said = capsys.readouterr().out
    (entropy,) = (one for one in HEADLINES if one.title == "entropy")
    means = {}
    for name in ("nvfp4", "bf16"):
        means[name] = {run.option("seed"): entropy.of(run) for run in load_runs(sorted(root.glob(f"{name}-none-*")))}
    gaps = [means["nvfp4"][seed] - means["bf16"][seed] for seed in (0, 1)]
    half = 12.7062 * abs(gaps[0] - gaps[1]) / 2  # Student's t, one degree of freedom
    found = re.search(r"^entropy +\S+ +\S+ +(\S+) +\[(\S+), (\S+)\]", said, re.M)
    assert found is not None
    expected = [sum(gaps) / 2 + shift for shift in (0, -half, half)]
    assert [float(part) for part in found.groups()] == pytest.approx(expected, rel=2e-3)


def test_what_cannot_be_paired_is_said(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compare.main([f"{root}/nvfp4-none-*-s0-*", f"{root}/bf16-none-*-s1-*"])
    said = capsys.readouterr().out
    assert "no base model and seed in common" in said and re.search(r"^entropy +\S+ +\S+ +- +-$", said, re.M)
    assert re.search(r"^seed +0 +1$", said, re.M)
    compare.main([f"{root}/nvfp4-none-*-s0-*", f"{root}/bf16-none-*"])
    assert re.search(r"of 1 pair\. Without a counterpart.*: 1\.", capsys.readouterr().out)


def test_a_run_does_not_differ_from_itself(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compare.main([str(root / RUN), str(root / RUN)])
    said = capsys.readouterr().out
    assert "no option differs" in said and "no number differs" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{root}", "{root}/bf16-none-*"], "two runs of one base model and seed.*narrower"),
        (["{root}/x*", "{root}/bf16-none-*"], "no run matches .*x"),
        (["{root}/bf16-none-*", "{root}/nvfp4-none-*", "{root}/x"], "3 words .*[Qq]uote"),
    ],
    ids=["mixed", "none", "three"],
)
def test_bad_arms_are_refused(root: Path, words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compare.main([word.format(root=root) for word in words])
