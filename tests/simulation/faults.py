"""Faults of a simulated mesh: each begins, and what it changed is put right when its time is over.

Random, from the seed alone. ``Faults.calm`` ends all of them at once: what was killed starts again,
what was blocked passes, engines do as they should.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final

from inference_svc.adapters.simulated.faults import Fault
from tests.simulation.journal import Journal
from tests.simulation.mesh import AnyProcess, InstanceProcess, Mesh

DRAIN_GRACE_S: Final = 4.0

Undo = Callable[[], object]


class Faults:
    """Begins random faults until told to stop."""

    def __init__(self, source: random.Random, mesh: Mesh, journal: Journal) -> None:
        self._source = source
        self._mesh = mesh
        self._journal = journal
        self._loop = asyncio.get_running_loop()
        self._undo: dict[int, Undo] = {}
        self._numbers = 0
        self._crashing: set[str] = set()

    async def run(self, until_s: float, mean_s: float) -> None:
        """One fault after another, ``mean_s`` apart, until the time ``until_s``."""
        while True:
            at_s = self._loop.time() + self._source.expovariate(1.0 / mean_s)
            await asyncio.sleep(min(at_s, until_s) - self._loop.time())
            if at_s >= until_s:
                return
            name = self._source.choices([*KINDS], weights=[*KINDS.values()])[0]
            seconds = self._source.choice((0.05, 0.5, 1.5, 4.0, 6.0))
            self._journal.note("fault", name, seconds)
            if self._mesh.state is not None and name in DISTURBING:
                self._mesh.state.disturbed = True
            await getattr(self, f"_{name}")(seconds)

    async def calm(self) -> None:
        """Nothing is wrong any more."""
        for number in sorted(self._undo):
            self._end(number)
        self._mesh.network.heal()
        for instance in self._mesh.instances:
            if instance.engine is not None:
                instance.engine.faults.clear()
        await asyncio.sleep(0.01)
        for process in self._mesh.processes:
            if not process.alive and process.name not in self._crashing:
                process.start()
        self._journal.note("calm")

    def _for(self, seconds: float, undo: Undo) -> None:
        self._numbers += 1
        self._undo[self._numbers] = undo
        self._loop.call_later(seconds, self._end, self._numbers)

    def _end(self, number: int) -> None:
        undo = self._undo.pop(number, None)
        if undo is not None:
            undo()

    # Between processes.

    def _edge(self) -> tuple[AnyProcess, AnyProcess]:
        """Two processes that talk to each other."""
        mesh, pick = self._mesh, self._source.choice
        one: AnyProcess = pick(mesh.schedulers)
        two: AnyProcess = pick(mesh.instances)
        kind = pick(("frames", "load", "work", "state"))
        if kind == "frames":
            two = pick(mesh.executions)
        elif kind == "work":
            one = pick(mesh.executions)
        elif mesh.state is not None and kind == "state":
            two = mesh.state
        return one, two

    async def _delay(self, seconds: float) -> None:
        one, two = self._edge()
        late_s = self._source.choice((0.005, 0.05, 0.3, 1.0))
        network = self._mesh.network
        for pair in ((one.name, two.name), (two.name, one.name)):
            network.delay(*pair, late_s)
            self._for(seconds, partial(network.delay, *pair, network.delay_s))

    async def _cut(self, _: float) -> None:
        one, two = self._edge()
        if one.alive:
            self._mesh.network.cut(one.node, two.name)

    async def _part(self, seconds: float) -> None:
        seconds += self._source.choice((0.0, 3.5))  # beyond every limit on silence
        one, two = self._edge()
        pairs = [(one.name, two.name), (two.name, one.name)]
        if self._source.random() < 0.4:
            pairs.pop(self._source.randrange(2))  # one way only
        network = self._mesh.network
        for pair in pairs:
            network.block(*pair, True)
            self._for(seconds, partial(network.block, *pair, False))

    # Processes.

    async def kill(self, process: AnyProcess, seconds: float) -> None:
        """It dies, and is started again after a while."""
        if not process.alive or process.name in self._crashing:
            return
        self._crashing.add(process.name)
        await process.crash()
        self._crashing.discard(process.name)

        def again() -> None:
            if not process.alive:
                process.start()

        self._for(0.2 + seconds / 2, again)

    async def _kill_instance(self, seconds: float) -> None:
        await self.kill(self._source.choice(self._mesh.instances), seconds)

    async def _drain_instance(self, seconds: float) -> None:
        instance = self._source.choice(self._mesh.instances)
        if instance.alive and instance.name not in self._crashing:
            self._mesh.clients.spawn(self._replace(instance, seconds), "drain")

    async def _replace(self, instance: InstanceProcess, seconds: float) -> None:
        """SIGTERM: it ends when its work has ended, at the latest after its grace."""
        node = instance.node
        try:
            async with asyncio.timeout(DRAIN_GRACE_S):
                await instance.drain()
        except TimeoutError:
            pass
        if instance.node is node:
            await self.kill(instance, seconds)

    async def _kill_execution(self, seconds: float) -> None:
        await self.kill(self._source.choice(self._mesh.executions), seconds)

    async def _kill_scheduler(self, seconds: float) -> None:
        await self.kill(self._source.choice(self._mesh.schedulers), seconds)

    async def _kill_state(self, seconds: float) -> None:
        if self._mesh.state is not None:
            await self.kill(self._mesh.state, seconds)

    async def _freeze_state(self, seconds: float) -> None:
        network = self._mesh.network
        for scheduler in self._mesh.schedulers:
            for pair in ((scheduler.name, "state"), ("state", scheduler.name)):
                network.block(*pair, True)
                self._for(seconds, partial(network.block, *pair, False))

    # Engines.

    def _rule(self, seconds: float, rule: Fault) -> None:
        instance = self._source.choice(self._mesh.instances)
        engine = instance.engine
        if engine is not None:
            engine.faults.add(replace(rule, times=self._source.choice((1, 2, 5))))
            self._for(seconds, engine.faults.clear)

    async def _hang(self, seconds: float) -> None:
        after = self._source.choice((0, 1, 4))
        hang_ms = self._source.choice((None, 500.0, 3000.0))
        self._rule(seconds, Fault(hang_after=after, hang_ms=hang_ms))

    async def _fail(self, seconds: float) -> None:
        self._rule(seconds, Fault(fail_after=self._source.choice((0, 0, 1, 3)), status="INTERNAL"))

    async def _refuse(self, seconds: float) -> None:
        self._rule(seconds, Fault(refuse=True, status="UNAVAILABLE"))

    async def _slow(self, seconds: float) -> None:
        self._rule(seconds, Fault(pace_ms=self._source.choice((200.0, 800.0))))

    async def _break_engine(self, _: float) -> None:
        self._source.choice(self._mesh.instances).break_engine()


KINDS: Final[dict[str, float]] = {
    "delay": 2.0,
    "cut": 2.0,
    "part": 6.0,
    "kill_instance": 1.5,
    "drain_instance": 1.0,
    "kill_execution": 1.0,
    "kill_scheduler": 0.4,
    "kill_state": 0.5,
    "freeze_state": 0.5,
    "hang": 1.5,
    "fail": 1.5,
    "refuse": 0.7,
    "slow": 1.0,
    "break_engine": 0.7,
}
"""Faults and how often each is chosen."""

DISTURBING: Final = frozenset(
    ("delay", "cut", "part", "kill_scheduler", "kill_state", "freeze_state")
)
"""Those that may part a scheduler from the state service."""
