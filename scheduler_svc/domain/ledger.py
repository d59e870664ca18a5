"""What this scheduler runs on each instance, counted from its own dispatches.

One :class:`Hold` per dispatched ticket from :meth:`Ledger.take` to :meth:`Ledger.free`, one
:class:`Load` per instance row with the sums. Exact by construction: sums change only together with
a hold, and freeing twice is an assertion. What other schedulers run is not here (see ``fleet``).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from math import inf
from typing import Final

from scheduler_svc.domain.model import Line, Ticket, TicketId

# Over which engines count the throughput that they report, at most: vLLM's adapter over the last
# 2 s, the simulated engine over a window of 0.5 s that may have ended as long ago.
RATE_WINDOW_S: Final = 2.0


@dataclass(slots=True)
class Hold:
    """What one running ticket of a line counts for on its row.

    ``prefill_tokens``: prompt tokens still to be read, 0 from the first token on.
    ``output_tokens``: output tokens still expected. ``kv_tokens``: KV tokens set aside for its
    expected end, in whole blocks. ``kv_held``: KV tokens that it holds by now, estimated.
    ``leaving``: it was told to stop, and its room will be free at once."""

    row: int
    line: Line
    prefill_tokens: int
    output_tokens: int
    kv_tokens: int
    kv_held: int
    leaving: bool = False


@dataclass(slots=True)
class Load:
    """Sums over the holds of a row, and what was seen since the instance's last report.

    The peaks are what a report may have counted when it was taken: reports and events travel on
    different connections, so a report can still contain what has ended here already.
    ``prefill_least``: the fewest prompt tokens that there were to read at any time.
    ``full_since_s``: the last report before which there was less to read than a step can take."""

    sequences: int = 0
    prefill_tokens: int = 0
    output_tokens: int = 0
    kv_tokens: int = 0
    kv_held: int = 0
    sequences_peak: int = 0
    kv_peak: int = 0
    prefill_least: int = 0
    full_since_s: float = inf
    tickets: set[TicketId] = field(default_factory=set)

    def reported(self, step_tokens_max: int, now: float) -> None:
        """A report arrived: a new period begins."""
        if self._had_too_little(step_tokens_max):
            self.full_since_s = now
        self.sequences_peak = self.sequences
        self.kv_peak = self.kv_held
        self.prefill_least = self.prefill_tokens

    def reads_full_steps(self, step_tokens_max: int, now: float) -> bool:
        """Whether there was as much to read as a step can take for all the time over which an
        engine counts: only then is a throughput what it can do, and not what it was asked to do."""
        if self._had_too_little(step_tokens_max):
            return False
        return now - self.full_since_s >= RATE_WINDOW_S

    def _had_too_little(self, step_tokens_max: int) -> bool:
        return self.prefill_least < max(1, step_tokens_max)


class Ledger:
    """Holds by ticket and loads by row; all changes O(1)."""

    def __init__(self, rows_max: int) -> None:
        self._holds: dict[TicketId, Hold] = {}
        self._loads = [Load() for _ in range(rows_max)]
        self._running: Counter[Line] = Counter()
        self._leaving: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._holds)

    def load(self, row: int) -> Load:
        return self._loads[row]

    def running(self, line: Line) -> int:
        """Tickets of a line that hold room anywhere."""
        return self._running[line]

    def hold(self, ticket_id: TicketId) -> Hold:
        """What a ticket that holds room counts for."""
        return self._holds[ticket_id]

    def leave(self, ticket_id: TicketId) -> None:
        """The ticket was told to stop. Idempotent."""
        hold = self._holds[ticket_id]
        if not hold.leaving:
            hold.leaving = True
            self._leaving[hold.row] += 1

    def leaving(self) -> Counter[int]:
        """Tickets that were told to stop and hold room still, by row. Do not write to it."""
        return self._leaving

    def take(
        self, ticket: Ticket, row: int, block: int, kv_max: int, cached_tokens: int = 0
    ) -> None:
        """Counts the ticket on a row. ``block``: KV tokens per block; ``kv_max``: the instance's
        KV memory (0: it has none): no ticket counts for more than all of it. ``cached_tokens``: of
        the prompt, expected in the instance's cache; ``correct`` says what was there."""
        assert ticket.id not in self._holds, "taken twice"
        assert not cached_tokens or cached_tokens < ticket.read_tokens
        kv_tokens = _blocks(ticket.kv_tokens, block)
        hold = Hold(
            row=row,
            line=ticket.line,
            prefill_tokens=ticket.read_tokens - cached_tokens,
            output_tokens=ticket.output_left,
            kv_tokens=min(kv_tokens, kv_max) if kv_max else 0,
            kv_held=min(_blocks(ticket.read_tokens, block), kv_max),
        )
        self._holds[ticket.id] = hold
        self._running[ticket.line] += 1
        load = self._loads[row]
        load.tickets.add(ticket.id)
        load.sequences += 1
        load.prefill_tokens += hold.prefill_tokens
        load.output_tokens += hold.output_tokens
        load.kv_tokens += hold.kv_tokens
        load.kv_held += hold.kv_held
        load.sequences_peak = max(load.sequences_peak, load.sequences)
        load.kv_peak = max(load.kv_peak, load.kv_held)

    def correct(self, ticket: Ticket, cached_tokens: int, block: int, kv_max: int) -> None:
        """``ticket.prompt_tokens`` is exact now; the cached part of it needs no reading."""
        hold = self._holds[ticket.id]
        to_read = max(0, ticket.read_tokens - cached_tokens) if hold.prefill_tokens else 0
        self._change(hold, prefill_tokens=to_read)
        self._grow(hold, ticket, block, kv_max)

    def first_token(self, ticket: Ticket) -> None:
        """The prompt was read."""
        self._change(self._holds[ticket.id], prefill_tokens=0)

    def progress(self, ticket: Ticket, block: int, kv_max: int) -> None:
        """``ticket.generated_tokens`` has grown. Past its expected end a ticket counts as one token
        from its end, always: it may end with every step."""
        hold = self._holds[ticket.id]
        left = max(1, ticket.output_left - ticket.generated_tokens)
        self._change(hold, output_tokens=min(hold.output_tokens, left))
        self._grow(hold, ticket, block, kv_max)

    def free(self, ticket_id: TicketId) -> int:
        """The ticket's room is free; returns its row."""
        hold = self._holds.pop(ticket_id, None)
        assert hold is not None, "freed twice"
        self._change(hold, prefill_tokens=0, output_tokens=0, kv_tokens=0, kv_held=0)
        load = self._loads[hold.row]
        load.sequences -= 1
        load.tickets.remove(ticket_id)
        if hold.leaving:
            self._leaving[hold.row] -= 1
            if not self._leaving[hold.row]:
                del self._leaving[hold.row]
        self._running[hold.line] -= 1
        if not self._running[hold.line]:
            del self._running[hold.line]  # bounded by what runs
        assert load.sequences >= 0
        return hold.row

    def check(self) -> None:
        """Sums equal a recount, and nothing is negative. O(holds + rows), for tests."""
        recount = [Load() for _ in self._loads]
        for ticket_id, hold in self._holds.items():
            load = recount[hold.row]
            load.tickets.add(ticket_id)
            load.sequences += 1
            load.prefill_tokens += hold.prefill_tokens
            load.output_tokens += hold.output_tokens
            load.kv_tokens += hold.kv_tokens
            load.kv_held += hold.kv_held
        for load, expected in zip(self._loads, recount, strict=True):
            expected.sequences_peak, expected.kv_peak = load.sequences_peak, load.kv_peak
            expected.prefill_least = load.prefill_least
            expected.full_since_s = load.full_since_s
            assert load == expected
            assert load.sequences_peak >= load.sequences
            assert load.kv_peak >= load.kv_held
        assert self._running == Counter(hold.line for hold in self._holds.values())
        leaving = (hold.row for hold in self._holds.values() if hold.leaving)
        assert self._leaving == Counter(leaving)

    def _grow(self, hold: Hold, ticket: Ticket, block: int, kv_max: int) -> None:
        if not kv_max:
            return
        held = _blocks(ticket.read_tokens + ticket.generated_tokens, block)
        expected = max(held, _blocks(ticket.kv_tokens, block))
        self._change(hold, kv_tokens=min(expected, kv_max), kv_held=min(held, kv_max))
        load = self._loads[hold.row]
        load.kv_peak = max(load.kv_peak, load.kv_held)

    def _change(
        self,
        hold: Hold,
        *,
        prefill_tokens: int | None = None,
        output_tokens: int | None = None,
        kv_tokens: int | None = None,
        kv_held: int | None = None,
    ) -> None:
        load = self._loads[hold.row]
        if prefill_tokens is not None:
            load.prefill_tokens += prefill_tokens - hold.prefill_tokens
            hold.prefill_tokens = prefill_tokens
            load.prefill_least = min(load.prefill_least, load.prefill_tokens)
        if output_tokens is not None:
            load.output_tokens += output_tokens - hold.output_tokens
            hold.output_tokens = output_tokens
        if kv_tokens is not None:
            load.kv_tokens += kv_tokens - hold.kv_tokens
            hold.kv_tokens = kv_tokens
        if kv_held is not None:
            load.kv_held += kv_held - hold.kv_held
            hold.kv_held = kv_held


def _blocks(tokens: int, block: int) -> int:
    return -(-tokens // block) * block
