"""Leases between machines: each process below says by itself which machine it is, and has no locks if told so."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from qerl_core.rundir import lease, locks
from tests.failing import failing

PEER = """
import sys, time
from qerl_core.rundir import lease
from qerl_core.rundir import locks
lease.machine = lambda: sys.argv[2]
lease.BEAT_S, lease.STALE_S = 0.2, float(sys.argv[3])
locks.fcntl.flock = lambda file, kind: None  # as where locks hold on one machine only, and this is another
held = locks.lock(__import__("pathlib").Path(sys.argv[1]))
print("none" if held is None else "held", flush=True)
if held is not None:
    sys.stdin.readline()
    held.close()
"""


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """peer(path, machine, stale_s): a process that takes a lock, says so, and releases it when told."""
    monkeypatch.setenv("PYTHONPATH", str(Path(lease.__file__).parents[2]))
    started: list[subprocess.Popen[str]] = []

    def start(path: Path, machine: str, stale_s: float = 60) -> subprocess.Popen[str]:
        words = [sys.executable, "-c", PEER, str(path), machine, str(stale_s)]
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, text=True))
        return started[-1]

    yield start
    for process in started:
        with process:
            process.kill()


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def released(process: subprocess.Popen[str]) -> None:
    process.communicate("\n", timeout=60)
    assert process.returncode == 0


def test_one_of_many_machines_gets_a_lock_and_the_next_when_it_is_released(tmp_path: Path, peer) -> None:
    path = tmp_path / ".lock"
    peers = [peer(path, f"machine-{number}") for number in range(4)]
    results = [said(process) for process in peers]
    assert sorted(results) == ["held", "none", "none", "none"]
    assert f"pid {peers[results.index('held')].pid}, since 20" in str(locks.holder(path))
    assert locks.lock(path) is None
    released(peers[results.index("held")])
    assert locks.holder(path) is None
    held = locks.lock(path)
    assert held is not None
    held.close()
    assert [file.name for file in tmp_path.iterdir()] == [".lock"]


def test_machines_with_names_alike_do_not_write_into_each_others_leases(
    tmp_path: Path, stand_in: Callable[..., None]
) -> None:
    """The second machine takes the lease between the first one's writing and placing."""
    path, place, names, seconds = tmp_path / ".lock", lease.link_exclusively, ["cluster-node-1"], []

    def first_after_second(writing: Path, to: Path) -> bool:
        if len(names) == 1:
            names.append("cluster-node-2")
            seconds.append(lease.Lease.take(path, "second", alone=True))
            names[1:] = ["cluster-node-1"]
        return place(writing, to)

    stand_in(lease, machine=lambda: names[-1], link_exclusively=first_after_second)
    assert lease.Lease.take(path, "first", alone=True) is None
    assert (tmp_path / ".lock.lease").read_text().startswith("second")
    seconds[0].end()
    assert list(tmp_path.iterdir()) == []


def test_the_lease_of_a_killed_process_counts_here_never_and_elsewhere_until_it_is_stale(tmp_path: Path, peer) -> None:
    path = tmp_path / ".lock"
    first = peer(path, "a")
    assert said(first) == "held"
    first.kill()
    first.wait()
    again = peer(path, "a")
    assert said(again) == "held"
    again.kill()
    again.wait()
    other = peer(path, "b")
    assert said(other) == "none"
    server = lease.server_time(tmp_path)
    os.utime(tmp_path / ".lock.lease", (server - 100, server - 100))
    later = peer(path, "b")  # 100 s of silence, of 60
    assert said(later) == "held"
    released(later)


def test_a_clock_that_is_wrong_by_a_year_changes_nothing(tmp_path: Path, peer, monkeypatch: pytest.MonkeyPatch) -> None:
    process = peer(tmp_path / ".lock", "a")
    assert said(process) == "held"
    now = time.time
    for wrong in (-3e7, 3e7):
        monkeypatch.setattr(time, "time", lambda wrong=wrong: now() + wrong)
        assert f"pid {process.pid}" in str(locks.holder(tmp_path / ".lock"))
    released(process)


def test_who_was_suspended_for_too_long_ends_when_it_wakes(tmp_path: Path, peer) -> None:
    path = tmp_path / ".lock"
    first = peer(path, "a")
    assert said(first) == "held"
    first.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, first.pid, os.WSTOPPED | os.WNOWAIT)
    server = lease.server_time(tmp_path)
    os.utime(tmp_path / ".lock.lease", (server - 100, server - 100))
    second = peer(path, "b")
    assert said(second) == "held"
    first.send_signal(signal.SIGCONT)
    assert first.wait(60) == os.EX_TEMPFAIL
    assert re.search(rf"\.lock\.lease: it is that of another process now .*pid {second.pid}", first.stderr.read())
    assert f"pid {second.pid}" in (tmp_path / ".lock.lease").read_text()
    released(second)


BAD = {"empty": b"", "zeros": bytes(60), "no text": b"\xff\xfe\x80 pid", "half": b"node, pid 4", "one word": b"a\nb\n"}


@pytest.mark.parametrize("content", BAD.values(), ids=BAD)
def test_a_lease_that_cannot_be_read_is_nobodys_and_ends_when_it_is_stale(
    content: bytes, tmp_path: Path, no_locks: None
) -> None:
    path = tmp_path / ".lock"
    path.touch()
    file = lease.lease_of(path)
    file.write_bytes(content)
    assert locks.lock(path) is None and "does not name" in str(locks.holder(path))
    server = lease.server_time(tmp_path)
    os.utime(file, (server - 200, server - 200))
    assert locks.holder(path) is None
    held = locks.lock(path)
    assert held is not None and lease.is_readable(file.read_text())
    held.close()


@pytest.mark.parametrize("content", [None, *BAD.values()], ids=["deleted", *BAD])
def test_a_holder_makes_a_lease_again_that_was_deleted_or_damaged(content: bytes | None, tmp_path: Path, peer) -> None:
    path, file = tmp_path / ".lock", tmp_path / ".lock.lease"
    first = peer(path, "a")
    assert said(first) == "held"
    text = file.read_text()
    file.unlink() if content is None else file.write_bytes(content)
    end = time.monotonic() + 30
    while not file.exists() or lease.read(file) != text:
        assert time.monotonic() < end and first.poll() is None
        time.sleep(0.02)
    second = peer(path, "b")
    assert said(second) == "none"
    released(first)
    assert [left.name for left in tmp_path.iterdir()] == [".lock"]


def test_a_holder_whose_folder_was_replaced_says_so(tmp_path: Path, peer) -> None:
    (tmp_path / "run").mkdir()
    first = peer(tmp_path / "run" / ".lock", "a")
    assert said(first) == "held"
    (tmp_path / "new").mkdir()
    (tmp_path / "run").rename(tmp_path / "old")
    (tmp_path / "new").rename(tmp_path / "run")
    assert first.wait(60) == os.EX_TEMPFAIL
    assert "the folder was replaced by another one" in first.stderr.read()


def test_a_file_system_without_locks_is_guarded_by_the_lease(
    tmp_path: Path, no_locks: None, caplog: pytest.LogCaptureFixture
) -> None:
    held = locks.lock(tmp_path / ".lock")
    assert held is not None and "has no locks" in caplog.text and str(tmp_path) in caplog.text
    assert locks.lock(tmp_path / ".lock") is None
    assert f"pid {os.getpid()}" in str(locks.holder(tmp_path / ".lock"))
    held.close()
    assert locks.holder(tmp_path / ".lock") is None


def test_links_may_be_missing_too(tmp_path: Path) -> None:
    with failing(os, "link", PermissionError(errno.EPERM, os.strerror(errno.EPERM))):
        held = locks.lock(tmp_path / ".lock")
        assert held is not None and locks.lock(tmp_path / ".lock") is None
        held.close()


def test_a_lease_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []

    def fsync(descriptor: int) -> None:
        assert not lease.lease_of(tmp_path / "lock").exists()
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).read_text())

    monkeypatch.setattr(os, "fsync", fsync)
    held = locks.lock(tmp_path / "lock")
    assert held is not None and synced == [lease.lease_of(tmp_path / "lock").read_text()]
    held.close()
