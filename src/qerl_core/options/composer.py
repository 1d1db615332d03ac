"""From command-line words to configs: Hydra composes each choice of options once; values are set in copies."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

from hydra import __version__ as hydra_version
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.hydra import Hydra
from hydra.conf import RuntimeConf
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException, OverrideParseException
from hydra.plugins.config_source import ConfigResult
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from qerl_core.checks import ConfigError, require
from qerl_core.file_state import FileState, file_state
from qerl_core.options import user_options
from qerl_core.options.files import options_of, plain_keys
from qerl_core.options.fingerprint import fingerprint, flat
from qerl_core.options.hydra_options import of_several, refuse_unusable
from qerl_core.options.model_names import short_name
from qerl_core.options.names import check_option_names, search_folders
from qerl_core.options.place_words import AXIS, REWARD, with_places
from qerl_core.options.suggestions import unknown_key, unknown_option, unread
from qerl_core.process.installation import CONF_DIR

# Hydra 1.4, which comes with OmegaConf 2.4, warns of the names of 1.3.
HYDRA_1_3 = hydra_version.startswith("1.3")
HYDRA_DEFAULTS: dict[str, Any] = {"version_base": "1.3"} if HYDRA_1_3 else {}
REGISTER = "register_new_resolver" if HYDRA_1_3 else "register_resolver"
_resolved: ContextVar[dict[Any, Any] | None] = ContextVar("the config whose name is asked for", default=None)


def register_resolvers() -> None:
    """Register `${fingerprint:}`, `${model_name:ID}`, `${fitting:N,STEPS}` and `${half:N,STEPS}`; may be repeated."""
    register = getattr(OmegaConf, REGISTER)
    register("fingerprint", lambda *, _root_: fingerprint(_resolved.get() or _root_), replace=True)
    register("model_name", short_name, replace=True)
    register("fitting", fitting, replace=True)
    register("half", half, replace=True)


def fitting(warmup: int, steps: object) -> int:
    """`warmup` steps, or as many as leave one of the `steps` of a shorter run; `Experiment` refuses other `steps`."""
    return max(0, min(warmup, steps - 1)) if isinstance(steps, int) else warmup


def half(warmup: int, steps: object) -> int:
    """`warmup` steps, or half of the `steps` of a shorter run."""
    return min(warmup, steps // 2) if isinstance(steps, int) else warmup


class ReadOnce(ConfigRepository):
    """Hydra's repository, which gives fresh copies of what this process has read of files that are as they were."""

    _read: ClassVar[dict[Any, bytes]] = {}  # pickled

    def __init__(self, like: ConfigRepository) -> None:
        self.sources = like.sources

    def __deepcopy__(self, memo: object) -> ReadOnce:
        return ReadOnce(self)  # Hydra copies it for each config, and gives the copy other sources

    def load_config(self, config_path: str) -> ConfigResult | None:
        file = f"{config_path.removesuffix('.yaml')}.yaml"
        places = tuple((source.path, _state(Path(source.path, file))) for source in self.sources)
        if (config_path, places) not in self._read:
            self._read[config_path, places] = pickle.dumps(super().load_config(config_path))
        return pickle.loads(self._read[config_path, places])


def _state(file: Path) -> FileState | None:
    """What changes with a file; nothing where there is none, as in a package."""
    try:
        return file_state(file)
    except OSError:
        return None


@contextmanager
def reading_once() -> Iterator[Hydra]:
    """Hydra for conf/, whose files it reads once."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF_DIR), **HYDRA_DEFAULTS, job_name="run"):
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        loader: Any = hydra.config_loader
        loader.repository = ReadOnce(loader.repository)
        yield hydra


class Composer:
    """Composes many configs, such as the points of a sweep, which differ mostly in values.

    Hydra takes a fifth of a second for a config. Here each choice of options is composed once, and values are set in
    copies of it, by Hydra's own function. The YAML files must not change meanwhile.
    """

    def __init__(self) -> None:
        register_resolvers()
        self._composed = lru_cache(maxsize=256)(_composed)
        self._parsed = lru_cache(maxsize=1024)(lambda word: OverridesParser.create().parse_overrides([word])[0])

    def tree(self, overrides: Sequence[str]) -> dict[str, Any]:
        """The config of `compose` as plain containers. Raises ConfigError for a word that names no option."""
        return self.chosen(overrides)[0]

    def chosen(self, overrides: Sequence[str]) -> tuple[dict[str, Any], RuntimeConf]:
        """As `tree`, with Hydra's record of which option was chosen for each axis, and from which folders."""
        cfg, runtime = self.unresolved(overrides)
        return plain_tree(cfg), runtime

    def unresolved(self, overrides: Sequence[str]) -> tuple[DictConfig, RuntimeConf]:
        """As `chosen`, with the interpolations: a config that nobody else has."""
        try:
            overrides = self.spelled_out(overrides)
            return self._unresolved(overrides)
        except HydraException as error:
            raise ConfigError(self.explained(error, overrides)) from error

    def spelled_out(self, words: Sequence[str]) -> list[str]:
        """`words` with option and key of each model=PLACE and reward=FILE.py; an option of that name comes first."""
        named = [word for word in words if word.startswith((AXIS, REWARD))]
        if not named or with_places(named, options_of([CONF_DIR], "model")) == named:
            return [*words]
        search_path = tuple(user_options.split_search_path(words)[0])
        folders = search_folders(self._composed(search_path)[1]) if search_path else [CONF_DIR]
        return with_places(words, options_of(folders, "model"))

    def _unresolved(self, overrides: Sequence[str]) -> tuple[DictConfig, RuntimeConf]:
        parsed = [self._parsed(word) for word in overrides]
        for word, override in zip(overrides, parsed, strict=True):
            require(_names(override), f"{word}: an option is chosen by its name, {override.key_or_group}=NAME")
        values = [override for override in parsed if _is_value(override)]
        if not all(override in values or _is_choice(override) for override in parsed):
            values = []  # ~optim or optim={lr: 1}, whose place among the values matters
        composed, runtime = self._composed(
            tuple(word for word, override in zip(overrides, parsed, strict=True) if override not in values)
        )
        cfg = pickle.loads(composed)
        ConfigLoaderImpl._apply_overrides_to_config(values, cfg)
        if any(map(_may_rename, values)):
            check_option_names(cfg, runtime)
        return cfg, runtime

    def explained(self, error: HydraException, overrides: Sequence[str]) -> str:
        """What is said of Hydra's `error` over these words: the option that was probably meant."""
        if isinstance(error, OverrideParseException):
            return unread(error.override)
        text = " ".join(str(error).split("\nConfig search path:")[0].split())
        missing = re.search(r"Could not find '([^']+)/([^'/]+)'", text)
        unknown = re.search(r"Could not override '([^']+)'", text)
        if (sweeps := re.match(r"Sweep parameters '(.+)' requires --multirun", text)) is not None:
            return of_several(sweeps[1])
        if (missing is None and unknown is None) or (missing is not None and missing[1].startswith("hydra")):
            if (several := re.match(r"Ambiguous value for argument '([^'=]+)=([^']+)'", text)) is None:
                return text
            key, values = several.groups()
            first = values.partition(",")[0]
            if re.fullmatch(r"[\w./-]+", first):
                self.tree([f"{key}={first}" if word == f"{key}={values}" else word for word in overrides])
            return f"{key}={values} has several values: -m runs them all; a list is {key}=[{values}]"
        choices = [word for word in overrides if _is_choice(one := self._parsed(word)) and _is_axis(one)]
        try:
            composed, runtime = self._composed(tuple(choices if missing is None else ()))
        except (HydraException, ConfigError):
            composed, runtime = self._composed(())
        folders = search_folders(runtime)
        if missing is not None:
            return unknown_option(missing[1], missing[2], folders)
        assert unknown is not None
        tree = OmegaConf.to_container(pickle.loads(composed), resolve=False)
        assert isinstance(tree, dict)
        chosen = {str(axis): str(option) for axis, option in runtime.choices.items() if "/" not in str(axis)}
        return unknown_key(unknown[1], [*flat({str(key): value for key, value in tree.items()})], chosen, folders)


def _composed(choices: tuple[str, ...]) -> tuple[bytes, RuntimeConf]:
    """The config with these overrides and without the node `hydra`, pickled, and Hydra's record of what was chosen."""
    with reading_once():
        try:
            cfg = hydra_compose("run", list(choices), return_hydra_config=True)
        except ValueError as error:  # what Hydra raises for quant=5 and =5
            search_path, others = user_options.split_search_path(choices)
            folders = search_folders(hydra_compose("run", search_path, return_hydra_config=True).hydra.runtime)
            for axis, _, value in (word.partition("=") for word in others):
                if axis and (CONF_DIR / axis).is_dir() and value not in options_of(folders, axis):
                    raise ConfigError(unknown_option(axis, value, folders)) from error
            raise ConfigError(f"{' '.join(choices)}: {error}. An option is chosen by name: quant=nvfp4") from error
    with open_dict(cfg):
        hydra = cfg.pop("hydra")
    refuse_unusable(hydra)
    require(
        hydra.mode != RunMode.MULTIRUN,
        "hydra.mode=MULTIRUN would make a sweep of each run, again and again: leave it out, and add -m to make one",
    )
    user_options.use(search_folders(hydra.runtime))
    check_option_names(cfg, hydra.runtime)
    return pickle.dumps(cfg), hydra.runtime


def _is_value(override: Override) -> bool:
    """Whether this sets a single value: steps=3 or optim.lr=1e-5."""
    key = override.key_or_group
    return not override.is_sweep_override() and (
        key in plain_keys() or ("." in key and not override.is_hydra_override())
    )


def _is_axis(override: Override) -> bool:
    """Whether this is about a folder of options of the project, or about where to look for others."""
    return (CONF_DIR / override.key_or_group).is_dir() or override.key_or_group == "hydra.searchpath"


def _may_rename(override: Override) -> bool:
    """Whether a value may be the name or class of an option; `name` alone is that of the run."""
    option, _, key = override.key_or_group.rpartition(".")
    return (option != "" and key in ("name", "_target_")) or isinstance(override.value(), (dict, list))


def _names(override: Override) -> bool:
    """Whether this gives an axis names, if it gives it a list, or any key, if it gives it a mapping.

    Hydra fails for lists of anything else, and an empty mapping changes nothing without a word.
    """
    value: object = None if override.is_sweep_override() else override.value()
    if not (CONF_DIR / override.key_or_group).is_dir():
        return True
    if not isinstance(value, list):
        return value != {}
    return value != [] and all(isinstance(one, str) for one in value)


def _is_choice(override: Override) -> bool:
    """Whether this chooses an option, quant=nvfp4, or is for Hydra itself."""
    return override.is_hydra_override() or (override.type == OverrideType.CHANGE and isinstance(override.value(), str))


def resolved(cfg: DictConfig) -> DictConfig:
    """A copy of `cfg` without interpolations, as config.yaml stores it."""
    return OmegaConf.create(plain_tree(cfg))


def plain_tree(cfg: DictConfig) -> dict[str, Any]:
    """`cfg` as plain containers without interpolations. Its name comes last: a fingerprint asks for all other keys."""
    tree = {key: _plain(cfg[key]) for key in cfg if key != "name"}
    before = _resolved.set(tree)
    try:
        return {str(key): tree[key] if key in tree else cfg[key] for key in cfg}
    finally:
        _resolved.reset(before)


def _plain(node: Any) -> Any:
    return OmegaConf.to_container(node, resolve=True, throw_on_missing=True) if OmegaConf.is_config(node) else node
