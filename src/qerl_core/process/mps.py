"""NVIDIA's Multi-Process Service (MPS) for the processes that this one starts.

Kernels of several processes then run side by side on a GPU; without it, processes take turns. In return they share a
fault: a process that ends in an illegal access ends its neighbours, which a sweep reports as failed and repeats when it
is started again. Left out: limits of threads or memory for each process (`gpu_share.py` has shares of memory).

Source: https://docs.nvidia.com/deploy/mps/
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from qerl_core.checks import require

CONTROL = "nvidia-cuda-mps-control"
PIPES = "CUDA_MPS_PIPE_DIRECTORY"  # by which a process finds the service
START_S, END_S = 10.0, 10.0
WITHOUT = "Leave mps=true out: runs on a GPU then take turns"
# Whether a process gets a context on a GPU; the driver alone says so, at a hundredth of the price of torch.
CLIENT = """
import ctypes, sys
cuda, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
code = cuda.cuInit(0) or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
sys.exit(f"CUDA error {code}" if code else 0)
"""


@contextmanager
def side_by_side(wanted: bool) -> Iterator[None]:
    """Have MPS for all processes that are started inside, if it is `wanted` and no service is chosen already.

    Raises ConfigError if it cannot be started, or if a process cannot use a GPU through it.
    """
    if not wanted or PIPES in os.environ:
        yield
        return
    require(
        shutil.which(CONTROL) is not None,
        f"mps=true needs {CONTROL}, a program of NVIDIA's driver, in PATH. {WITHOUT}",
    )
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:
        changed = {PIPES: folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        visible = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}  # ids stay theirs
        daemon = subprocess.Popen(
            [CONTROL, "-f"], env=visible | changed, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        try:
            wait_for(Path(folder, "control"), daemon)
            refuse_without_gpu(os.environ | changed)
            os.environ.update(changed)
            yield
        finally:
            for key in changed:
                os.environ.pop(key, None)
            end(daemon, visible | changed)


def wait_for(pipe: Path, daemon: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while not pipe.exists():
        require(
            daemon.poll() is None and time.monotonic() < deadline,
            f"{CONTROL} has not started within {START_S:g} s (exit code {daemon.poll()}). {WITHOUT}",
        )
        time.sleep(0.05)


def refuse_without_gpu(environment: Mapping[str, str]) -> None:
    client = subprocess.run([sys.executable, "-c", CLIENT], env=environment, capture_output=True, text=True)
    require(
        client.returncode == 0,
        f"a process cannot use a GPU through MPS: {client.stderr.strip()}. {WITHOUT}",
    )


def end(daemon: subprocess.Popen[bytes], environment: Mapping[str, str]) -> None:
    """Let the service end with its last client, or now."""
    with suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run([CONTROL], input=b"quit\n", env=environment, capture_output=True, timeout=END_S)
    try:
        daemon.wait(END_S)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()
