"""The points of a sweep by its words, without running it: what Hydra's sweeper would give the launcher."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from qerl_core.checks import ConfigError
from qerl_core.options.composer import HYDRA_DEFAULTS, Composer, register_resolvers
from qerl_core.options.hydra_options import first_values, refuse_unlisted
from qerl_core.process.installation import CONF_DIR
from qerl_core.sweeps.points import with_swept_axes


def grid(words: Sequence[str]) -> tuple[list[list[str]], int | None]:
    """The words of each point, and `hydra.launcher.slots`. Raises ConfigError as a sweep does.

    An experiment that sweeps adds its own keys, which the words override.
    """
    composer = Composer()
    words = with_swept_axes(composer.spelled_out(words))
    try:
        hydra = hydra_of(first_values(words))
        params = hydra.sweeper.params or {}
        given = [f"{key}={value}" for key, value in params.items()]
        overrides = OverridesParser.create().parse_overrides([*given, *words])
        refuse_unlisted(overrides)
        points = [point for batch in BasicSweeper.split_arguments(overrides, None) for point in batch]
    except HydraException as error:
        raise ConfigError(composer.explained(error, words)) from error
    return [[word for word in point if not word.startswith("hydra")] for point in points], hydra.launcher.get("slots")


def hydra_of(words: Sequence[str]) -> Any:
    """Hydra's own node of the config of these words."""
    register_resolvers()
    GlobalHydra.instance().clear()
    chosen = [word for word in words if word.lstrip("+").partition("=")[0].startswith(("hydra", "experiment"))]
    with initialize_config_dir(str(CONF_DIR), **HYDRA_DEFAULTS, job_name="run"):
        return compose("run", chosen, return_hydra_config=True).hydra
