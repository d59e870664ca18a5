"""Engine seconds of requests: an instance's time, shared out over what runs there.

Egalitarian processor sharing: while k requests run on an instance each is given 1/k of every
second. An integral of 1/k per row makes that O(1) per request: its share is the integral's growth
between begin and end. Over all requests of all schedulers the shares add up to the time in which
the instance had work, as far as the load reports' count of what others run there is fresh.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class _Row:
    own: int = 0
    others: int = 0
    integral_s: float = 0.0
    at_s: float = 0.0


class EngineTime:
    """See the module's text. Rows are the fleet's."""

    def __init__(self) -> None:
        self._rows: dict[int, _Row] = {}  # bounded by the fleet's rows

    def begin(self, row: int, now: float) -> float:
        """A request starts there; returns the mark from which its share counts."""
        kept = self._rows.setdefault(row, _Row())
        mark = self._advance(kept, now)
        kept.own += 1
        return mark

    def end(self, row: int, mark: float, now: float) -> float:
        """A request is off the instance; returns its share since ``mark``, in seconds."""
        kept = self._rows[row]
        share_s = self._advance(kept, now) - mark
        kept.own -= 1
        return share_s

    def so_far(self, row: int, mark: float, now: float) -> float:
        """The share of a request that still runs."""
        return self._advance(self._rows[row], now) - mark

    def report(self, row: int, running: int, now: float) -> None:
        """The instance says how many requests it runs, those of other schedulers included."""
        kept = self._rows.get(row)
        if kept is not None:
            self._advance(kept, now)
            kept.others = max(0, running - kept.own)

    def running(self, row: int) -> int:
        """Requests that began there and did not end."""
        kept = self._rows.get(row)
        return kept.own if kept is not None else 0

    @staticmethod
    def _advance(kept: _Row, now: float) -> float:
        if kept.own:
            kept.integral_s += max(0.0, now - kept.at_s) / (kept.own + kept.others)
        kept.at_s = now
        return kept.integral_s
