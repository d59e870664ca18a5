"""One run: a seed makes a mesh, clients and faults; rules are checked all the time; then faults
stop and everything has to come to rest."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from inference_svc.adapters.engine_host import EngineFailedError
from inference_svc.adapters.simulated.profile import SimulatedProfile
from sluice.common.v1 import policy_pb2
from tests.simulation.client import DIMENSIONS, Client, Plan, make_plan
from tests.simulation.clockwork import SimulationLoop, run
from tests.simulation.faults import Faults
from tests.simulation.journal import Journal
from tests.simulation.mesh import UNLIMITED, InstanceProcess, Mesh, SchedulerProcess, in_memory
from tests.simulation.network import Network, Node

ARRIVALS_S: Final = 10.0
CHECK_S: Final = 0.25
# The longest deadline of a client is 30 s; everything has ended this long after the last arrival.
ENDED_WITHIN_S: Final = 35.0
# What was held for others comes back in this time: silence limits, reports, credits.
SETTLE_S: Final = 6.0
# Requests that come when all is well again are served within this.
SERVED_WITHIN_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Result:
    """How a run ended."""

    seed: int
    digest: str
    violations: tuple[str, ...]
    events: tuple[str, ...]
    outcomes: Counter[str]
    counts: Counter[str]
    virtual_s: float


def simulate(seed: int, folder: Path, *, logs: bool = False) -> Result:
    """Runs a seed. ``folder`` holds the deployment's files (``mesh.write_files``)."""

    async def main(loop: SimulationLoop) -> Result:
        with in_memory():
            world = World(seed, folder, loop)
            return await world.run()

    return run(seed, main, logs=logs)


class World:
    """See the module's docstring."""

    def __init__(self, seed: int, folder: Path, loop: SimulationLoop) -> None:
        self._seed = seed
        self._loop = loop
        self._journal = Journal()
        source = random.Random(f"{seed}/mesh")
        network = Network(self._failed)
        models = ["m"] if source.random() < 0.6 else ["m", "k"]
        self._models = models
        instances = source.randint(2, 5)
        self._mesh = Mesh(
            folder,
            network,
            self._journal,
            [_profile(source, models[number % len(models)]) for number in range(instances)],
            executions=source.randint(1, 2),
            schedulers=source.choice((1, 1, 2, 3)),
            state=source.random() < 0.6,
            placement=source.choice(("least_work", "weighted", "prefix_affinity", "round_robin")),
        )
        self._clients_node = self._mesh.clients
        self._clients: list[Client] = []
        self._faults = Faults(random.Random(f"{seed}/faults"), self._mesh, self._journal)

    def _failed(self, node: Node, error: BaseException) -> None:
        """A task of a process raised: the process ends. That is foreseen for one that cannot keep
        its engine running; a supervisor starts it again."""
        owner = next((p for p in self._mesh.processes if p.name == node.name), None)
        if isinstance(owner, InstanceProcess) and isinstance(error, EngineFailedError):
            self._clients_node.spawn(self._faults.kill(owner, 0.5))
        else:
            self._journal.violation(f"{node.name} failed", error)

    async def run(self) -> Result:
        """All phases; ends at the first violation."""
        began_s = self._loop.time()
        phases = self._clients_node.spawn(self._phases(), "phases")
        violated = self._clients_node.spawn(self._journal.violated.wait(), "violated")
        await asyncio.wait((phases, violated), return_when=asyncio.FIRST_COMPLETED)
        if self._journal.violations:
            self._journal.state = self._mesh.describe()
        result = Result(
            seed=self._seed,
            digest=self._journal.digest,
            violations=tuple(self._journal.violations),
            events=(*self._journal.events, *self._journal.state),
            outcomes=Counter(client.outcome for client in self._clients),
            counts=self._journal.counts,
            virtual_s=self._loop.time() - began_s,
        )
        for node in [*(process.node for process in self._mesh.processes), self._clients_node]:
            if node.alive and node is not self._clients_node:
                await node.crash()
        phases.cancel()
        violated.cancel()
        await self._clients_node.crash()
        return result

    async def _phases(self) -> None:
        source = random.Random(f"{self._seed}/clients")
        self._mesh.start()
        await asyncio.sleep(1.0)
        checks = self._clients_node.spawn(self._check_always(), "checks")
        plans = [
            make_plan(source, number, ARRIVALS_S, self._models)
            for number in range(source.randint(30, 100))
        ]
        asking = [self._clients_node.spawn(self._ask(source, plan)) for plan in plans]
        mean_s = source.choice((0.15, 0.3, 0.6, 1.2, 2.5, 1000.0))
        await self._faults.run(self._loop.time() + ARRIVALS_S, mean_s)
        await self._faults.calm()
        await self._end("requests", asking, ENDED_WITHIN_S)
        await self._rest()
        await self._prove_health(len(plans))
        await self._rest()
        checks.cancel()
        for broken in self._loop.broken:
            self._journal.violation(f"a callback raised: {broken}")

    async def _ask(self, source: random.Random, plan: Plan) -> None:
        client = Client(plan, self._mesh, self._journal)
        self._clients.append(client)
        await asyncio.sleep(plan.at_s)
        # As the edge does: who is known to be down is not asked.
        up = [one for one in self._mesh.schedulers if one.alive] or self._mesh.schedulers
        await client.run(self._clients_node, source.choice(up))

    async def _insist(self, plan: Plan, scheduler: SchedulerProcess) -> None:
        """Asks until it is answered; only a full house is an excuse."""
        while True:
            client = Client(plan, self._mesh, self._journal)
            self._clients.append(client)
            await client.run(self._clients_node, scheduler)
            if client.outcome != "HOPELESS":
                break
            await asyncio.sleep(1.0)
            plan = replace(plan, request_id=plan.request_id + "+")
        self._journal.check(
            client.outcome == "FINISHED",
            f"{plan.request_id} ended as {client.outcome} although all was well",
        )

    async def _check_always(self) -> None:
        while True:
            await asyncio.sleep(CHECK_S)
            self._mesh.check()

    async def _end(self, what: str, tasks: list[asyncio.Task[None]], within_s: float) -> None:
        """Liveness: they end in bounded time."""
        _, open_ones = await asyncio.wait(tasks, timeout=within_s)
        self._journal.check(not open_ones, f"{len(open_ones)} {what} have not ended")

    async def _rest(self) -> None:
        """Conservation: nothing is left of what has ended."""
        await asyncio.sleep(SETTLE_S)
        self._mesh.check()
        left = self._mesh.leftovers()
        self._journal.check(not left, "not at rest: " + "; ".join(left))

    async def _prove_health(self, first: int) -> None:
        """What broke and came back is used again: every scheduler is asked for more than any one
        instance can do at a time, and answers everything."""
        starts = [one.engine.starts if one.engine else 0 for one in self._mesh.instances]
        asking = []
        number = first
        for scheduler in self._mesh.schedulers:
            for model in self._models:
                room = sum(
                    one.profile.sequences_max
                    for one in self._mesh.instances
                    if one.profile.model == model
                )
                for _ in range(room + 2):
                    plan = Plan(
                        request_id=f"h{number}",
                        at_s=0.0,
                        tenant=UNLIMITED,
                        model=model,
                        priority_class=policy_pb2.PRIORITY_CLASS_INTERACTIVE,
                        text=f"health {number}",
                        max_tokens=10,
                        timeout_s=SERVED_WITHIN_S,
                    )
                    number += 1
                    asking.append(self._clients_node.spawn(self._insist(plan, scheduler)))
        await self._end("requests after all faults", asking, SERVED_WITHIN_S + 1.0)
        for instance, before in zip(self._mesh.instances, starts, strict=True):
            self._journal.check(
                instance.engine is not None and instance.engine.starts > before,
                f"{instance.name} is back and gets nothing",
            )


def _profile(source: random.Random, model: str) -> SimulatedProfile:
    return SimulatedProfile(
        model=model,
        embedding_dimensions=DIMENSIONS,
        weights=source.choice(("", "", "", "other")),
        decode_step_ms=source.choice((40.0, 60.0, 100.0)),
        decode_step_ms_per_sequence=source.choice((0.0, 2.0)),
        prefill_tokens_per_s=source.choice((500.0, 4_000.0)),
        sequences_max=source.randint(2, 6),
        kv_tokens=source.choice((512, 768, 2_048)),
        context_tokens=512,
        kv_block_tokens=16,
        step_tokens_max=source.choice((64, 512)),
        start_s=source.choice((0.0, 0.3)),
    )
