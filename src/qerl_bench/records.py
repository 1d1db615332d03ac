"""The public name of `qerl_core.records`, for options of one's own."""

from qerl_core.records import *  # noqa: F403
