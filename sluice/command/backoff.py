"""How long to wait before a crashed process is started again. Pure."""

from __future__ import annotations

from dataclasses import dataclass

FIRST_S = 0.1
CAP_S = 10.0
# A process that ran this long counts as sound: its next crash starts from the first delay again.
STABLE_S = 60.0


@dataclass(slots=True)
class Backoff:
    """Doubles from 100 ms to 10 s over crashes in a row."""

    crashes: int = 0

    def crashed(self, ran_s: float) -> float:
        """The delay after a process that ran for `ran_s`, in seconds."""
        if ran_s >= STABLE_S:
            self.crashes = 0
        # The exponent is bounded so that the power is, over any number of crashes.
        delay = min(CAP_S, FIRST_S * 2.0 ** min(self.crashes, 16))
        self.crashes += 1
        return delay
