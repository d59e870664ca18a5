"""A deadline reaches every hop, and nothing is generated after it.

Goal: the time left gets strictly less from the client over scheduler and execution to the instance,
is never absent, loses no more than 50 ms on the way, and the engine writes nothing later than
100 ms after it. Method: 12 streams of 0.9 s through Envoy, whose engine would write for 20 s;
relays before execution and instance note the `remaining` of each start and the time of each delta.
Oracle: one clock, that of the machine; a frame's own time on the way is measured and not held
against the mesh, since the two cores are shared. Seed: none, nothing is drawn.

Seen to fail on the mutants in tests/mutants: deadline_not_lowered, engine_ignores_deadline.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from sluice.common.v1 import policy_pb2
from sluice.errors import Code
from sluice.execution.v1 import execution_pb2
from sluice.inference.v1 import inference_pb2
from tests.hermetic.mesh import Mesh, Shape, mesh
from tests.hermetic.mesh_client import Answer, client_of, eventually, fresh_id
from tests.robustness.relay import Passed, Relay, relaying

LIMIT_S = 0.9  # short enough that gRPC writes it on the wire as it is
REQUESTS = 12
MARGINS_S = 0.05
ENGINE_S = 0.1


@dataclass
class Hop:
    """A start as it passed a relay."""

    at_s: float
    remaining_s: float
    slot: tuple[int, int]

    @property
    def deadline_s(self) -> float:
        """What the receiver makes of it."""
        return self.at_s + self.remaining_s


@dataclass
class Way:
    """The mesh with its two relays."""

    mesh: Mesh
    before_execution: Relay
    before_instance: Relay

    def starts(self) -> tuple[dict[str, Hop], dict[str, Hop]]:
        """By request id, what passed each relay."""
        first, second = {}, {}
        for one in self.before_execution.of("ExecuteFrames", forward=True):
            for part in execution_pb2.ExecuteFramesRequest.FromString(one.data).parts:
                first.update(hops(one, part.frame))
        for one in self.before_instance.of("GenerateFrames", forward=True):
            second.update(hops(one, inference_pb2.GenerateFramesRequest.FromString(one.data)))
        return first, second

    def last_output_s(self) -> dict[tuple[int, int], float]:
        """By slot and attempt, when the instance's last delta passed."""
        last = {}
        for one in self.before_instance.of("GenerateFrames", forward=False):
            frame = inference_pb2.GenerateFramesResponse.FromString(one.data)
            for delta in inference_pb2.DeltaBatch.FromString(frame.deltas).deltas:
                last[delta.slot, delta.attempt] = one.at_s
        return last


def hops(one: Passed, frame: inference_pb2.GenerateFramesRequest) -> dict[str, Hop]:
    """The starts in a frame."""
    found = {}
    for start in frame.starts:
        assert start.HasField("remaining"), "a start without a deadline"
        remaining_s = start.remaining.seconds + start.remaining.nanos / 1e9
        found[start.work.request_id] = Hop(one.at_s, remaining_s, (start.slot, start.attempt))
    return found


@pytest.fixture(scope="module")
def way(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Way]:
    """Client, Envoy, scheduler, relay, execution, relay, instance."""
    with relaying() as first, relaying() as second:
        shape = Shape(
            instances={"sim-0": {"decode_step_ms": 10.0}},
            scheduler={"executions": [first.address], "instances": [f"sim-0={second.address}"]},
        )
        with mesh(tmp_path_factory.mktemp("way"), shape, absent=["scheduler-0"]) as made:
            first.connect(made["execution-0"].address)
            second.connect(made["sim-0"].address)
            made["scheduler-0"].start()
            made.until_ready()
            yield Way(made, first, second)


async def test_a_deadline_shrinks_from_hop_to_hop_and_ends_the_engine(way: Way) -> None:
    async with client_of(way.mesh) as client:
        await client.text(sampling={"max_tokens": 2})
        sent: dict[str, float] = {}

        async def ask() -> Answer:
            request_id = fresh_id("deadline")
            sent[request_id] = time.monotonic()
            return await client.generate(
                request_id=request_id, timeout=LIMIT_S, sampling={"max_tokens": 2_000}
            )

        answers = []
        for _ in range(REQUESTS // 4):  # a few at a time: the two cores have other work too
            answers += await asyncio.gather(*(ask() for _ in range(4)))
        for answer in answers:
            assert answer.refused.code is Code.DEADLINE_EXCEEDED
            assert answer.deltas, "the stream had begun"
        await eventually(lambda: way.mesh.in_engine() == 0, "the engine stopped", 1.0)
    first, second = way.starts()
    outputs = way.last_output_s()
    for request_id, sent_s in sent.items():
        scheduler, execution = first[request_id], second[request_id]
        assert LIMIT_S > scheduler.remaining_s > execution.remaining_s > 0
        # Time on the way makes a receiver's deadline later, a margin makes it earlier.
        late_s = execution.deadline_s - (sent_s + LIMIT_S)
        assert late_s > -MARGINS_S
        last_s = outputs[execution.slot]
        assert last_s < sent_s + LIMIT_S + max(0.0, late_s) + ENGINE_S
        assert last_s > sent_s + LIMIT_S / 2, "it wrote until then"


async def test_a_deadline_that_is_not_set_is_the_classs(way: Way) -> None:
    """No hop is ever without one."""
    async with client_of(way.mesh) as client:
        request_id = fresh_id("unset")
        await client.generate(
            request_id=request_id,
            timeout=None,
            priority_class=policy_pb2.PRIORITY_CLASS_INTERACTIVE,
            sampling={"max_tokens": 2},
        )
    first, second = way.starts()
    assert 120.0 >= first[request_id].remaining_s > second[request_id].remaining_s > 110.0
