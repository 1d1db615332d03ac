"""What no commit holds: named, refused by a study, or kept as a patch from which the code can be made again."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from qerl_bench.commands import study
from qerl_bench.conduct.provenance import account_for_changes
from qerl_core.checks import ConfigError
from qerl_core.process.installation import CONF_DIR
from qerl_core.rundir import checkout
from qerl_core.rundir.checkout import patch_of, uncommitted
from qerl_core.rundir.environment import code_digest, environment
from qerl_studies.design.protocol import COMMITS, commits_in, protocol_commit
from tests.failing import failing

DESIGN = CONF_DIR.parent / "studies" / "worlds-2026" / "study.yaml"


def git(folder: Path, *words: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@localhost"]
    subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True)


def write(path: Path, content: str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)


@pytest.fixture
def checkout_at(stand_in: Callable[..., None]) -> Callable[[Path | None], None]:
    """checkout_at(folder): the code lies there, and not in this checkout; None for that of a wheel."""
    return lambda folder: stand_in(checkout, CHECKOUT=folder)


@pytest.fixture
def repository(tmp_path: Path, checkout_at: Callable[..., None]) -> Path:
    """A checkout with one commit, in place of that of this project."""
    folder = tmp_path / "checkout"
    for name in ("src/loop.py", "README.md", "studies/one/study.yaml", "studies/one/data/s/gates.md"):
        write(folder / name, "old\n")
    write(folder / ".gitignore", "/runs/\n")
    git(folder, "init")
    git(folder, "add", ".")
    git(folder, "commit", "-m", "first")
    checkout_at(folder)
    return folder


@pytest.mark.parametrize(
    ("path", "matters"),
    [
        ("src/loop.py", True),
        ("README.md", True),
        ("src/new.py", True),
        ("conf/quant/new.yaml", True),
        ("kernels/new.py", True),
        ("notes.txt", False),  # new, and no run reads it
        ("studies/one/data/s/gates.md", False),  # a study packs its results again and again
        ("studies/one/data/s/tidy.parquet", False),
        ("studies/two/study.yaml", True),  # the design of the study that is asked for
        ("runs/one/metrics.jsonl", False),
    ],
)
def test_what_a_commit_must_hold(repository: Path, path: str, matters: bool) -> None:
    study, results = repository / "studies/two/study.yaml", repository / "studies/one/data/s"
    write(repository / path, "new\n")
    assert uncommitted(study, results) == ([path] if matters else [])
    if matters:
        with pytest.raises(ConfigError, match=rf"1 files .*{path}.*with_changes=true"):
            account_for_changes(study, results, with_changes=False)
        git(repository, "add", path)
        assert uncommitted(study, results) == [path]  # staged is not committed
        git(repository, "commit", "-m", "second")
    account_for_changes(study, results, with_changes=True)
    assert not [*repository.rglob("*.diff")]


def test_a_deleted_file_matters(repository: Path) -> None:
    (repository / "src/loop.py").unlink()
    assert uncommitted() == ["src/loop.py"]


def test_the_patch_makes_the_code_again(repository: Path, tmp_path: Path) -> None:
    study, results = repository / "studies/one/study.yaml", repository / "studies/one/data/s"
    changes = {
        "src/loop.py": "new\n\n",
        "src/with blank.py": b"# \xe9\n",
        "src/größe.py": "new\n",
        'src/with "quotes".py': "new\n",
        "src/empty.py": "",
        "conf/weights.bin": bytes(range(256)),
        "README.md": "old\nand more",
    }
    for name, content in changes.items():
        write(repository / name, content)
    write(results / "gates.md", "new\n")
    account_for_changes(study, results, with_changes=True)
    (kept,) = results.glob("*.diff")
    assert kept.name == f"changes-{code_digest()}.diff"
    again = tmp_path / "again"
    git(tmp_path, "clone", str(repository), str(again))
    git(again, "apply", str(kept))
    for name in changes:
        assert (again / name).read_bytes() == (repository / name).read_bytes()
    assert (again / "studies/one/data/s/gates.md").read_text() == "old\n"


def test_a_file_that_git_makes_no_patch_of_is_named(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkout, "_new_files", lambda *_: ["src/gone.py"])
    with pytest.raises(ConfigError, match=r"no patch of src/gone\.py .*commit"):
        patch_of(repository / "study.yaml", repository / "out")


def test_a_folder_within_a_repository_tells_of_itself_only(repository: Path, checkout_at: Callable[..., None]) -> None:
    write(repository / "README.md", "new\n")
    write(repository / "src/loop.py", "new\n")
    write(repository / "src/src/new.py", "new\n")
    checkout_at(repository / "src")
    assert uncommitted() == ["loop.py", "src/new.py"]
    assert b"README" not in patch_of(repository / "study.yaml", repository / "out")


def test_the_environment_says_so(repository: Path) -> None:
    assert environment("cpu")["dirty"] is False
    write(repository / "src/loop.py", "new\n")
    assert environment("cpu")["dirty"] is True


@pytest.mark.parametrize("place", ["no commit", "no repository", "a wheel"])
def test_without_a_commit_the_digest_of_the_code_has_to_do(
    place: str,
    tmp_path: Path,
    checkout_at: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    checkout_at(None if place == "a wheel" else tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    if place == "no commit":
        git(tmp_path, "init")
    found = environment("cpu")
    assert (found["commit"], found["dirty"]) == (None, None)
    with caplog.at_level(logging.WARNING):
        account_for_changes(tmp_path / "study.yaml", tmp_path / "out", with_changes=False)
    assert code_digest() in caplog.text


def test_a_study_is_refused_before_anything_is_made(repository: Path, tmp_path: Path) -> None:
    write(repository / "src/loop.py", "new\n")
    words = [str(DESIGN), "bases=0", f"out={tmp_path / 'out'}"]
    with failing(study, "probe_bases", KeyboardInterrupt) as asked:
        with pytest.raises(ConfigError, match=r"src/loop\.py"):
            study.main(words)
        assert not asked and not (tmp_path / "out").exists()
        with pytest.raises(KeyboardInterrupt):
            study.main([*words, "with_changes=true"])
    (kept,) = (tmp_path / "out").glob("changes-*.diff")
    assert asked and "+new" in kept.read_text()


@pytest.fixture
def own_study(repository: Path, tmp_path: Path) -> Path:
    """A study in a repository of its own, with a protocol in the folder around it; one commit holds both."""
    folder = tmp_path / "mine"
    write(folder / "protocol.md", "# Noise\n")
    write(folder / "noise" / "study.yaml", "old\n")
    git(folder, "init")
    git(folder, "add", ".")
    git(folder, "commit", "-m", "design")
    return folder / "noise" / "study.yaml"


def head(folder: Path) -> str | None:
    return checkout.git_in(folder, "rev-parse", "HEAD")


@pytest.mark.parametrize("changed", ["protocol.md", "noise/study.yaml"])
def test_a_study_in_another_repository_must_be_committed_there(
    changed: str, own_study: Path, repository: Path, tmp_path: Path
) -> None:
    folder, out = own_study.parents[1], own_study.parent / "data" / "first"
    designed = head(folder)
    account_for_changes(own_study, out, with_changes=False)
    account_for_changes(own_study, out, with_changes=False)  # continued
    assert commits_in(out / COMMITS) == [{"code": head(repository), "study": designed}]
    write(folder / "notes.txt", "another commit, and a file that no run reads\n")
    write(folder / changed, "new\n")
    with pytest.raises(ConfigError, match=rf"{changed} are not committed.*with_changes=true"):
        account_for_changes(own_study, out, with_changes=False)
    account_for_changes(own_study, out, with_changes=True)
    git(folder, "commit", "-am", "amendment")
    account_for_changes(own_study, out, with_changes=False)
    code = head(repository)
    assert [*map(tuple, map(dict.values, commits_in(out / COMMITS)))] == [
        (code, designed), (code, None), (code, head(folder)),
    ]  # fmt: skip
    assert protocol_commit(own_study.parent, None) == designed
    shutil.copytree(own_study.parent, tmp_path / "given" / "away")
    assert protocol_commit(tmp_path / "given" / "away", None) == designed


def test_of_a_study_that_no_commit_holds_this_is_said(
    repository: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        account_for_changes(tmp_path / "study.yaml", tmp_path / "out", with_changes=False)
    assert "no commit" in caplog.text and str(tmp_path / "study.yaml") in caplog.text
    assert not (tmp_path / "out").exists()


def test_times_and_base_of_a_run_reach_the_committed_study(tmp_path: Path) -> None:
    from qerl_studies.runs.collect import write_study
    from qerl_studies.runs.find import find_runs
    from qerl_studies.runs.load import load_run

    path = find_runs(CONF_DIR.parent / "tests" / "assets" / "runs")[0]
    folder = tmp_path / "runs" / path.name
    for file in path.iterdir():
        if file.is_file():
            write(folder / file.name, file.read_bytes())
    done = json.loads((folder / "done.json").read_text())
    write_study([folder], tmp_path / "old", mixed_code=False)
    assert not {"started", "ended"} & load_run(tmp_path / "old" / path.name).done.keys()  # and it is read
    times = {"started": 1764000000.5, "ended": 1764000099.25}
    (folder / "done.json").write_text(json.dumps(done | times))
    write_study([folder], tmp_path / "new", mixed_code=False)
    assert load_run(tmp_path / "new" / path.name).done.items() >= times.items()
    unknown = {"started": None, "ended": 1764000099.25}  # continued from a checkpoint of an older version
    (folder / "done.json").write_text(json.dumps(done | unknown))
    write_study([folder], tmp_path / "half", mixed_code=False)
    assert load_run(tmp_path / "half" / path.name).done.keys() & times.keys() == {"ended"}
