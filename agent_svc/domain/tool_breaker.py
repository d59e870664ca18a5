"""Which tools rest because they failed again and again.

Pure; ``now`` in seconds of any clock that does not go back. CLOSED: calls pass; ``FAULTS_MAX``
faults in a row open it. OPEN: no call passes for a cool-down, which doubles with each opening up
to ``COOLDOWN_MAX_S``. Then one call at a time is the probe: a success closes it, a fault opens it
again. What a caller can bring about by itself is neutral and says nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from enum import Enum
from math import inf
from typing import Final

FAULTS_MAX: Final = 5
COOLDOWN_S: Final = 5.0
COOLDOWN_MAX_S: Final = 300.0
TOOLS_MAX: Final = 4096  # tools of tenants in the table; the least recently called leaves first


class Verdict(Enum):
    """What a call says of its tool."""

    SUCCESS = "success"
    FAULT = "fault"
    NEUTRAL = "neutral"


class Pass(Enum):
    """How a call went through."""

    REFUSED = "refused"
    NORMAL = "normal"
    PROBE = "probe"


class ToolBreaker:
    """Of one tool of one tenant. O(1)."""

    __slots__ = ("_faults", "_level", "_open_until", "_probing", "opened")

    def __init__(self) -> None:
        self._faults = 0
        self._level = 0
        self._open_until = -inf  # -inf: closed
        self._probing = False
        self.opened = 0

    @property
    def is_closed(self) -> bool:
        """Whether calls pass without being probes."""
        return self._open_until == -inf

    def begin(self, now: float) -> Pass:
        """Whether a call may be made; its end has to be told unless it is refused."""
        if self.is_closed:
            return Pass.NORMAL
        if now < self._open_until or self._probing:
            return Pass.REFUSED
        self._probing = True
        return Pass.PROBE

    def end(self, begun: Pass, verdict: Verdict, now: float) -> None:
        """A call is over. One from before the breaker opened says nothing of the tool now."""
        if begun is Pass.PROBE:
            self._probing = False
            if verdict is Verdict.SUCCESS:
                self._open_until = -inf
                self._level = 0
            elif verdict is Verdict.FAULT:
                self._open(now)
        elif self.is_closed and verdict is Verdict.SUCCESS:
            self._faults = 0
        elif self.is_closed and verdict is Verdict.FAULT:
            self._faults += 1
            if self._faults >= FAULTS_MAX:
                self._open(now)

    def _open(self, now: float) -> None:
        self._open_until = now + min(COOLDOWN_MAX_S, COOLDOWN_S * 2.0**self._level)
        self._level = min(self._level + 1, 16)
        self._faults = 0
        self.opened += 1


class ToolBreakers:
    """The breakers of all tools that were called lately."""

    def __init__(self, tools_max: int = TOOLS_MAX) -> None:
        self._tools_max = tools_max
        self._breakers: OrderedDict[tuple[str, str], ToolBreaker] = OrderedDict()
        self._opened_before = 0

    def of(self, tenant: str, tool: str) -> ToolBreaker:
        """The breaker of a tenant's tool: one tenant's faults never rest another's."""
        breaker = self._breakers.setdefault((tenant, tool), ToolBreaker())
        self._breakers.move_to_end((tenant, tool))
        if len(self._breakers) > self._tools_max:
            self._opened_before += self._breakers.popitem(last=False)[1].opened
        return breaker

    @property
    def opened(self) -> int:
        """How often any opened."""
        return self._opened_before + sum(one.opened for one in self._breakers.values())

    def __len__(self) -> int:
        return len(self._breakers)
