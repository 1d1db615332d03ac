"""Runs in vLLM's worker processes: vLLM's own worker for the platform, extended by writable norm scales.

Only vLLM imports this module, through its public option `worker_cls`; nothing in vLLM is patched. The scales are
converted to FP32 once, before anything is compiled or captured, because vLLM's RMSNorm multiplies in the dtype of its
scale and BF16 would round the noise away. After that they are only written in place.
"""

# vLLM is installed in an environment without a type checker.
# pyright: reportMissingImports=false
from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from typing import Any

import torch
from safetensors.torch import load_file
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.utils import dispatch_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.platforms import current_platform

from qerl_bench.aqn.injector import scale_of
from qerl_bench.engine.vllm.process import NORMS, is_running

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker

RUN_PID = "QERL_BENCH_RUN_PID"  # set by the training process
WATCH_S = 0.5  # between two checks that it still runs


class Worker(PlatformWorker):
    """vLLM's worker; the methods `qerl_*` are called by `LLM.collective_rpc` and return plain data."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        run_pid = int(os.environ[RUN_PID])
        if run_pid != os.getpid():
            exit_after(run_pid)
        super().__init__(*args, **kwargs)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        for norm in self._norms().values():
            norm.weight = torch.nn.Parameter(scale_of(norm).detach().float(), requires_grad=False)
        self.clean = {name: scale_of(norm).cpu().clone() for name, norm in self._norms().items()}

    def _norms(self) -> dict[str, torch.nn.Module]:
        """The norms that noise or training may change, by their names in the policy."""
        model = self.get_model()
        return {name: model.get_submodule(name) for name in self.vllm_config.additional_config[NORMS]}

    def qerl_set_norms(self, path: str) -> dict[str, int]:
        """Write the scales in the file `path` into the norms of the same names; the file must have all of them.

        Returns how many norms there are, how many now equal the file exactly, and how many differ from the checkpoint.
        """
        scales = load_file(path)
        modules = self._norms()
        assert scales.keys() == modules.keys(), f"norms of the engine {sorted(modules)}, of the policy {sorted(scales)}"
        with torch.no_grad():
            for name, scale in scales.items():
                scale_of(modules[name]).copy_(scale)
        stored = {name: scale_of(norm).cpu() for name, norm in modules.items()}
        return {
            "norms": len(stored),
            "exact": sum(torch.equal(stored[name], scales[name]) for name in stored),
            "changed": sum(not torch.equal(stored[name], self.clean[name]) for name in stored),
        }

    def qerl_started(self) -> dict[str, Any]:
        """This process's ids, the kernel of each linear layer, and the bytes of the weights."""
        model = self.get_model()
        tensors = [*model.parameters(), *model.buffers()]
        return {
            "pid": os.getpid(),
            "parent": os.getppid(),
            "kernels": kernels(model),
            "lora": sorted({type(m.punica_wrapper).__name__ for m in model.modules() if hasattr(m, "punica_wrapper")}),
            "norm_dtype": str(next(iter(self.clean.values())).dtype).removeprefix("torch."),
            "weight_bytes": sum(tensor.nbytes for tensor in {t.data_ptr(): t for t in tensors}.values()),
        }


def kernels(model: torch.nn.Module) -> dict[str, str]:
    """For each linear layer, vLLM's quantization scheme or method and the kernel that it chose."""
    names = {}
    for name, module in model.named_modules():
        if not isinstance(module, LinearBase | ParallelLMHead):
            continue
        method = module.quant_method
        scheme = getattr(module, "scheme", None)
        words = [type(method if scheme is None else scheme).__name__]
        if isinstance(method, UnquantizedLinearMethod):
            words.append((getattr(method, "_gemm_impl", None) or dispatch_unquantized_gemm()).__name__)
        kernel = getattr(scheme, "kernel", None)
        if kernel is not None:
            words.append(type(kernel).__name__)
        names[name.removesuffix(".base_layer")] = " / ".join(words)
    return names


def exit_after(run: int) -> None:
    """End this process, and vLLM's engine process between it and the run, when process `run` is gone for any reason."""
    engine = os.getppid()

    def wait() -> None:
        while is_running(run):
            time.sleep(WATCH_S)
        if engine != run:
            with suppress(ProcessLookupError):  # it has already ended
                os.kill(engine, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=wait, daemon=True, name="exit with the run").start()
