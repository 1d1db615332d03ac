"""The time of a session: what is kept at its end for stopping runs and for packing."""

from __future__ import annotations

import time

ARCHIVING_S = 25.0  # kept for the gates and the packing at the end
STOP_S = 20.0  # kept for running runs to reach the end of their step and save it
END_S = STOP_S + ARCHIVING_S
GRACE_S = 10.0  # of STOP_S, in which runs that are nearly done may end


class Deadline:
    """When what runs is stopped, in the seconds of time.monotonic(), so that a session of `minutes` ends in time."""

    def __init__(self, minutes: float) -> None:
        self.end = time.monotonic() + 60 * minutes - END_S

    @property
    def left(self) -> float:
        return self.end - time.monotonic()
