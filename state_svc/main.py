"""The state process: puts stores, services and the server together."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from typing import Final

from google.protobuf.descriptor import FileDescriptor

from sluice import logs
from sluice import telemetry_names as names
from sluice.config import ConfigError, config_path, load
from sluice.deadline import MethodDeadline
from sluice.mesh_config import MeshSettings
from sluice.server import Health, MeshServer, run, serve_until_signalled
from sluice.state.v1 import (
    aliases_pb2,
    aliases_pb2_grpc,
    decisions_pb2,
    decisions_pb2_grpc,
    documents_pb2,
    documents_pb2_grpc,
    fleet_pb2,
    fleet_pb2_grpc,
    quota_pb2,
    quota_pb2_grpc,
    runs_pb2,
    runs_pb2_grpc,
    sessions_pb2,
    sessions_pb2_grpc,
    tenants_pb2,
    tenants_pb2_grpc,
    tools_pb2,
    tools_pb2_grpc,
    usage_pb2,
    usage_pb2_grpc,
    values_pb2,
    values_pb2_grpc,
)
from sluice.telemetry import Telemetry
from state_svc.adapters.alias_servicer import AliasServicer
from state_svc.adapters.documents_servicer import DocumentServicer
from state_svc.adapters.fleet_servicer import FleetServicer
from state_svc.adapters.ledger_servicers import DecisionServicer, UsageServicer
from state_svc.adapters.matrix_index import IndexLimits, MatrixIndex
from state_svc.adapters.quota_servicer import QuotaServicer
from state_svc.adapters.registry_watch import RegistryWatch
from state_svc.adapters.run_servicer import RunServicer
from state_svc.adapters.run_sweep import RunSweep
from state_svc.adapters.schema import ensure_schema
from state_svc.adapters.session_servicer import SessionServicer
from state_svc.adapters.tenant_purge import SETTLE_S, TenantPurge
from state_svc.adapters.tenant_servicer import TenantServicer
from state_svc.adapters.tools_servicer import ToolServicer
from state_svc.adapters.valkey_documents import ValkeyDocuments
from state_svc.adapters.valkey_feed import ValkeyFeed
from state_svc.adapters.valkey_ledger import ValkeyDecisions, ValkeyUsage
from state_svc.adapters.valkey_link import ValkeyLink
from state_svc.adapters.valkey_quota import ValkeyQuotaStore
from state_svc.adapters.valkey_registry import ValkeyRegistry
from state_svc.adapters.valkey_runs import ValkeyRuns
from state_svc.adapters.valkey_sessions import ValkeySessions
from state_svc.adapters.valkey_tenant_data import ValkeyTenantData
from state_svc.adapters.valkey_text import ValkeyTexts
from state_svc.adapters.valkey_values import ValkeyBlobs, ValkeyValues
from state_svc.adapters.values_servicers import BlobServicer, KeyValueServicer
from state_svc.config import StateConfig, run_limits, session_limits
from state_svc.document_ports import DocumentLimits
from state_svc.ports import Kind, ValueLimits

_FILES: Final[tuple[FileDescriptor, ...]] = (
    aliases_pb2.DESCRIPTOR,
    decisions_pb2.DESCRIPTOR,
    documents_pb2.DESCRIPTOR,
    fleet_pb2.DESCRIPTOR,
    quota_pb2.DESCRIPTOR,
    runs_pb2.DESCRIPTOR,
    sessions_pb2.DESCRIPTOR,
    tenants_pb2.DESCRIPTOR,
    tools_pb2.DESCRIPTOR,
    usage_pb2.DESCRIPTOR,
    values_pb2.DESCRIPTOR,
)
SERVICES: Final = tuple(
    service.full_name for file in _FILES for service in file.services_by_name.values()
)


class Parts:
    """The parts of a state service and the tasks that keep them going."""

    def __init__(self, config: StateConfig, health: Health) -> None:
        def link(field: str, url: str) -> ValkeyLink:
            try:
                return ValkeyLink(url, config.store_timeout_s, config.connections_max)
            except ValueError:  # its text may hold a part of the URL, and that a password
                raise ConfigError(
                    f"state.{field}", "must be a redis://, rediss:// or unix:// URL"
                ) from None

        self._links = {"store": link("durable_url", config.durable_url)}
        if config.volatile_url not in ("", config.durable_url):
            self._links["store-volatile"] = link("volatile_url", config.volatile_url)
        durable = self._links["store"]
        volatile = self._links.get("store-volatile", durable)
        registry = ValkeyRegistry(durable)
        self.watch = RegistryWatch(registry)
        data = [ValkeyTenantData(one, has_usage=one is durable) for one in self._links.values()]
        # Whatever was begun for a deleted tenant is over after two calls, one behind the other.
        settle_s = max(SETTLE_S, 2 * config.deadline_s)
        self.purge = TenantPurge(registry, data, settle_s)
        self.tenants = TenantServicer(registry, self.watch, self.purge)
        self.aliases = AliasServicer(registry, self.watch)
        self.drains = FleetServicer(registry, self.watch)
        self.usage = UsageServicer(ValkeyUsage(durable))
        self.quota = QuotaServicer(ValkeyQuotaStore(volatile))
        self.decisions = DecisionServicer(
            ValkeyDecisions(volatile, config.decisions_kept_s, config.decisions_max)
        )
        values = ValueLimits(config.values_max, config.values_bytes_max)
        self.values = KeyValueServicer(ValkeyValues(durable, values))
        blobs = ValueLimits(config.blobs_max, config.blobs_bytes_max)
        self.blobs = BlobServicer(ValkeyBlobs(durable, blobs))
        self.tools = ToolServicer(registry)
        documents = ValkeyDocuments(durable, _document_limits(config))
        self.index = MatrixIndex(
            documents, IndexLimits(config.index_bytes_max, config.searches_max)
        )
        self.documents = DocumentServicer(documents, self.index, config.deadline_s)
        sizes, session_sizes = run_limits(config), session_limits(config)
        self.feed = ValkeyFeed(durable, volatile)
        runs = ValkeyRuns(durable, sizes, session_sizes)
        self.sweep = RunSweep(registry, runs)
        self.runs = RunServicer(
            runs, ValkeyTexts(volatile), self.feed, watch_bytes_max=config.watch_bytes_max
        )
        self.sessions = SessionServicer(ValkeySessions(durable, session_sizes))
        self._components = {name: health.component(name) for name in self._links}
        for component in self._components.values():
            component.down("not reached yet")

    def add_to(self, server: MeshServer) -> None:
        """Registers every service."""
        tenants_pb2_grpc.add_TenantServiceServicer_to_server(self.tenants, server.grpc)
        aliases_pb2_grpc.add_AliasServiceServicer_to_server(self.aliases, server.grpc)
        fleet_pb2_grpc.add_FleetServiceServicer_to_server(self.drains, server.grpc)
        usage_pb2_grpc.add_UsageServiceServicer_to_server(self.usage, server.grpc)
        quota_pb2_grpc.add_QuotaServiceServicer_to_server(self.quota, server.grpc)
        decisions_pb2_grpc.add_DecisionServiceServicer_to_server(self.decisions, server.grpc)
        values_pb2_grpc.add_KeyValueServiceServicer_to_server(self.values, server.grpc)
        values_pb2_grpc.add_BlobServiceServicer_to_server(self.blobs, server.grpc)
        tools_pb2_grpc.add_ToolServiceServicer_to_server(self.tools, server.grpc)
        documents_pb2_grpc.add_DocumentServiceServicer_to_server(self.documents, server.grpc)
        runs_pb2_grpc.add_RunServiceServicer_to_server(self.runs, server.grpc)
        sessions_pb2_grpc.add_SessionServiceServicer_to_server(self.sessions, server.grpc)
        for name in SERVICES:
            server.add_service(name)

    def export(self, telemetry: Telemetry) -> None:
        """What is read of them for metrics."""
        index = self.index
        telemetry.gauge(names.INDEX_BYTES, lambda: index.used_bytes)
        telemetry.counter(
            names.LIMIT_HITS,
            lambda: [(hits, {"limit": limit}) for limit, hits in list(index.limit_hits.items())],
        )

    async def run(self) -> None:
        """Runs every task until cancelled; one that fails ends the process."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.watch.run())
            group.create_task(self.feed.run_forever())
            group.create_task(self.sweep.run())
            group.create_task(self.purge.run())
            group.create_task(self._drop_indexes())
            for name, link in self._links.items():
                component = self._components[name]
                group.create_task(link.watch(ensure_schema, component.up, component.down))

    async def _drop_indexes(self) -> None:
        """Of tenants that are gone, until the watch is closed. An index that this misses is never
        searched: versions of collections grow also over a deletion."""
        async for change in self.watch.follow((Kind.TENANTS,)):
            for name in change.deleted.get(Kind.TENANTS, ()):
                self.index.drop(name)

    async def drain(self) -> None:
        """Ends the watches; everything else is short."""
        self.watch.close()
        self.feed.close()

    async def close(self) -> None:
        """Ends what is being read and closes the connections to the stores."""
        await self.index.close()
        for link in self._links.values():
            await link.close()


def _document_limits(config: StateConfig) -> DocumentLimits:
    return DocumentLimits(
        collections_max=config.collections_max,
        bytes_max=config.documents_bytes_max,
        documents_max=config.documents_max,
        chunks_max=config.chunks_max,
    )


def deadlines(config: StateConfig) -> Mapping[str, MethodDeadline]:
    """A deadline for every method but the watches, which go on."""
    short = MethodDeadline(config.deadline_s, config.deadline_s)
    return {
        f"/{service.full_name}/{method.name}": short
        for file in _FILES
        for service in file.services_by_name.values()
        for method in service.methods
        if not method.server_streaming
    }


async def serve() -> int:
    """Serves until the process is asked to end; returns its exit status."""
    path = config_path()
    mesh = load(MeshSettings, "mesh", path=path)
    config = load(StateConfig, "state", path=path)
    logs.setup("state", mesh.log_level)
    telemetry = Telemetry.setup(
        "state",
        mesh.otlp_endpoint,
        mesh.trace_sample_ratio,
        instance=config.name,
        metric_interval_s=mesh.metric_interval_s,
    )
    health = Health()
    parts = Parts(config, health)
    server = MeshServer(
        "state", [config.bind], health, deadlines=deadlines(config), telemetry=telemetry
    )
    parts.add_to(server)
    parts.export(telemetry)
    await server.start()
    async with asyncio.TaskGroup() as group:
        running = group.create_task(parts.run())
        status = await serve_until_signalled(
            [server], parts.drain, config.drain_grace_s, probe_lag_s=config.probe_lag_s
        )
        running.cancel()
    await parts.close()
    return status


if __name__ == "__main__":
    sys.exit(run(serve()))
