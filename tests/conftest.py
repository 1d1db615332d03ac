"""Small objects that many test files need. Nothing here imports torch before a test asks for it."""

from __future__ import annotations

import atexit
import errno
import fcntl
import gc
import os
import pickle
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import replace
from functools import cache, lru_cache, partial
from importlib import invalidate_caches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from omegaconf import DictConfig

import tests.unchanging  # noqa: F401
from qerl_bench import config as configs
from qerl_bench.config import build
from qerl_bench.experiment_spec import Experiment
from qerl_core.options import user_options
from qerl_core.options.composer import Composer
from tests.quick_compose import config

if TYPE_CHECKING:
    from qerl_bench.aqn.injector import NoiseInjector
    from qerl_bench.model.policy import Policy

COMPOSER = Composer()


def compose(overrides: list[str] | None = None) -> DictConfig:
    """As the program's, which reads the YAML files every time: a fifth of a second. Here they do not change."""
    return pickle.loads(_composed(*(overrides or [])))


@lru_cache(maxsize=2048)
def _composed(*overrides: str) -> bytes:
    return pickle.dumps(config(COMPOSER, [*overrides]))


configs.compose = compose  # what every test and module imports from here on

SMALL = (
    "device=cpu",
    "steps=4",
    "save_every=2",
    "model.layers=2",
    "model.hidden_size=32",
    "model.heads=2",
    "model.kv_heads=1",
    "model.intermediate_size=64",
    "model.warm_start_steps=0",
    "lora.rank=4",
    "task.max_completion_tokens=12",
    "rollout.prompts_per_step=3",
    "rollout.group_size=4",
    "optim.warmup_steps=0",
    "eval.questions=4",
    "eval.samples=2",
)


def words(overrides: tuple[str, ...]) -> list[str]:
    """SMALL and `overrides`, without what the chosen options do not have."""
    wanted = {"lora=none": "lora.rank", "eval=none": "eval."}
    absent = tuple(prefix for option, prefix in wanted.items() if option in overrides)
    return [word for word in SMALL if not word.startswith(absent)] + list(overrides)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Looks for no garbage among what all tests import before they have ended, which would take a third of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # libraries report what is left over at the end
        gc.enable()


@pytest.fixture(autouse=True, scope="module")
def own_garbage() -> None:
    """Looks for no garbage among what earlier files have imported: a second each time that code or a test asks."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What a session of tests remembers in the user's cache is its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True, scope="session")
def no_power_cut() -> Iterator[None]:
    """Nobody waits for the disk, which takes milliseconds a file: what is written can be read before it lies there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    """What a library sets in the environment of this process (W&B its WANDB_SERVICE) is gone for the next test."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(autouse=True)
def no_own_options(stand_in: Callable[..., None]) -> Iterator[None]:
    """Each test begins without folders of one's own options, as a process does, and leaves none of their modules."""
    stand_in(user_options, _in_use=[], _loaded={})
    stand_in(sys, path=[*sys.path])
    yield
    _, *folders = user_options.folders()
    if not folders:
        return
    files = {name: Path(getattr(module, "__file__", None) or "") for name, module in sys.modules.items()}
    for name in [name for name, file in files.items() if any(map(file.is_relative_to, folders))]:
        del sys.modules[name]


@cache
def experiment_of(*overrides: str) -> Experiment:
    return build(compose(words(overrides)))


@pytest.fixture(scope="session")
def make_experiment() -> Callable[..., Experiment]:
    """make_experiment("algo=sft", ...): a small experiment on the untrained tiny model, composed once per choice."""
    return experiment_of


@pytest.fixture(scope="session")
def make_config() -> Callable[..., Any]:
    """make_config("algo=sft", ...): the composed config of make_experiment."""
    return lambda *overrides: compose(words(overrides))


@pytest.fixture(scope="session")
def make_policy() -> Callable[..., Policy]:
    """make_policy("model.dtype=bfloat16", quant="mxfp4", width=64, sharp=True, adapted=True): tiny and untrained.

    NF4 needs a width that is a multiple of 64. An untrained model is close to uniform over its 262 tokens: `sharp`
    gives its last norm scales of either sign and size 20, so that tokens differ by several nats. `adapted` gives the
    adapter, whose B is zero at first, an effect of its own.
    """

    def make(
        *overrides: str,
        quant: str = "nvfp4",
        width: int = 32,
        sharp: bool = False,
        adapted: bool = False,
        device: str = "cpu",
    ) -> Policy:
        import torch

        from qerl_bench.model_setup import build_policy

        experiment = experiment_of(f"quant={quant}", f"model.hidden_size={width}", *overrides)
        policy = build_policy(experiment, None, device)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            if sharp:
                scale = policy.model.model.norm.weight
                scale.copy_(20 * torch.randn(scale.shape, generator=generator))
            for name, parameter in policy.model.named_parameters() if adapted else ():
                if "lora_B" in name:
                    parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
        return policy

    return make


@pytest.fixture(scope="session")
def make_noise() -> Callable[..., NoiseInjector]:
    """make_noise(policy.norms, 0.05, seed=3, relative=True).for_rollout(1, 0): constant noise on the given norms.

    With adapters=policy.noise.adapters it is on those.
    """

    def make(
        norms: Mapping[str, Any],
        sigma: float = 1e-2,
        seed: int = 0,
        per_norm_scale: Mapping[str, float] | None = None,
        adapters: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> NoiseInjector:
        from qerl_bench.aqn.base import OpenLoop
        from qerl_bench.aqn.constant import Constant
        from qerl_bench.aqn.injector import NoiseInjector

        offsets = dict.fromkeys(norms, 0.0)
        controller = OpenLoop(Constant(name="constant", level=sigma), 100, per_norm_scale)
        spec = replace(experiment_of().noise, where="adapters" if adapters else "norms", **options)
        return NoiseInjector(spec, controller, norms, offsets, "model.norm", seed, adapters)

    return make


@pytest.fixture
def listen(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, str], list[tuple[Any, ...]]]:
    """listen(owner, "name"): the positional arguments of each call of it, in a list that grows; calls go through."""

    def heard(owner: Any, name: str) -> list[tuple[Any, ...]]:
        calls: list[tuple[Any, ...]] = []
        function = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given, **named: (calls.append(given), function(*given, **named))[1])
        return calls

    return heard


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """stand_in(torch.cuda, is_available=lambda: True, ...): these in place of what a module or class has."""

    def replaced(owner: Any, **members: Any) -> None:
        for name, member in members.items():
            monkeypatch.setattr(owner, name, member)

    return replaced


@pytest.fixture
def gpu(stand_in: Callable[..., None]) -> Callable[..., None]:
    """gpu(is_available=lambda: True, ...): functions of torch.cuda on a card that need not be there."""
    import torch

    return partial(stand_in, torch.cuda)


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., None]:
    """packages(tiktoken=True, sentencepiece=False): one is found, as an empty module, and the other is not."""
    found = tmp_path_factory.mktemp("packages")
    monkeypatch.syspath_prepend(found)

    def pretend(**installed: bool) -> None:
        for name, there in installed.items():
            if there:
                (found / f"{name}.py").touch()
                monkeypatch.delitem(sys.modules, name, raising=False)
            else:
                monkeypatch.setitem(sys.modules, name, None)
        invalidate_caches()

    return pretend


@pytest.fixture
def no_packages(packages: Callable[..., None]) -> None:
    """As if no optional package were installed."""
    names = ("bitsandbytes", "datasets", "gguf", "lm_eval", "math_verify", "reasoning_gym", "submitit", "wandb")
    packages(**dict.fromkeys(names, False))


@pytest.fixture
def run_by(stand_in: Callable[..., None]) -> Callable[[str], None]:
    """run_by(code): this Python code, which gets the words of a run, makes the runs of sweeps."""
    from qerl_bench.sweep import job, processes

    def program(code: str) -> None:
        for module in (job, processes):
            stand_in(module, run_command=lambda ranks=1: [sys.executable, "-c", code])

    return program


@pytest.fixture
def attend(stand_in: Callable[..., None]) -> Callable[[str], None]:
    """attend("masked"): from here on packed sequences are attended to by this backend."""
    from qerl_bench.model import attention

    return lambda name: stand_in(attention, packed_backend=lambda *_: name)


@pytest.fixture
def no_locks(stand_in: Callable[..., None]) -> None:
    """A file system that has no locks, as some network file systems."""

    def missing(file: object, kind: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    stand_in(fcntl, flock=missing)


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder for PATH with `qerl-bench` and `python`, which start at once."""
    from tests.parallel.programs import served

    folder = tmp_path_factory.mktemp("programs")
    with served(folder):
        yield folder


@pytest.fixture(scope="module")
def no_figures() -> Iterator[None]:
    """Runs draw nothing, which takes longer than the steps of a tiny model."""
    from tests.short_runs import without_figures

    with without_figures():
        yield
