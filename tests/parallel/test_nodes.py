"""Two machines, as two agents of torchrun on one: a run as in one process, and ends in words."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from qerl_bench.parallel import World
from qerl_bench.train.data_parallel import require_equal_inputs
from qerl_core.checks import ConfigError
from tests.parallel.ranks import run, start
from tests.parallel.test_ranks import WORDS, assert_equal

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
RUN = ROOT / "src" / "run.py"
LIMIT_S = 600.0
KILLED = f"""
import os, runpy
from tests.parallel.test_ranks import kill_in_step_3
kill_in_step_3(1, int(os.environ["RANK"]))
runpy.run_path({str(RUN)!r}, run_name="__main__")
"""


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def agents(count: int, program: list[object], place: Path, *conf: str) -> tuple[list[int], list[str]]:
    """Exit codes and outputs of `count` of two agents, each of which starts one rank; which one is left to chance."""
    words = [*("--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "test", "--no-python")]
    words += [*("--rdzv-endpoint", f"127.0.0.1:{free_port()}"), *conf, *map(str, program)]
    running, files = [], [place / f"said-{node}" for node in range(count)]
    for file in files:
        with open(file, "w") as output:
            started = [sys.executable, "-m", "torch.distributed.run", *words]
            running.append(subprocess.Popen(started, cwd=ROOT, stdout=output, stderr=output))
    return [process.wait(LIMIT_S) for process in running], [file.read_text() for file in files]


def test_two_machines_make_the_run_of_one_process_and_continue_it_after_a_death(tmp_path: Path, programs: Path) -> None:
    ended = run([*WORDS, f"root={tmp_path / 'alone'}"], 1, tmp_path / "log")
    assert ended.codes == [0], ended.said
    (dying := tmp_path / "dying_run.py").write_text(KILLED)
    words = [*WORDS, "parallel.shard=true", "parallel.exact=true", f"root={tmp_path / 'two'}"]
    codes, said = agents(2, [programs / "python", dying, *words], tmp_path)
    assert 0 not in codes
    (killed,) = [one for one in said if "Signal 9 (SIGKILL)" in one]
    (told,) = [one for one in said if one != killed]
    assert told.partition("Traceback")[0].count("another process has ended") == 1, told
    codes, said = agents(2, [programs / "python", RUN, *words], tmp_path)
    assert codes == [0, 0] and "".join(said).count("continuing after step 2") == 1, said
    assert_equal(tmp_path / "alone" / "runs" / "run", tmp_path / "two" / "runs" / "run")


def test_a_machine_that_waits_for_another_in_vain_leaves_nothing_behind(tmp_path: Path, programs: Path) -> None:
    program = [programs / "python", RUN, *WORDS, f"root={tmp_path / 'root'}"]
    (code,), (said,) = agents(1, program, tmp_path, "--rdzv-conf", "join_timeout=2,last_call_timeout=1")
    assert code != 0 and "RendezvousTimeoutError" in said, said
    assert not (tmp_path / "root").exists()


def waiting_briefly(rank: int) -> None:
    from qerl_core.process import rendezvous

    rendezvous.LIMIT_S = 2.0


@pytest.mark.parametrize("there", [True, False])
def test_a_process_without_the_others_names_them_or_the_address_in_a_sentence(there: bool, tmp_path: Path) -> None:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    port = free_port()
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False) if there else None
    process = start([*WORDS, f"root={tmp_path / 'root'}"], tmp_path / "said", 1, 3, port, waiting_briefly)
    process.join(LIMIT_S)
    said = " ".join((tmp_path / "said").read_text().split())
    assert process.exitcode == 1 and "Traceback" not in said and f"127.0.0.1:{port}" in said, said
    assert ("of 3 processes 0, 2 did not arrive" if store else "--rdzv-endpoint") in said
    assert not (tmp_path / "root").exists()


def other_weights(rank: int) -> None:
    import qerl_bench.run_setup as setup

    digest = setup.digest_of
    setup.digest_of = lambda model, base: f"{digest(model, base)}{'0' * rank}"


def other_data(rank: int) -> None:
    import qerl_bench.run_setup as setup

    inputs = setup.inputs_of
    setup.inputs_of = lambda *given: inputs(*given) | ({"the training data": "other"} if rank else {})


@pytest.mark.parametrize(("sabotage", "name"), [(other_weights, "the base weights"), (other_data, "the training data")])
def test_machines_with_other_files_are_refused_once(sabotage: Any, name: str, tmp_path: Path) -> None:
    ended = run([*WORDS, f"root={tmp_path / 'root'}"], 2, tmp_path / "log", sabotage)
    assert ended.codes == [2, 2] and ended.said.count(f"{name}: process 1 has another") == 1, ended.said
    assert not (tmp_path / "root" / "runs" / "run").exists()


def test_machines_with_other_words_are_refused_by_the_option() -> None:
    class Other(World):
        def gather(self, value: Any) -> list[Any]:
            return [value, value | {"the option optim": "lr=2", "new": "1"}]

    with pytest.raises(ConfigError, match="the option optim, new: process 1"):
        require_equal_inputs({"the option optim": "lr=1", "the option seed": "0"}, Other())
    require_equal_inputs({"the option optim": "lr=1"}, World())
