"""What shows that a study was designed before its data: dates of its protocol, and amendments that only grow."""

from __future__ import annotations

import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest

from qerl_core.checks import ConfigError
from qerl_studies.commands.check import check_study
from qerl_studies.design.protocol import commits_of, first_start, protocol_commit
from qerl_studies.design.sessions import read_study
from tests.scripts import ROOT

SINCE = 1795818148  # 27 November 2026, 22:22:28 UTC: until then amendments were edited after they were committed
HEADING = "\n## Amendments\n"
PROTOCOLS = sorted(page for page in (ROOT / "studies").rglob("*.md") if HEADING in page.read_text())


def git(folder: Path, *words: str, when: int = 0) -> str:
    dates = {"GIT_AUTHOR_DATE": f"{when} +0000", "GIT_COMMITTER_DATE": f"{when} +0000"}
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    done = subprocess.run(
        ["git", "-C", str(folder), *who, *words], env=dates | {"PATH": "/usr/bin:/bin"}, capture_output=True, text=True
    )
    return done.stdout


def amendments(text: str) -> str:
    return text.partition(HEADING)[2].partition("\n## ")[0].strip().removeprefix("None.")


def edited(versions: list[tuple[str, str]]) -> list[str]:
    """The commits of those versions, in order of time, whose amendments the next version does not begin with."""
    return [commit for (commit, before), (_, after) in pairwise(versions) if not after.startswith(before)]


def test_an_amendment_that_was_changed_is_found() -> None:
    grown = [("a", ""), ("b", "1. One."), ("c", "1. One.\n2. Two.")]
    assert edited(grown) == [] and edited([*grown, ("d", "1. One!\n2. Two.")]) == ["c"]
    assert amendments(f"# A protocol\n{HEADING}\n1. One.\n\n## Price\n") == "1. One."
    assert amendments(f"# A protocol\n{HEADING}\nNone.\n") == ""


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda page: page.relative_to(ROOT / "studies").as_posix())
def test_amendments_are_only_appended(protocol: Path) -> None:
    commits = commits_of(protocol)
    if not commits:
        pytest.skip("no history of git, or one that is cut off")
    before, later = ([one for one, when in commits if (when > SINCE) is new] for new in (False, True))
    shown = [(one, git(protocol.parent, "show", f"{one}:./{protocol.name}")) for one in [*before[-1:], *later]]
    versions = [(commit, amendments(text)) for commit, text in shown]
    assert not edited([*versions, ("what is here", amendments(protocol.read_text()))])


@pytest.fixture
def study(tmp_path: Path) -> tuple[Path, float]:
    """A study in a repository of its own, and when its first run began."""
    folder = tmp_path / "05b"
    shutil.copytree(ROOT / "studies/real-2026/05b", folder, ignore=shutil.ignore_patterns("results", "2026-11-27*"))
    began = first_start(read_study(folder).runs.values())
    assert began is not None
    git(tmp_path, "init")
    return folder, began


def committed(folder: Path, when: float, *names: str) -> str:
    git(folder, "add", *names)
    git(folder, "commit", "-m", "x", when=int(when))
    return git(folder, "rev-parse", "HEAD").strip()


def test_a_protocol_counts_as_it_was_when_the_first_run_began(study: tuple[Path, float]) -> None:
    folder, began = study
    (folder / "protocol.md").write_text("A draft.")
    draft = committed(folder, began - 200, "protocol.md", "study.yaml")
    (folder / "protocol.md").write_text("Frozen.")
    frozen = committed(folder, began - 100, "protocol.md")
    (folder / "protocol.md").write_text("Frozen, with an amendment.")
    committed(folder, began + 100, "protocol.md")
    assert protocol_commit(folder, began) == frozen and protocol_commit(folder, None) == draft
    assert f"protocol.md of {frozen[:8]} before the first run" in check_study(folder)
    design = folder / "study.yaml"
    design.write_text(design.read_text().replace("margin: 0.01", "margin: 0.02"))
    with pytest.raises(ConfigError, match=r"(?s)primary of .*study\.yaml is .*0\.02.* and was .*0\.01.*take back"):
        check_study(folder)


def test_a_protocol_that_came_after_the_first_run_is_refused(study: tuple[Path, float]) -> None:
    folder, began = study
    assert check_study(folder).endswith("arms, finished")
    (folder / "protocol.md").write_text("Written to fit.")
    assert "git does not know protocol.md" in check_study(folder)
    committed(folder, began + 1, "protocol.md", "study.yaml")
    assert protocol_commit(folder, began) is None
    with pytest.raises(ConfigError, match=r"protocol\.md came on 26 November 2026.*the first run began on 26 November"):
        check_study(folder)
