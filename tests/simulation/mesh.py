"""The processes of a simulated mesh: the services' own parts, put together as ``main`` does.

Each process is a :class:`~tests.simulation.network.Node`; it can crash and start again. Engines are
the simulated engine, watched: no step is taken without the room for it.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

from execution_svc.adapters.agents import Agents
from execution_svc.adapters.counts import Counts
from execution_svc.adapters.instance_channels import GrpcInstances
from execution_svc.adapters.servicer import ExecutionServicer
from inference_svc.adapters.engine_host import EngineHost
from inference_svc.adapters.instance import Instance
from inference_svc.adapters.no_gpus import NoGpus
from inference_svc.adapters.room import RoomKeeper
from inference_svc.adapters.servicer import InferenceServicer
from inference_svc.adapters.simulated.engine import SimulatedEngine
from inference_svc.adapters.simulated.profile import SimulatedProfile
from inference_svc.ports import FinishReason, GenerationEnd, OutputSink, PreparedPrompt
from scheduler_svc.config import SchedulerConfig, domain_limits
from scheduler_svc.domain.limits import PoisonLimits, SchedulerLimits
from scheduler_svc.main import Parts
from sluice.errors import unavailable
from sluice.execution.v1 import execution_pb2_grpc
from sluice.grants import PUBLIC_FOLDER, GrantVerifier, ensure_keys
from sluice.health import Health
from sluice.inference.v1 import inference_pb2_grpc
from sluice.quota.exchange import Limits, QuotaUse
from sluice.scheduler.v1 import scheduler_pb2_grpc
from sluice.state.v1 import (
    aliases_pb2_grpc,
    decisions_pb2_grpc,
    quota_pb2_grpc,
    tenants_pb2_grpc,
    usage_pb2_grpc,
)
from sluice.telemetry import Telemetry
from state_svc.adapters.alias_servicer import AliasServicer
from state_svc.adapters.ledger_servicers import DecisionServicer, UsageServicer
from state_svc.adapters.memory_quota import MemoryQuotaStore
from state_svc.adapters.memory_stores import MemoryDecisions, MemoryRegistry, MemoryUsage
from state_svc.adapters.quota_servicer import QuotaServicer
from state_svc.adapters.registry_watch import RegistryWatch
from state_svc.adapters.tenant_servicer import TenantServicer
from tests.simulation.journal import Journal
from tests.simulation.network import Network, Node, open_channel

TENANTS = {
    "red": Limits(),
    "green": Limits(requests_per_min=12, tokens_per_min=2_000),
    "blue": Limits(concurrent_requests=3),
}
UNLIMITED = "red"


def write_files(folder: Path) -> None:
    """The keys and the tenants file of a deployment."""
    ensure_keys(folder / "keys")
    lines = []
    for name in TENANTS:
        digest = hashlib.sha256(key_of(name).encode()).hexdigest()
        lines += ["[[tenant]]", f'name = "{name}"', f'key_sha256 = ["{digest}"]']
    (folder / "tenants.toml").write_text("\n".join(lines) + "\n")


def key_of(tenant: str) -> str:
    """A tenant's key."""
    return f"key-of-{tenant}"


def _small_limits(config: SchedulerConfig) -> SchedulerLimits:
    """Few rows: every check of a domain recounts them all."""
    # Instances die here so often that a request may well be alone at two deaths, as poison is.
    never = PoisonLimits(instances_max=1_000, deaths_max=1_000)
    return replace(domain_limits(config), instances_max=8, poison=never)


@contextmanager
def in_memory() -> Iterator[None]:
    """Takes the library's channels and connections out of the services' modules."""
    with ExitStack() as stack:
        for module in ("scheduler_svc.main", "execution_svc.adapters.instance_channels"):
            stack.enter_context(mock.patch(f"{module}.open_channel", open_channel))
            stack.enter_context(mock.patch(f"{module}.client_connection", lambda call: call))
        for module in ("execution_svc.adapters.servicer", "inference_svc.adapters.servicer"):
            stack.enter_context(mock.patch(f"{module}.server_connection", lambda call: call.stream))
        stack.enter_context(mock.patch("scheduler_svc.main.domain_limits", _small_limits))
        yield


@dataclass(eq=False, slots=True)
class Generating:
    """What an engine runs: a generation between its submission and its end."""

    request_id: str
    prompt_tokens: int
    running: Any = None

    @property
    def kv_tokens(self) -> int:
        """Tokens that it holds in memory by now."""
        made = 0 if self.running is None else self.running.output_tokens
        return self.prompt_tokens + made


class WatchedSink:
    """A sink that tells of the end."""

    __slots__ = ("_ended", "_sink", "delta")

    def __init__(self, sink: OutputSink, ended: Callable[[GenerationEnd], None]) -> None:
        self._sink = sink
        self._ended = ended
        self.delta = sink.delta

    def ended(self, end: GenerationEnd) -> None:
        """See the port."""
        self._ended(end)
        self._sink.ended(end)


class WatchedEngine(SimulatedEngine):
    """The simulated engine, with the promises of the mesh to an engine checked at every start."""

    def __init__(self, profile: SimulatedProfile, name: str, journal: Journal) -> None:
        super().__init__(profile)
        self._name = name
        self._journal = journal
        self.open: dict[Generating, None] = {}
        self.starts = 0

    def submit(self, prepared: PreparedPrompt, sink: OutputSink) -> Any:
        """See the port."""
        spec = prepared.spec
        begun = 0 if spec.continuation is None else len(spec.continuation.output_token_ids)
        one = Generating(spec.request_id, len(prepared.prompt_token_ids) + begun)
        held = sum(other.kv_tokens for other in self.open)
        self._journal.check(
            len(self.open) < self.profile.sequences_max,
            f"{self._name} got more sequences than it has room for",
        )
        self._journal.check(
            not held or held + one.prompt_tokens <= self.profile.kv_tokens,
            f"{self._name} got a prompt for which it has no memory",
        )
        self.open[one] = None
        self.starts += 1
        self._journal.check_stopped(spec.request_id)
        self._journal.note("submit", self._name, spec.request_id, one.prompt_tokens, begun)

        def ended(end: GenerationEnd) -> None:
            self._journal.check(one in self.open, "a generation ended twice")
            self._journal.check_stopped(spec.request_id)
            self.open.pop(one, None)
            reason = end.outputs[0].reason.name
            self._journal.note("end", self._name, spec.request_id, reason, end.completion_tokens)

        one.running = super().submit(prepared, WatchedSink(sink, ended))
        return one.running


@dataclass
class Process:
    """What all processes have in common."""

    mesh: Mesh
    name: str
    address: str
    node: Node = field(init=False)

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self.node.alive

    async def crash(self) -> None:
        """It is gone, as if killed."""
        self.mesh.journal.note("crash", self.name)
        await self.node.crash()


@dataclass
class InstanceProcess(Process):
    """An inference service with its engine."""

    profile: SimulatedProfile = field(default_factory=SimulatedProfile)
    host: EngineHost = field(init=False)
    servicer: InferenceServicer = field(init=False)
    instance: Instance = field(init=False)
    engine: WatchedEngine | None = None
    engines_lost: int = 0

    def start(self) -> None:
        """A fresh process."""
        self.mesh.journal.note("start", self.name)
        self.node = Node(self.mesh.network, self.name, self.address)
        self.node.on_crash.append(self._stop_engine)
        self.node.enter().run(self._build)

    def _build(self) -> None:
        self.host = EngineHost(self._make)
        verifier = GrantVerifier.load(self.mesh.folder / "keys" / PUBLIC_FOLDER)
        room = RoomKeeper(self.host.capacity)
        self.instance = Instance(self.name, self.host, room, verifier, Telemetry.off())
        self.servicer = InferenceServicer(self.instance, NoGpus())
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(self.servicer, self.node.server)
        self.node.spawn(self.host.run(), "host")

    def _make(self) -> WatchedEngine:
        self.engine = WatchedEngine(self.profile, self.name, self.mesh.journal)
        return self.engine

    def _stop_engine(self) -> None:
        if self.engine is not None and self.engine._batch is not None:
            self.engine._batch.stop(FinishReason.CANCELLED)

    def break_engine(self) -> None:
        """The engine dies in its process; the host makes a new one."""
        if self.engine is not None and self.engine._batch is not None:
            self.mesh.journal.note("engine dies", self.name)
            error = unavailable("ENGINE_DIED", "The engine died while it ran.")
            self.engine._batch.stop(FinishReason.ERROR, error)
            self.engine._crashed()

    async def drain(self) -> None:
        """SIGTERM: the process ends when what runs has ended."""
        self.mesh.journal.note("drain", self.name)
        await self.servicer.drain()
        self.servicer.stop()

    def check(self) -> None:
        """The room that is given out is there."""
        book, holders = self.instance.room._book, self.instance.room._holders
        held = [one.held() for one in holders.values()]
        granted = [book.credit(number) for number in holders]
        sequences = sum(
            max(has.sequences, credit.sequences) for has, credit in zip(held, granted, strict=True)
        )
        self.mesh.journal.check(
            sequences <= max(book.capacity.sequences, sum(has.sequences for has in held)),
            f"{self.name} gave out {sequences} sequences",
        )
        # What runs grows token by token, and the credit of others gives way only at the next
        # settlement: so credits alone are counted here.
        kv_tokens = sum(credit.kv_tokens for credit in granted)
        self.mesh.journal.check(
            kv_tokens <= max(book.capacity.kv_tokens, sum(has.kv_tokens for has in held)),
            f"{self.name} gave out {kv_tokens} KV tokens",
        )

    def leftovers(self) -> list[str]:
        """What should not be here when nothing runs."""
        left = []
        if self.engine is not None and self.engine.open:
            left.append(f"{self.name} runs {len(self.engine.open)} generations")
        if self.instance.room.sequences_held():
            left.append(f"{self.name} has slots in use")
        if (batch := self.engine and self.engine._batch) and batch.kv.used:
            left.append(f"{self.name} holds {batch.kv.used} KV blocks")
        return left


@dataclass
class ExecutionProcess(Process):
    """An execution replica."""

    servicer: ExecutionServicer = field(init=False)

    def start(self) -> None:
        """A fresh process."""
        self.mesh.journal.note("start", self.name)
        self.node = Node(self.mesh.network, self.name, self.address)
        self.node.enter().run(self._build)

    def _build(self) -> None:
        agents = Agents((), Health().component("agents", optional=True))
        self.servicer = ExecutionServicer(GrpcInstances(), Telemetry.off(), Counts(), agents)
        execution_pb2_grpc.add_ExecutionServiceServicer_to_server(self.servicer, self.node.server)

    def leftovers(self) -> list[str]:
        """What should not be here when nothing runs."""
        links = [link for stream in self.servicer._streams for link in stream._links.values()]
        return [
            f"{self.name} has {link.open_slots} slots open on {link.name}"
            for link in links
            if link.open_slots
        ]


@dataclass
class StateProcess(Process):
    """The state service over stores in memory, which outlive it as Valkey does."""

    quota: MemoryQuotaStore = field(default_factory=MemoryQuotaStore)
    usage: MemoryUsage = field(default_factory=MemoryUsage)
    registry: MemoryRegistry = field(default_factory=MemoryRegistry)
    decisions: MemoryDecisions = field(default_factory=MemoryDecisions)
    disturbed: bool = False  # somebody could not speak to it for a while

    def start(self) -> None:
        """A fresh process."""
        self.mesh.journal.note("start", self.name)
        self.node = Node(self.mesh.network, self.name, self.address)
        self.node.enter().run(self._build)

    def _build(self) -> None:
        server, watch = self.node.server, RegistryWatch(self.registry)
        tenants = TenantServicer(self.registry, watch)
        tenants_pb2_grpc.add_TenantServiceServicer_to_server(tenants, server)
        aliases = AliasServicer(self.registry, watch)
        aliases_pb2_grpc.add_AliasServiceServicer_to_server(aliases, server)
        usage_pb2_grpc.add_UsageServiceServicer_to_server(UsageServicer(self.usage), server)
        quota_pb2_grpc.add_QuotaServiceServicer_to_server(QuotaServicer(self.quota), server)
        decisions = DecisionServicer(self.decisions)
        decisions_pb2_grpc.add_DecisionServiceServicer_to_server(decisions, server)
        self.node.spawn(watch.run(), "watch")

    def use(self, tenant: str) -> QuotaUse:
        """What is reserved and charged now."""
        book = self.quota._books.get(tenant)
        return QuotaUse() if book is None else book.use(_now_ms())

    def check(self) -> None:
        """No quota is exceeded. A holder that could not be heard loses what it holds to others, and
        what it runs becomes debt: so this is asked only while nothing kept anybody from the state
        service."""
        if self.disturbed:
            return
        for tenant, limits in TENANTS.items():
            use = self.use(tenant)
            for what, most, has in (
                ("requests", limits.requests_per_min, use.requests),
                ("requests at once", limits.concurrent_requests, use.slots),
            ):
                self.mesh.journal.check(
                    most is None or has <= most, f"{tenant} has {has} {what} of {most}"
                )

    def leftovers(self) -> list[str]:
        """What should not be here when nothing runs. Those who died count until somebody needs
        their room."""
        now_ms = _now_ms()
        return [
            f"{tenant}: {holder.name} holds {holder.slots} slots"
            for tenant, book in self.quota._books.items()
            for holder in book._holders.values()
            if holder.slots and holder.expires_ms > now_ms
        ]


def _now_ms() -> int:
    return int(asyncio.get_running_loop().time() * 1000)


@dataclass
class SchedulerProcess(Process):
    """A scheduler, from its composition root."""

    placement: str = "least_work"
    parts: Parts = field(init=False)

    def start(self) -> None:
        """A fresh process."""
        self.mesh.journal.note("start", self.name)
        self.node = Node(self.mesh.network, self.name, self.address)
        self.node.enter().run(self._build)

    def _build(self) -> None:
        config = SchedulerConfig(
            name=self.name,
            bind=self.address,
            executions=tuple(one.address for one in self.mesh.executions),
            instances=tuple(f"{one.name}={one.address}" for one in self.mesh.instances),
            tenants_file=self.mesh.folder / "tenants.toml",
            keys_dir=self.mesh.folder / "keys",
            placement=self.placement,
            state="" if self.mesh.state is None else self.mesh.state.address,
            prefix_index_mib=1,
            first_token_critical_s=8.0,
            first_token_interactive_s=10.0,
            first_token_standard_s=15.0,
            first_token_batch_s=25.0,
            inter_token_limit_s=4.0,
            write_limit_s=3.0,
        )
        self.parts = Parts(config, Telemetry.off(), Health())
        if (quota := self.parts.quota) is not None:

            def limit(tenant: str, limits: Limits, *, fail_open: bool) -> None:
                quota.set_tenant(tenant, TENANTS[tenant], fail_open=False)

            self.parts.tenants.listen(limit, quota.remove_tenant)
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(
            self.parts.public, self.node.server
        )
        self.node.spawn(self.parts.run(), "parts")

    def check(self) -> None:
        """The domain agrees with a recount of itself."""
        try:
            self.parts.gate.domain.check_invariants()
        except AssertionError as error:
            self.mesh.journal.violation(f"{self.name}: an invariant is broken: {error!r}")

    def leftovers(self) -> list[str]:
        """What should not be here when nothing runs."""
        gate = self.parts.gate
        state = gate.domain.snapshot()
        left = {
            "requests at the gate": len(gate.lives),
            "open streams": gate.flush.open_streams,
            "slots": sum(link.open_slots() for link in gate.lanes.links),
            "tickets that hold room": state.running,
            "tickets that wait": sum(state.waiting.values()),
            "bytes that wait": sum(state.waiting_bytes.values()),
            "tickets without an outcome": state.submitted - sum(state.outcomes.values()),
            "client calls": sum("Generate" in task for task in self.node.tasks),
        }
        if self.parts.quota is not None:
            left["quota accounts in use"] = sum(not one.idle for one in self.parts.quota.accounts)
        for name, one in state.instances.items():
            left[f"KV tokens planned on {name}"] = one.kv_tokens
            left[f"prompts outstanding on {name}"] = one.prefill_tokens
        return [f"{self.name} has {count} {what}" for what, count in left.items() if count]


AnyProcess = StateProcess | InstanceProcess | ExecutionProcess | SchedulerProcess


class Mesh:
    """All processes."""

    def __init__(
        self,
        folder: Path,
        network: Network,
        journal: Journal,
        profiles: Sequence[SimulatedProfile],
        executions: int,
        schedulers: int,
        placement: str,
        *,
        state: bool,
    ) -> None:
        self.folder = folder
        self.network = network
        self.journal = journal
        self.clients = Node(network, "clients")
        self.instances = [
            InstanceProcess(self, f"i{number}", f"instance{number}:1", profile)
            for number, profile in enumerate(profiles)
        ]
        self.executions = [
            ExecutionProcess(self, f"e{number}", f"execution{number}:1")
            for number in range(executions)
        ]
        self.state = StateProcess(self, "state", "state:1") if state else None
        self.schedulers = [
            SchedulerProcess(self, f"s{number}", f"scheduler{number}:1", placement)
            for number in range(schedulers)
        ]

        self.fingerprints: dict[str, dict[str, None]] = {}
        for profile in profiles:
            fingerprint = SimulatedEngine(profile).describe().fingerprint
            self.fingerprints.setdefault(profile.model, {})[fingerprint] = None

    @property
    def processes(self) -> list[AnyProcess]:
        """All of them."""
        state = [] if self.state is None else [self.state]
        return [*state, *self.instances, *self.executions, *self.schedulers]

    def start(self) -> None:
        """Starts everything."""
        for process in self.processes:
            process.start()

    def describe(self) -> list[str]:
        """How everything stands, for who reads why a run failed."""
        lines = []
        for instance in self.instances:
            state = "up" if instance.alive else "down"
            lines.append(f"= {instance.name} {state} {instance.profile}")
        for scheduler in self.schedulers:
            if not scheduler.alive:
                lines.append(f"= {scheduler.name} down")
                continue
            gate = scheduler.parts.gate
            snapshot = gate.domain.snapshot()
            lines.append(f"= {scheduler.name} {scheduler.placement} waiting {snapshot.waiting}")
            lines += [f"=   {link.target} usable {link.usable}" for link in gate.lanes.links]
            lines += [f"=   {name} {one}" for name, one in snapshot.instances.items()]
        return lines

    def check(self) -> None:
        """What has to hold at any time."""
        for instance in self.instances:
            if instance.alive:
                instance.check()
        for scheduler in self.schedulers:
            if scheduler.alive:
                scheduler.check()
        if self.state is not None:
            self.state.check()

    def leftovers(self) -> list[str]:
        """What is left although nothing should be under way."""
        return [line for process in self.processes if process.alive for line in process.leftovers()]
