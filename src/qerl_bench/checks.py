"""The public name of `qerl_core.checks`, for options of one's own."""

from qerl_core.checks import *  # noqa: F403
