"""One instance as seen through an execution replica: its slots, and what waits to be sent.

A lane owns the slots of one instance on one execution stream. A slot is taken by a start and
freed by ``ended``, ``rejected``, a new epoch or the loss of the stream, never by having sent a
cancel; entries of an earlier use of a slot are recognised by their attempt and dropped.

Synchronous; the execution link that owns the lane composes frames from it and feeds it frames.
Bounds: ``SLOTS_MAX`` open slots; what waits to be sent is bounded by the dispatches of the domain.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from google.protobuf import duration_pb2

from scheduler_svc.adapters.live_request import LiveRequest
from scheduler_svc.domain.model import InstanceName, TicketId
from sluice.common.v1 import result_pb2
from sluice.execution.v1 import execution_pb2
from sluice.inference.v1 import inference_pb2

FRAME_BYTES_MAX: Final = 256 * 1024
"""A frame is cut here; a larger start travels alone."""

SLOTS_MAX: Final = 65_536
"""Open slots of one lane."""

REMAINING_MIN_S: Final = 0.001
"""A start whose deadline passed while it waited to be written is sent with this, so that the
instance refuses it as expired and the slot is freed by the ordinary way."""


@dataclass(slots=True)
class Slot:
    """One use of a slot. ``live`` is None once the request is of no interest any more: the slot
    stays taken until its end arrives."""

    live: LiveRequest | None
    ticket_id: TicketId
    domain_attempt: int
    attempt: int
    start: inference_pb2.Start | None
    start_bytes: int


def set_duration(duration: duration_pb2.Duration, seconds: float) -> None:
    """Writes ``seconds`` (>= 0) into a protobuf duration, to the microsecond."""
    micros = int(seconds * 1e6)
    duration.seconds = micros // 1_000_000
    duration.nanos = (micros % 1_000_000) * 1000


class Lane:
    """See the module's docstring."""

    def __init__(self, name: InstanceName, address: str, wake: Callable[[Lane], None]) -> None:
        self.name = name
        self.address = address
        self.epoch = 0
        self.open = False
        self.close_due = False
        self.draining = False
        self._wake = wake
        self._slots: dict[int, Slot] = {}
        self._by_ticket: dict[TicketId, int] = {}
        self._free: list[int] = []
        self._next_slot = 0
        self._next_attempt = 1
        self._starts: deque[int] = deque()
        self._cancels: list[inference_pb2.Cancel] = []
        self._open_due = False
        self._demand_due: tuple[int, int] | None = None
        self._demand_known = (0, 0)

    def __len__(self) -> int:
        return len(self._slots)

    def open_stream(self) -> None:
        """Asks the execution service to open the instance's stream, so that credit comes."""
        self.open = True
        self._open_due = True
        self._wake(self)

    def can_start(self) -> bool:
        """Whether a slot is left."""
        return len(self._slots) < SLOTS_MAX and not self.draining

    def start(self, live: LiveRequest, domain_attempt: int, start: inference_pb2.Start) -> None:
        """Takes a slot for ``live`` and queues its start."""
        slot_number = self._free.pop() if self._free else self._next_slot
        if slot_number == self._next_slot:
            self._next_slot += 1
        start.slot = slot_number
        start.attempt = self._next_attempt
        self._next_attempt += 1
        self._slots[slot_number] = Slot(
            live, live.ticket.id, domain_attempt, start.attempt, start, start.ByteSize() + 16
        )
        self._by_ticket[live.ticket.id] = slot_number
        self._starts.append(slot_number)
        self._wake(self)

    def cancel(
        self, ticket_id: TicketId, domain_attempt: int, reason: result_pb2.FinishReason.ValueType
    ) -> bool:
        """Aborts a running request. Returns whether an end will come from the instance: False when
        the start had not been written yet (the slot is free now) or is not known here."""
        number = self._by_ticket.get(ticket_id)
        slot = self._slots.get(number) if number is not None else None
        if number is None or slot is None or slot.domain_attempt != domain_attempt:
            return False
        slot.live = None
        if slot.start is not None:
            self._starts.remove(number)
            self.free(number)
            return False
        self._cancels.append(inference_pb2.Cancel(slot=number, attempt=slot.attempt, reason=reason))
        self._wake(self)
        return True

    def stop(self, ticket_id: TicketId, domain_attempt: int) -> bool:
        """Asks the instance to stop a request that goes on later: its output is taken until its
        end arrives. Returns as :meth:`cancel` does."""
        number = self._by_ticket.get(ticket_id)
        slot = self._slots.get(number) if number is not None else None
        if number is None or slot is None or slot.domain_attempt != domain_attempt:
            return False
        if slot.start is not None:
            self._starts.remove(number)
            self.free(number)
            return False
        # UNSPECIFIED is a yield.
        self._cancels.append(inference_pb2.Cancel(slot=number, attempt=slot.attempt))
        self._wake(self)
        return True

    def cancel_stray(self, number: int, attempt: int) -> None:
        """Aborts a start that this lane has forgotten; see :meth:`take_all`."""
        self._cancels.append(inference_pb2.Cancel(slot=number, attempt=attempt))
        self._wake(self)

    def demand(self, sequences: int, kv_tokens: int) -> None:
        """Tells the instance what would run here if it could, unless it knows."""
        demand = (sequences, kv_tokens)
        if demand != self._demand_known:
            self._demand_known = self._demand_due = demand
            self._wake(self)

    def slot(self, number: int, attempt: int) -> Slot | None:
        """The current use of a slot; None for a stale attempt."""
        slot = self._slots.get(number)
        return slot if slot is not None and slot.attempt == attempt else None

    def slots(self) -> dict[int, Slot]:
        """Open slots by number; for the frame reader's lookup per delta."""
        return self._slots

    def free(self, number: int) -> None:
        """The slot's use is over."""
        slot = self._slots.pop(number)
        if self._by_ticket.get(slot.ticket_id) == number:
            del self._by_ticket[slot.ticket_id]
        self._free.append(number)

    def take_all(self) -> Iterator[Slot]:
        """Frees every slot: the stream or the engine behind it is gone. Yields the lost uses.

        Slot numbers are not used again: a start that was on its way when the stream broke may reach
        the instance by the next stream, and must not meet a new use of its number."""
        lost = list(self._slots.values())
        self._slots.clear()
        self._by_ticket.clear()
        self._free.clear()
        self._starts.clear()
        self._cancels.clear()
        self._demand_known = (0, 0)
        self.epoch = 0
        self.open = False
        yield from lost

    def compose(self, part: execution_pb2.InstanceRequest, room: int, now: float) -> int | None:
        """Writes what waits into ``part``: at most about ``room`` bytes of starts; into an empty
        frame (``room`` is FRAME_BYTES_MAX) always one. Returns the bytes of starts written; None
        when nothing was due."""
        if self.close_due:
            part.close = True
            self.close_due = False
            return 0
        if not (self._open_due or self._starts or self._cancels or self._demand_due):
            return None
        frame = part.frame
        frame.SetInParent()
        self._open_due = False
        frame.cancels.extend(self._cancels)
        self._cancels.clear()
        written = 0
        while self._starts:
            slot = self._slots[self._starts[0]]
            assert slot.start is not None and slot.live is not None
            if (written or room < FRAME_BYTES_MAX) and written + slot.start_bytes > room:
                self._wake(self)
                break
            self._starts.popleft()
            remaining = max(slot.live.ticket.deadline_s - now, REMAINING_MIN_S)
            set_duration(slot.start.remaining, remaining)
            frame.starts.append(slot.start)
            slot.start = None
            written += slot.start_bytes
        if self._demand_due is not None:
            frame.demand.sequences, frame.demand.kv_tokens = self._demand_due
            self._demand_due = None
        return written
