"""The ways to instances: which instance is reached over which execution link, and what comes back.

Hears what the fleet watch and the execution links report, and tells the domain in the owner's next
turn. Each instance has one lane, on the replica that rendezvous hashing picks; it moves when that
replica goes. Failure modes: a lane is lost -> all that ran on it has failed, and the instance gets
another one as soon as a replica is usable.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from scheduler_svc.adapters.attempt_events import AttemptEvents
from scheduler_svc.adapters.execution_link import ExecutionLink, choose_link
from scheduler_svc.adapters.lane import Lane, Slot
from scheduler_svc.domain.model import FaultKind, InstanceName, InstanceReport, Outcome
from scheduler_svc.domain.scheduler import Scheduler
from sluice import logs
from sluice.common.v1 import result_pb2
from sluice.errors import Code, SluiceError
from sluice.inference.v1 import inference_pb2

log = logs.get(__name__)


class Lanes:
    """See the module's docstring. A LinkObserver and a FleetObserver. ``post``: queues a command
    for the owner's next turn."""

    def __init__(
        self,
        domain: Scheduler,
        attempts: AttemptEvents,
        post: Callable[[Callable[[float], object]], None],
    ) -> None:
        self.links: list[ExecutionLink] = []
        self.addresses: dict[InstanceName, str] = {}
        self.by_name: dict[InstanceName, Lane] = {}
        self._domain = domain
        self._attempts = attempts
        self._post = post
        self._drained: set[InstanceName] = set()
        self._loop = asyncio.get_running_loop()

    def slot_event(self, lane: Lane, number: int, slot: Slot, event: inference_pb2.Event) -> None:
        """See LinkObserver."""
        kind = event.WhichOneof("kind")
        if kind == "accepted":
            self._attempts.accepted(slot, event.accepted)
        elif kind == "ended":
            lane.free(number)
            self._attempts.ended(slot, event.ended)
        elif kind == "rejected":
            lane.free(number)
            self._attempts.rejected(slot, event.rejected)

    def slot_fault(self, lane: Lane, number: int, slot: Slot) -> None:
        """See LinkObserver."""
        log.error("an instance sent output out of order", instance=lane.name)
        live = slot.live
        assert live is not None
        lane.cancel(slot.ticket_id, slot.domain_attempt, result_pb2.FINISH_REASON_ERROR)
        error = SluiceError(
            Code.INTERNAL, "INSTANCE_PROTOCOL", "the instance sent output out of order"
        )
        live.fail(error, Outcome.INSTANCE_FAILED)

    def lane_credit(self, lane: Lane, credit: inference_pb2.Credit) -> None:
        """See LinkObserver."""
        # After a loss only a new stream speaks: one that a part opened which crossed the loss. Its
        # credit is told once, so this is the only chance to hear it.
        if self.by_name.setdefault(lane.name, lane) is lane:
            lane.open = True
            self._post(
                lambda now: self._domain.instances.credit(
                    lane.name, credit.sequences, credit.kv_tokens, now
                )
            )

    def lane_lost(self, lane: Lane, slots: list[Slot], kind: FaultKind, reason: str) -> None:
        """See LinkObserver."""
        if slots:
            log.warning("requests lost", instance=lane.name, count=len(slots), reason=reason)
        is_current = self.by_name.get(lane.name) is lane
        if is_current and not lane.open:
            del self.by_name[lane.name]

        def lose(now: float) -> None:
            if is_current:
                self._domain.instances.lost(lane.name, now)
            for slot in slots:
                self._attempts.failed(slot, kind, now)

        self._post(lose)

    def link_changed(self, link: ExecutionLink) -> None:
        """See LinkObserver."""
        self._post(self.open_lanes)

    def report(self, report: InstanceReport, address: str) -> None:
        """An instance's fresh load report; its lane is opened if it has none."""
        self.addresses[report.name] = address
        self._post(lambda now: self._domain.instances.report(report, now))
        if report.name in self._drained:
            # One that is new here, or came back, does not know the mark.
            self._post(lambda now: self._domain.instances.drain(report.name, True, now))
        lane = self.by_name.get(report.name)
        if report.serving and (lane is None or not lane.open or lane.address != address):
            self._post(self.open_lanes)

    def drain_instance(self, name: InstanceName, *, drained: bool) -> asyncio.Future[None]:
        """An operator drains an instance, also one that is not here yet, or takes that back. Done
        in the owner's next turn."""
        if drained:
            self._drained.add(name)
        else:
            self._drained.discard(name)
        done: asyncio.Future[None] = self._loop.create_future()

        def apply(now: float) -> None:
            self._domain.instances.drain(name, drained, now)
            if not done.done():
                done.set_result(None)

        self._post(apply)
        return done

    def unreachable(self, name: InstanceName, reason: str) -> None:
        """An instance that does not answer its load watch."""
        self._post(lambda now: self._domain.instances.unreachable(name, reason, now))

    def remove(self, name: InstanceName) -> None:
        """An instance that discovery does not know any more."""
        self.addresses.pop(name, None)
        self._post(lambda now: self._domain.instances.remove(name, now))

    def open_lanes(self, now: float) -> None:
        """Gives every known instance a lane on the replica that rendezvous hashing picks."""
        for name, address in self.addresses.items():
            lane = self.by_name.get(name)
            link = _link_of(lane, self.links) if lane is not None else None
            if lane is None or not lane.open or link is None or not link.usable:
                link = choose_link(name, self.links)
                if link is not None:
                    self.by_name[name] = link.lane(name, address)
                elif self.by_name.pop(name, None) is not None:
                    # What runs there ends as it will; nothing more is started.
                    self._domain.instances.cut_off(name, now)

    def send_demand(self) -> None:
        """Tells each instance what would run there if it could, where that has changed."""
        for name, lane in self.by_name.items():
            demand = self._domain.demand(name)
            if lane.open:
                lane.demand(demand.sequences, demand.kv_tokens)


def _link_of(lane: Lane, links: Iterable[ExecutionLink]) -> ExecutionLink | None:
    return next((link for link in links if link.lanes.get(lane.name) is lane), None)
