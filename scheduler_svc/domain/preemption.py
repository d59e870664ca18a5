"""Which running tickets give their place to which waiting ones. Pure functions and two names.

Lossless: a victim's output so far is kept and goes on later, so all that a preemption costs is
reading those tokens again. Recomputing instead of swapping KV memory out is vLLM's own choice for
preempted sequences (Kwon et al., SOSP 2023, section 4.5); here it is done by the gate, before the
engine runs out of memory, and by priority.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from scheduler_svc.domain.model import PriorityClass, Ticket

PREEMPTS: Final[Mapping[PriorityClass, frozenset[PriorityClass]]] = {
    PriorityClass.CRITICAL: frozenset({PriorityClass.BATCH}),
    PriorityClass.INTERACTIVE: frozenset({PriorityClass.BATCH}),
}
"""Who may take the place of whom. Standard work waits its turn, and takes no one's."""

PREEMPTIBLE: Final = frozenset(cls for victims in PREEMPTS.values() for cls in victims)

ALIKE_TOKENS: Final = 256
"""Prices that differ by less count as equal: reading so many tokens takes a few milliseconds."""


def by_price(tickets: Iterable[Ticket]) -> list[Ticket]:
    """Lowest class first, then the fewest tokens to read again, then the one whose last yield is
    longest ago."""
    return sorted(
        tickets,
        key=lambda t: (
            -t.priority_class,
            t.reread_tokens // ALIKE_TOKENS,
            t.yielded_s,
            t.reread_tokens,
        ),
    )


@dataclass(slots=True)
class Spare:
    """Room on a row: sequences and KV tokens that are free, or will be when victims have gone.
    ``empty_after``: sequences that have to go until nothing runs there; then any one ticket fits.
    """

    sequences: float
    kv_tokens: float
    empty_after: int

    def add(self, kv_tokens: int) -> None:
        """A victim goes."""
        self.sequences += 1
        self.kv_tokens += kv_tokens
        self.empty_after -= 1

    def take(self, kv_tokens: int) -> None:
        """The one it went for comes."""
        self.sequences -= 1
        self.kv_tokens -= kv_tokens
        self.empty_after += 1

    def fits(self, kv_tokens: int) -> bool:
        return self.sequences >= 1 and (self.kv_tokens >= kv_tokens or self.empty_after <= 0)


def victims_for(
    kv_tokens: int,
    candidates: Sequence[Ticket],
    spare_on: Callable[[int], Spare],
    kv_of: Callable[[Ticket], int],
) -> tuple[int, list[Ticket]] | None:
    """The row and the fewest cheap victims on it that leave room for one more sequence of
    ``kv_tokens``. ``candidates`` are in the order of their price; ``spare_on``: the room of a row
    now; ``kv_of``: what a candidate's end frees. ``None``: no row could be made free enough.

    Walks the candidates once and takes the first row that fits, then lets those live after all
    that the last one made needless. O(candidates)."""
    chosen: dict[int, list[Ticket]] = {}
    spares: dict[int, Spare] = {}
    for ticket in candidates:
        row = ticket.row
        if row not in spares:
            now = spare_on(row)
            spares[row] = Spare(now.sequences, now.kv_tokens, now.empty_after)
        spare = spares[row]
        spare.add(kv_of(ticket))
        chosen.setdefault(row, []).append(ticket)
        if spare.fits(kv_tokens):
            return row, _needed(kv_tokens, chosen[row], spare, kv_of)
    return None


def _needed(
    kv_tokens: int, victims: list[Ticket], spare: Spare, kv_of: Callable[[Ticket], int]
) -> list[Ticket]:
    """Without those whose room is not needed, the dearest first."""
    kept = list(victims)
    for ticket in reversed(victims):
        without = Spare(spare.sequences, spare.kv_tokens, spare.empty_after)
        without.take(kv_of(ticket))
        if len(kept) > 1 and without.fits(kv_tokens):
            kept.remove(ticket)
            spare = without
    return kept
