"""The execution process: puts the way to the instances and the server together."""

from __future__ import annotations

import asyncio
import sys
from typing import Final

from execution_svc.adapters.agents import AGENT_SERVICE, Agents
from execution_svc.adapters.counts import Counts
from execution_svc.adapters.instance_channels import GrpcInstances
from execution_svc.adapters.metrics import observe
from execution_svc.adapters.servicer import ExecutionServicer
from execution_svc.config import ExecutionConfig
from sluice import logs
from sluice.config import config_path, load
from sluice.deadline import MethodDeadline
from sluice.execution.v1 import execution_pb2_grpc
from sluice.mesh_config import MeshSettings
from sluice.server import Health, MeshServer, run, serve_until_signalled
from sluice.telemetry import Telemetry

SERVICE: Final = "sluice.execution.v1.ExecutionService"
DEADLINE_MAX_S: Final = 86_400.0
AGENT_LIMIT_S: Final = 10.0


async def serve() -> int:
    """Serves until the process is asked to end; returns its exit status."""
    path = config_path()
    mesh = load(MeshSettings, "mesh", path=path)
    config = load(ExecutionConfig, "execution", path=path)
    logs.setup("execution", mesh.log_level)
    telemetry = Telemetry.setup(
        "execution",
        mesh.otlp_endpoint,
        mesh.trace_sample_ratio,
        instance=config.name,
        metric_interval_s=mesh.metric_interval_s,
    )
    instances = GrpcInstances()
    counts = Counts()
    health = Health()
    agents = Agents(config.agents, health.component("agents", optional=True))
    health.add_service(AGENT_SERVICE, needs=health.component("agents"))
    servicer = ExecutionServicer(instances, telemetry, counts, agents)
    observe(telemetry, counts, lambda: servicer.scheduler_streams)
    server = MeshServer(
        "execution",
        [config.bind],
        health,
        deadlines={
            f"/{SERVICE}/Execute": MethodDeadline(config.execute_deadline_s, DEADLINE_MAX_S),
            f"/{SERVICE}/ExecuteEmbed": MethodDeadline(config.embed_deadline_s, DEADLINE_MAX_S),
            f"/{SERVICE}/StartRun": MethodDeadline(AGENT_LIMIT_S, AGENT_LIMIT_S),
            f"/{SERVICE}/ListTools": MethodDeadline(AGENT_LIMIT_S, AGENT_LIMIT_S),
        },
        telemetry=telemetry,
    )
    execution_pb2_grpc.add_ExecutionServiceServicer_to_server(servicer, server.grpc)
    server.add_service(SERVICE)
    await server.start()
    async with asyncio.TaskGroup() as group:
        looking = group.create_task(agents.run())
        status = await serve_until_signalled(
            [server], servicer.drain, config.drain_grace_s, probe_lag_s=config.probe_lag_s
        )
        looking.cancel()
    await agents.close()
    await instances.close()
    return status


if __name__ == "__main__":
    sys.exit(run(serve()))
