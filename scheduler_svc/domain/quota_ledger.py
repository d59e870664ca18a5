"""What ended and is not yet told to the state service, added up by where it was reserved."""

from __future__ import annotations

from dataclasses import dataclass, field

from sluice.quota.exchange import SETTLEMENTS_MAX, Amounts, Settlement

_Place = tuple[int, int, int]


@dataclass(slots=True)
class Settlements:
    """Sums per (epoch, bucket, day). Bounded by what was reserved: each place holds something."""

    overuse_tokens: int = 0
    since: float = 0.0  # when the oldest was added; valid while there is one
    _sums: dict[_Place, list[int]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self._sums) or self.overuse_tokens > 0

    def close(
        self,
        epoch: int,
        bucket: int,
        day: int,
        now: float,
        *,
        requests: int = 0,
        tokens: int = 0,
        slots: int = 0,
        requests_refund: int = 0,
        tokens_refund: int = 0,
    ) -> None:
        """Adds an end. ``requests``, ``tokens`` and ``slots`` are what was reserved."""
        if not self._sums:
            self.since = now
        sums = self._sums.setdefault((epoch, bucket, day), [0, 0, 0, 0, 0])
        for n, amount in enumerate((requests, tokens, slots, requests_refund, tokens_refund)):
            sums[n] += amount

    def take(self, now: float) -> tuple[tuple[Settlement, ...], int]:
        """The oldest :data:`SETTLEMENTS_MAX` of them, and the overuse."""
        places = list(self._sums)[:SETTLEMENTS_MAX]
        taken = []
        for place in places:
            requests, tokens, slots, requests_refund, tokens_refund = self._sums.pop(place)
            reserved = Amounts(requests, tokens, slots)
            taken.append(Settlement(*place, reserved, requests_refund, tokens_refund))
        self.since = now
        overuse_tokens, self.overuse_tokens = self.overuse_tokens, 0
        return tuple(taken), overuse_tokens
