"""One ``ExecuteFrames`` stream: everything that one scheduler runs through this replica.

Owns the links to the instances that the scheduler named, one each, never shared with another
scheduler. Concurrency: one task reads the scheduler's frames and hands them to the links at once;
one writes what gathered from all links; each link has its own two. State lives no longer than the
stream.

Failures: a broken link is told in-band (``lost``) and opened anew by the next part for its
instance. The end of this stream, however it comes, ends all links, and with them what runs.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING

from execution_svc.adapters.counts import Counts
from execution_svc.adapters.instance_link import InstanceLink
from execution_svc.adapters.relay import Relay
from sluice import logs
from sluice.channels import is_target
from sluice.errors import SluiceError, exhausted, invalid, unavailable
from sluice.execution.v1 import execution_pb2
from sluice.frames import FrameConnection, FrameWriter, LossKind, read_frames
from sluice.ids import is_request_id

if TYPE_CHECKING:
    from execution_svc.ports import Instances
    from sluice.telemetry import Telemetry

log = logs.get(__name__)

LINKS_MAX = 1024  # instances of one scheduler stream
DRAIN_IDLE_S = 1.0
DRAIN_POLL_S = 0.05

Connection = FrameConnection[
    execution_pb2.ExecuteFramesResponse, execution_pb2.ExecuteFramesRequest
]


class SchedulerStream:
    """A stream, from its opening to its end; made and run by the handler of the call."""

    def __init__(
        self,
        connection: Connection,
        instances: Instances,
        telemetry: Telemetry,
        counts: Counts,
    ) -> None:
        self._connection = connection
        self._instances = instances
        self._telemetry = telemetry
        self._counts = counts
        self._loop = asyncio.get_running_loop()
        self._writer = FrameWriter(connection, self._compose)
        self.relay = Relay(self._writer.wake, counts)
        self._links: dict[str, InstanceLink] = {}
        self._group: asyncio.TaskGroup | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._sent = 0
        self._received = 0
        self._peer_drains = False
        self._draining = asyncio.Event()
        self._draining_told = False

    def __len__(self) -> int:
        return len(self._links)

    async def run(self) -> None:
        """Serves the stream until its end. Raises a group with the SluiceError to end it with, or
        the FrameBroken that ended it."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            group.create_task(self._writer.run())
            drained = group.create_task(self._until_drained())
            async with aclosing(read_frames(self._connection)) as frames:
                async for frame in frames:
                    self._take(frame)
            drained.cancel()
            # The scheduler half-closed: its slots have ended, or it wants them to.
            for link in self._links.values():
                link.detach()
            if self._tasks:
                await asyncio.wait(self._tasks)
            self._writer.close()

    def drain(self) -> None:
        """Tells the scheduler that this replica starts nothing more. A start that crosses this on
        its way is still relayed: the mesh has admitted it, and the scheduler stops within one
        round trip."""
        self._draining.set()
        self._writer.wake()

    async def _until_drained(self) -> None:
        """A scheduler half-closes when its slots have ended. One that does not must not hold up
        this replica's end: its stream is ended for it once nothing has been open for a while."""
        await self._draining.wait()
        idle_since = self._loop.time()
        while self._loop.time() - idle_since < DRAIN_IDLE_S:
            await asyncio.sleep(DRAIN_POLL_S)
            if any(link.open_slots for link in self._links.values()):
                idle_since = self._loop.time()
        raise unavailable("DRAINING", "This replica has drained.")

    def _take(self, frame: execution_pb2.ExecuteFramesRequest) -> None:
        received_at = self._loop.time()
        self._received += 1
        self._counts.frames["scheduler_in"] += 1
        if frame.sequence != self._received:
            raise invalid("sequence", f"must be {self._received}, the next of the stream")
        if frame.draining and not self._peer_drains:
            self._peer_drains = True
            for link in self._links.values():
                link.drain()
        for index, part in enumerate(frame.parts):
            self._check(part.instance, f"parts[{index}].instance")
            if part.HasField("frame"):
                taker = self._link(part)
                if taker is not None:
                    taker.submit(part.frame, received_at, self._received)
            if part.close:
                done = self._links.pop(part.instance.name, None)
                if done is not None:
                    done.detach()

    def _check(self, instance: execution_pb2.InstanceRef, path: str) -> None:
        if not is_request_id(instance.name):
            raise invalid(f"{path}.name", "must be 1 to 128 visible ASCII characters")
        if not is_target(instance.address):
            raise invalid(f"{path}.address", "must be host:port")

    def _link(self, part: execution_pb2.InstanceRequest) -> InstanceLink | None:
        """The link for a part, opened if there is none; ``None`` for a part with cancels only,
        which mean nothing to a stream that does not exist yet."""
        name, address = part.instance.name, part.instance.address
        link = self._links.get(name)
        if link is not None:
            if link.address == address and not link.closing:
                return link
            # It moved, or it drained and this part crossed the end of its stream.
            self.relay.lost(name, LossKind.CLOSED, "another stream takes its place")
            link.detach()
            del self._links[name]
        only_cancels = bool(part.frame.cancels) and not (
            part.frame.starts or part.frame.HasField("demand")
        )
        if only_cancels:
            return None
        if len(self._links) >= LINKS_MAX:
            raise exhausted("TOO_MANY_INSTANCES", "This stream names too many instances.", 1.0)
        try:
            connection = self._instances.open_frames(address)
        except SluiceError as error:
            self.relay.lost(name, LossKind.UNREACHABLE, str(error))
            return None
        link = InstanceLink(
            name,
            address,
            connection,
            self.relay,
            self._telemetry,
            self._counts,
        )
        if self._peer_drains:
            link.drain()
        self._links[name] = link
        assert self._group is not None
        task = self._group.create_task(self._run_link(link))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return link

    async def _run_link(self, link: InstanceLink) -> None:
        self._counts.links_open += 1
        try:
            loss = await link.run()
        finally:
            self._counts.links_open -= 1
        if self._links.get(link.name) is link:
            del self._links[link.name]
        if not link.detached:
            self._counts.losses[loss.kind.value] += 1
            log.info(
                "instance stream ended",
                instance=link.name,
                kind=loss.kind.value,
                detail=loss.detail,
            )
            self.relay.lost(link.name, loss.kind, loss.detail)

    def _compose(self, heartbeat_due: bool) -> execution_pb2.ExecuteFramesResponse | None:
        message = self.relay.take()
        draining = self._draining.is_set()
        if message is None:
            if not heartbeat_due and draining == self._draining_told:
                return None
            message = execution_pb2.ExecuteFramesResponse()
        self._sent += 1
        self._counts.frames["scheduler_out"] += 1
        message.sequence = self._sent
        if draining:
            message.draining = self._draining_told = True
        return message
