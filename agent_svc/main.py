"""The agent process: puts its parts and the server together."""

from __future__ import annotations

import sys
from typing import Final

from agent_svc.adapters.servicer import AgentServicer
from agent_svc.config import AgentConfig
from sluice import logs
from sluice.agent.v1 import agent_pb2, agent_pb2_grpc
from sluice.config import config_path, load
from sluice.deadline import MethodDeadline
from sluice.mesh_config import MeshSettings
from sluice.server import Health, MeshServer, run, serve_until_signalled
from sluice.telemetry import Telemetry

SERVICE: Final = agent_pb2.DESCRIPTOR.services_by_name["AgentService"].full_name
CALL_DEADLINE: Final = MethodDeadline(5.0, 10.0)


async def serve() -> int:
    """Serves until the process is asked to end; returns its exit status."""
    path = config_path()
    mesh = load(MeshSettings, "mesh", path=path)
    config = load(AgentConfig, "agent", path=path)
    logs.setup("agent", mesh.log_level)
    telemetry = Telemetry.setup(
        "agent",
        mesh.otlp_endpoint,
        mesh.trace_sample_ratio,
        instance=config.name,
        metric_interval_s=mesh.metric_interval_s,
    )
    server = MeshServer(
        "agent",
        [config.bind],
        Health(),
        deadlines={f"/{SERVICE}/{name}": CALL_DEADLINE for name in ("NudgeRun", "ListTools")},
        telemetry=telemetry,
    )
    agent_pb2_grpc.add_AgentServiceServicer_to_server(AgentServicer(lambda: None), server.grpc)
    server.add_service(SERVICE)
    await server.start()

    async def drain() -> None:
        """Nothing is open here yet."""

    return await serve_until_signalled(
        [server], drain, config.drain_grace_s, probe_lag_s=config.probe_lag_s
    )


if __name__ == "__main__":
    sys.exit(run(serve()))
