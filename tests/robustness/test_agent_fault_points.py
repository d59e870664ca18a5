"""A crash of the agent service at every named fault point.

Goal: wherever an agent service dies, each run ends once, no finished tool call is made again, an
idempotent one keeps its key, and a once one is never repeated by itself. Method: runs of every kind
over the twin of the state service in virtual time; at the point's first, second or third time the
agent is gone with all it knew (what the process would have sent after it never arrives), and
another one takes over. Oracle: the stored events, and the effects of the tools by key. Seed: none;
the schedule is the same each time. Every point of the agent service is passed, or its test fails.

Seen to fail on mutants: agent_call_before_intent, agent_once_repeated, agent_new_key_each_time.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Iterator

import pytest

from agent_svc.domain.model import (
    CallEnded,
    CallStarted,
    Decision,
    Ended,
    Paused,
    Resumed,
)
from agent_svc.run_ports import DocumentContent, IngestSpec, Phase, Spec
from sluice import fault_points
from sluice.clock import run_virtual
from sluice.errors import exhausted
from tests.unit.agent.world import ENDED, WIDE, Run, World, answer, calls

POINTS = sorted(name for name in fault_points.POINTS if name.startswith("agent."))
TIMES = (1, 2, 3)


class Crash(BaseException):
    """The process is gone."""


class Harness:
    """Runs of every kind, and an agent that dies at a point."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.crashed = False
        world.script.replies = [calls(("put", {"n": 1}), ("find", {"n": 2})), answer("done")]
        world.script.model_s, world.script.tool_s = 0.1, 0.2
        self.plain = world.run("r1")
        self.asks = world.run("r2")
        self.pays = world.run("r3")
        self.waits = world.run("r4", tools=())
        words = " ".join(f"word{number}" for number in range(9)).encode()
        world.state.documents["t", "c", "d"] = DocumentContent(words, "text/plain", 1)
        self.ingest = world.state.create("r5", Spec(IngestSpec("c", "d", 1, "e"), WIDE, b""))
        world.script.by_run = {
            "r2": [calls(("sign", {"n": 1})), answer("done")],
            "r3": [calls(("pay", {"n": 1})), answer("done")],
            "r4": [exhausted("QUEUE_FULL", "Busy.", 5.0), "done"],
        }

    @property
    def runs(self) -> list[Run]:
        return list(self.world.state.runs.values())

    def die(self, status: int) -> None:
        """Stands in for os._exit: nothing that this agent sends arrives any more."""
        assert status == fault_points.EXIT_STATUS
        self.crashed = True
        self.world.state.cut_off.add(self.world.agents[0].name)
        self.world.agents[0].task.cancel()
        raise Crash

    async def decide(self) -> None:
        """A person who approves and, in doubt, goes on without the call."""
        while True:
            for run in self.runs:
                if run.phase is Phase.WAITING:
                    doubt = run is self.pays
                    decision = Decision.SKIP if doubt else Decision.RETRY
                    self.world.state.resume(run, Resumed(run.waiting_step, decision))
            await asyncio.sleep(0.2)

    async def play(self, point: str) -> None:
        """From the first agent's start to the end of every run."""
        deciding = asyncio.create_task(self.decide())
        first = self.world.agent()
        if point == "agent.before_hand_over":
            await asyncio.sleep(0.15)
            draining = asyncio.create_task(first.worker.drain(20.0))
            await self.world.until(lambda: self.crashed or draining.done())
            draining.cancel()
        else:
            await self.world.until(
                lambda: self.crashed or all(run.phase in ENDED for run in self.runs)
            )
        if not first.task.done():
            await first.crash()
        self.world.agent()
        await self.world.until_ended(*self.runs)
        deciding.cancel()

    def check(self) -> None:
        """What must hold at the end."""
        for run in self.runs:
            ends = [kind for kind in run.kinds if isinstance(kind, Ended)]
            assert len(ends) == 1, run.run_id
            assert run.phase is Phase.SUCCEEDED, (run.run_id, ends)
            assert run.kinds[-1] is ends[0]
            keys = [kind.idempotency_key for kind in run.kinds if isinstance(kind, CallStarted)]
            ended = Counter(kind.step for kind in run.kinds if isinstance(kind, CallEnded))
            assert set(ended.values()) <= {1}, run.run_id
            assert set(keys) <= {f"{run.run_id}:{step}" for step in (2, 3)}
        effects = self.world.script.effects
        # Nobody's call had an effect that was not stored as begun.
        begun = {
            kind.idempotency_key
            for run in self.runs
            for kind in run.kinds
            if isinstance(kind, CallStarted)
        }
        assert set(effects) <= begun
        assert self.world.script.late == []
        assert effects["r3:2"] <= 1
        assert {"r1:2", "r1:3", "r2:2"} <= set(effects)
        assert sum(isinstance(kind, Paused) for kind in self.waits.kinds) >= 1
        assert sorted(self.world.state.chunks) == list(range(9))
        assert self.world.state.complete


@pytest.fixture(params=TIMES)
def times(request: pytest.FixtureRequest) -> int:
    number: int = request.param
    return number


@pytest.fixture(autouse=True)
def unarmed() -> Iterator[None]:
    yield
    fault_points.arm("")


@pytest.mark.parametrize("point", POINTS)
def test_every_run_ends_once_wherever_its_agent_dies(
    point: str, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> bool:
        world = World()
        harness = Harness(world)
        monkeypatch.setattr(os, "_exit", harness.die)
        fault_points.arm(f"{point}:{times}")
        try:
            await harness.play(point)
            harness.check()
        finally:
            await world.close()
        return harness.crashed

    assert run_virtual(scenario()) or times > 1, f"{point} is never passed"


def test_without_a_fault_every_run_ends_and_every_effect_is_there_once() -> None:
    async def scenario() -> None:
        world = World()
        harness = Harness(world)
        try:
            await harness.play("")
            harness.check()
            assert world.script.effects == {"r1:2": 1, "r1:3": 1, "r2:2": 1, "r3:2": 1}
        finally:
            await world.close()

    run_virtual(scenario())


def test_a_point_that_is_not_listed_is_an_error() -> None:
    with pytest.raises(ValueError, match="no fault point"):
        fault_points.arm("agent.somewhere")
    fault_points.arm("agent.claimed")
    with pytest.raises(AssertionError, match="not in the list"):
        fault_points.fault_point("agent.somewhere")
