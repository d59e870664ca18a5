"""The scheduler process: puts the gate, its links, the fleet watch and the public API together."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Final

import grpc.aio

from scheduler_svc.adapters.admin_api import AdminApi
from scheduler_svc.adapters.agent_link import AgentLink
from scheduler_svc.adapters.agent_path import AgentPath
from scheduler_svc.adapters.alias_table import AliasTable
from scheduler_svc.adapters.catalog import Catalog
from scheduler_svc.adapters.decision_log import DecisionLog
from scheduler_svc.adapters.decision_records import Recorder
from scheduler_svc.adapters.decisions import Decisions
from scheduler_svc.adapters.documents_api import DocumentsApi
from scheduler_svc.adapters.execution_link import ExecuteConnection, ExecutionLink, choose_link
from scheduler_svc.adapters.fleet_watch import FleetWatch
from scheduler_svc.adapters.gate import Gate
from scheduler_svc.adapters.identity import Identity
from scheduler_svc.adapters.joined import joined
from scheduler_svc.adapters.mesh_api import MeshApi
from scheduler_svc.adapters.metrics import SchedulerMetrics
from scheduler_svc.adapters.public_api import PublicApi
from scheduler_svc.adapters.quota_client import GrpcQuotaTransport, QuotaClient
from scheduler_svc.adapters.quota_keeper import QuotaKeeper
from scheduler_svc.adapters.quota_metrics import QuotaMetrics
from scheduler_svc.adapters.run_rights import RunRights
from scheduler_svc.adapters.run_store import RunStore
from scheduler_svc.adapters.run_watch import WINDOW_BYTES, RunWatches
from scheduler_svc.adapters.runs_api import RunParts, RunsApi
from scheduler_svc.adapters.serving import EmbedStub, Serving
from scheduler_svc.adapters.sessions_api import SessionsApi
from scheduler_svc.adapters.state_admin import StateAdmin
from scheduler_svc.adapters.state_watch import StateWatch
from scheduler_svc.adapters.tenants import Tenants
from scheduler_svc.adapters.usage_log import UsageLog
from scheduler_svc.config import (
    SchedulerConfig,
    agent_limits,
    class_times,
    domain_limits,
    pairs,
    prices,
    run_limits,
)
from scheduler_svc.domain.agent_gate import AgentGate
from scheduler_svc.domain.flush import FlushBudget
from scheduler_svc.domain.model import InstanceName
from scheduler_svc.domain.placement import POLICIES
from scheduler_svc.domain.scheduler import Scheduler
from sluice import logs
from sluice import telemetry_names as names
from sluice.channels import ChannelLimits, is_target, open_channel
from sluice.config import ConfigError, config_path, load
from sluice.deadline import MethodDeadline
from sluice.egress_rules import PrivateRule
from sluice.execution.v1 import execution_pb2_grpc
from sluice.frames_grpc import client_connection
from sluice.grants import PUBLIC_FOLDER, GrantSigner
from sluice.mesh_config import MeshSettings
from sluice.run_credentials import CredentialSigner, CredentialVerifier
from sluice.scheduler.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    mesh_pb2,
    mesh_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
)
from sluice.server import Health, MeshServer, run, serve_until_signalled
from sluice.telemetry import Labels, Telemetry

# Read from the descriptors: that also loads them, which reflection needs.
SERVICE: Final = scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"].full_name
ADMIN_SERVICE: Final = admin_pb2.DESCRIPTOR.services_by_name["SchedulerAdminService"].full_name
MESH_SERVICE: Final = mesh_pb2.DESCRIPTOR.services_by_name["SchedulerMeshService"].full_name
DRAIN_POLL_S: Final = 0.02
QUOTA_DRAIN_S: Final = 1.0
USAGE_DRAIN_S: Final = 3.0
DECISIONS_DRAIN_S: Final = 1.0
RENEW_LIMIT_S: Final = 3.0
WATCH_DRAIN_S: Final = 2.0  # for watches of runs that are about to end


class Parts:
    """The parts of a scheduler and the tasks that keep them going."""

    def __init__(
        self,
        config: SchedulerConfig,
        telemetry: Telemetry,
        health: Health,
        registered_private: Sequence[PrivateRule] = (),
    ) -> None:
        self._config = config
        self._registered_private = registered_private
        self._channels = {target: open_channel(target) for target in config.executions}
        flush = FlushBudget(config.write_cost_us * 1e-6, config.write_share, config.write_capacity)
        domain = Scheduler(domain_limits(config), POLICIES[config.placement](0))
        self.state_channel = _state_channel(config.state)
        life = f"{config.name}:{time.time_ns()}"
        self.usage = UsageLog.over(self.state_channel, life)
        self.decisions = DecisionLog.over(self.state_channel, config.decision_ring_mib << 20)
        self.quota: QuotaClient | None = None
        self.watches: RunWatches | None = None
        if self.state_channel is not None:
            transport = GrpcQuotaTransport(self.state_channel)
            self.quota = QuotaClient(life, transport, time.monotonic)
            QuotaMetrics(telemetry, self.quota, self.usage)
            self.watches = RunWatches(
                open_channel(config.state, limits=ChannelLimits(stream_window_bytes=WINDOW_BYTES)),
                write_limit_s=config.write_limit_s,
                watches_max=config.run_watches_max,
                bytes_max=config.run_watch_bytes_max,
            )
        keeper = QuotaKeeper(self.quota)
        signer = _signer(config)
        self.gate = Gate(domain, signer, flush, config.write_limit_s, keeper)
        self.gate.lanes.links = [
            ExecutionLink(target, partial(self._connect, target), self.gate.lanes)
            for target in config.executions
        ]
        self.fleet = FleetWatch(config.instances, open_channel, self.gate.lanes)
        self.tenants = _tenants(config)
        aliases = AliasTable(pairs("scheduler.aliases", config.aliases))
        catalog = Catalog(self.fleet, config.default_model, config.default_embedding_model, aliases)
        if self.quota is not None:
            self.tenants.listen(self.quota.set_tenant, self.quota.remove_tenant)
        self._state_watch = self._watch_of_state(aliases, health)
        metrics = SchedulerMetrics(telemetry, self.gate)
        self.decisions.export(telemetry)
        telemetry.counter(names.CONFIG_RELOADS, self._read_reloads)
        telemetry.gauge(names.RUN_WATCHES, lambda: self.watches.open if self.watches else 0)
        self._make_apis(signer, catalog, metrics, telemetry, health)
        self._execution = health.component("execution")
        self._instances = health.component("instances")

    def _make_apis(
        self,
        signer: GrantSigner,
        catalog: Catalog,
        metrics: SchedulerMetrics,
        telemetry: Telemetry,
        health: Health,
    ) -> None:
        """The servicers, and what stands between them and the gate."""
        config, channel = self._config, self.state_channel
        agents = AgentPath(AgentGate(agent_limits(config)), run_limits(config))
        agents.export(telemetry)
        decisions = Decisions(
            Recorder(config.name, config.decision_slow_share),
            self.decisions,
            config.decision_sample_ratio,
        )
        serving = Serving(
            self.gate,
            catalog,
            class_times(config),
            metrics,
            self._embed_stub,
            self.usage,
            prices(config),
            decisions,
        )
        identity = Identity(self.tenants, serving)
        credentials = CredentialSigner(signer)
        self.link = AgentLink(self._channels, self._usable)
        runs = RunParts(
            serving=serving,
            identity=identity,
            catalog=catalog,
            gate=self.gate,
            agents=agents,
            link=self.link,
            store=RunStore(channel, credentials) if channel is not None else None,
            watches=self.watches,
            state_up=lambda: not health.component("state", optional=True).reason,
            count_limit=metrics.count_limit,
        )
        # The stubs call what a part does not define abstract.
        self.public = joined(
            PublicApi(serving, identity, catalog, self.usage, decisions),  # type: ignore[abstract]
            RunsApi(runs),  # type: ignore[abstract]
            SessionsApi(identity, channel),  # type: ignore[abstract]
            DocumentsApi(runs, identity, channel),  # type: ignore[abstract]
        )
        self.meshed = MeshApi(
            serving,
            credentials,
            CredentialVerifier(config.keys_dir / PUBLIC_FOLDER),
            RunRights(channel, self.tenants),
        )
        self.admin = AdminApi(
            config.name,
            self.gate,
            self.fleet,
            self.tenants,
            catalog,
            StateAdmin(channel) if channel is not None else None,
            self._registered_private,
        )

    def _watch_of_state(self, aliases: AliasTable, health: Health) -> StateWatch | None:
        if self.state_channel is None:
            return None
        # Optional: without the state service what it last said stays, and requests go on.
        component = health.component("state", optional=True)
        return StateWatch(
            self.state_channel, self.tenants, aliases, self.gate.lanes.drain_instance, component
        )

    def _connect(self, target: str) -> ExecuteConnection:
        stub = execution_pb2_grpc.ExecutionServiceStub(self._channels[target])
        return client_connection(stub.ExecuteFrames())

    def _embed_stub(self, instance: InstanceName) -> EmbedStub | None:
        link = choose_link(instance, self.gate.lanes.links)
        if link is None:
            return None
        return execution_pb2_grpc.ExecutionServiceStub(self._channels[link.target])

    def _usable(self, target: str) -> bool:
        return any(link.target == target and link.usable for link in self.gate.lanes.links)

    def _read_reloads(self) -> list[tuple[int, Labels]]:
        return [
            (self.tenants.reloads, {"result": "ok"}),
            (self.tenants.reloads_failed, {"result": "refused"}),
        ]

    async def run(self) -> None:
        """Runs every task until cancelled; one that fails ends the process."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.gate.run())
            group.create_task(self.fleet.run())
            group.create_task(self.tenants.watch())
            if self._state_watch is not None:
                group.create_task(self._state_watch.run())
            group.create_task(self._watch_links())
            group.create_task(self.link.run())
            if self.quota is not None:
                group.create_task(self.quota.run())
                group.create_task(self.usage.run())
                group.create_task(self.decisions.run())
            for link in self.gate.lanes.links:
                group.create_task(link.run())

    async def _watch_links(self) -> None:
        while True:
            if any(link.usable for link in self.gate.lanes.links):
                self._execution.up()
            else:
                self._execution.down("no execution service is connected")
            if self.fleet.looked_at_all:
                # Before that every request would be refused for want of an instance.
                self._instances.up()
            await asyncio.sleep(DRAIN_POLL_S)

    async def drain(self) -> None:
        """Takes nothing new, lets open requests end, then closes the links in order."""
        self.gate.domain.drain()
        if self.watches is not None:
            self.watches.close()
        await self.gate.idle()
        if self.watches is not None:
            await self.watches.drain(WATCH_DRAIN_S)
        for link in self.gate.lanes.links:
            link.drain()
            link.close()

    async def close(self) -> None:
        """After the last request, while the tasks still run: gives quota back and tells usage."""
        if self.quota is not None and self.state_channel is not None:
            await self.quota.drain(QUOTA_DRAIN_S)
            await self.usage.drain(USAGE_DRAIN_S)
            await self.decisions.drain(DECISIONS_DRAIN_S)
            await self.state_channel.close()
            if self.watches is not None:
                await self.watches.disconnect()


def _state_channel(target: str) -> grpc.aio.Channel | None:
    if target and not is_target(target):
        raise ConfigError("scheduler.state", f"{target!r} must be host:port")
    return open_channel(target) if target else None


def _signer(config: SchedulerConfig) -> GrantSigner:
    try:
        return GrantSigner.load(config.keys_dir, config.name)
    except (OSError, ValueError) as error:
        raise ConfigError("scheduler.keys_dir", f"no key to sign grants with: {error}") from error


def _tenants(config: SchedulerConfig) -> Tenants:
    try:
        return Tenants(config.tenants_file, awaits_state=bool(config.state))
    except (OSError, ValueError) as error:
        raise ConfigError("scheduler.tenants_file", str(error)) from error


async def serve() -> int:
    """Serves until the process is asked to end; returns its exit status."""
    path = config_path()
    mesh = load(MeshSettings, "mesh", path=path)
    config = load(SchedulerConfig, "scheduler", path=path)
    logs.setup("scheduler", mesh.log_level)
    telemetry = Telemetry.setup(
        "scheduler",
        mesh.otlp_endpoint,
        mesh.trace_sample_ratio,
        instance=config.name,
        metric_interval_s=mesh.metric_interval_s,
    )
    health = Health()
    parts = Parts(config, telemetry, health, mesh.registered_private())
    # A class's own default applies where a caller sets no deadline; see ClassTimes.
    longest = MethodDeadline(config.deadline_max_s, config.deadline_max_s)
    deadlines = {
        f"/{SERVICE}/{method}": longest
        for method in ("Generate", "GenerateText", "RunAgent", "WatchRun")
    }
    public = MeshServer(
        "scheduler", [config.bind], health, deadlines=deadlines, telemetry=telemetry
    )
    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(parts.public, public.grpc)
    admin_pb2_grpc.add_SchedulerAdminServiceServicer_to_server(parts.admin, public.grpc)
    public.add_service(SERVICE)
    public.add_service(ADMIN_SERVICE)
    meshed = MeshServer(
        "scheduler-mesh",
        [config.mesh_bind],
        health,
        deadlines={
            f"/{MESH_SERVICE}/GenerateStep": longest,
            f"/{MESH_SERVICE}/EmbedStep": longest,
            f"/{MESH_SERVICE}/RenewRunCredential": MethodDeadline(RENEW_LIMIT_S, RENEW_LIMIT_S),
        },
        telemetry=telemetry,
    )
    mesh_pb2_grpc.add_SchedulerMeshServiceServicer_to_server(parts.meshed, meshed.grpc)
    meshed.add_service(MESH_SERVICE)
    await public.start()
    await meshed.start()
    async with asyncio.TaskGroup() as group:
        running = group.create_task(parts.run())
        status = await serve_until_signalled([public, meshed], parts.drain, config.drain_grace_s)
        await parts.close()
        running.cancel()
    return status


if __name__ == "__main__":
    sys.exit(run(serve()))
