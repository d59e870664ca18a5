"""The agent process: puts the state service, the schedulers, the tools and the worker together."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from agent_svc.adapters.mesh_models import MeshModels
from agent_svc.adapters.metrics import observe
from agent_svc.adapters.parsers import document_chunks
from agent_svc.adapters.run_work import Outside, RunWork
from agent_svc.adapters.servicer import AgentServicer
from agent_svc.adapters.state_documents import StateDocuments
from agent_svc.adapters.state_runs import StateRuns
from agent_svc.adapters.task_run import Manner
from agent_svc.adapters.tenant_rights import TenantRights
from agent_svc.adapters.tools.run_tools import RunTools
from agent_svc.adapters.worker import Limits, Worker
from agent_svc.config import AgentConfig
from agent_svc.domain.ending import Rules
from agent_svc.domain.slots import Shares
from agent_svc.domain.tool_format import Format, Options
from agent_svc.tool_parts import ToolParts
from sluice import logs
from sluice.agent.v1 import agent_pb2, agent_pb2_grpc
from sluice.channels import open_channel
from sluice.config import config_path, load
from sluice.deadline import MethodDeadline
from sluice.egress_rules import PrivateRule
from sluice.ids import new_epoch
from sluice.mesh_config import MeshSettings
from sluice.server import Health, MeshServer, run, serve_until_signalled
from sluice.telemetry import Telemetry

SERVICE: Final = agent_pb2.DESCRIPTOR.services_by_name["AgentService"].full_name
CALL_DEADLINE: Final = MethodDeadline(5.0, 10.0)
PROMPT_BYTES: Final = 4800  # where neither the setting nor the model's context says another
TEXT_SHARE_S: Final = 0.003  # of live text per run: what one message costs, over a third of a core


class Parts:
    """The parts of an agent service. ``path``: the file that declares tools. Raises ConfigError for
    a wrong declaration."""

    def __init__(
        self,
        config: AgentConfig,
        path: Path | None,
        health: Health,
        telemetry: Telemetry,
        registered_private: Sequence[PrivateRule] = (),
    ) -> None:
        self._config = config
        self._state = open_channel(config.state)
        self.rights = TenantRights(self._state)
        self.tools = ToolParts(
            path,
            self._state,
            telemetry,
            os.environ,
            config.folder,
            registered_private,
            self.rights.version,
        )
        self._models = MeshModels(config.schedulers)
        runs = StateRuns(self._state, config.state_timeout_s)
        outside = Outside(
            runs=runs,
            sessions=runs,
            documents=StateDocuments(self._state, config.state_timeout_s),
            usage=runs,
            models=self._models,
            tools=lambda tenant, run_id, names: RunTools(
                tenant, run_id, names, self.tools.box, self.rights
            ),
            chunks_of=document_chunks,
        )
        work = RunWork(outside, self._manner(), telemetry, embed_batch=config.embed_batch)
        component = health.component("state", optional=True)
        self.worker = Worker(
            f"{config.name}:{new_epoch()}",  # of this life of the process only
            runs,
            work,
            Limits(
                config.runs_max,
                config.history_bytes_max,
                config.lease_s,
                config.renew_s,
                Shares(config.tenant_share, config.urgent_share),
            ),
            clock=time.monotonic,
            on_state=lambda reason: component.down(reason) if reason else component.up(),
        )
        observe(telemetry, self.worker, work.counts)

    def _manner(self) -> Manner:
        config = self._config
        style = "structured" if config.tool_format == "auto" else config.tool_format
        return Manner(
            rules=Rules(config.wrong_calls_max, config.repeats_max, config.failures_max),
            options=Options(
                format=Format(style),
                parallel_calls_max=config.parallel_calls_max,
                prompt_bytes=config.prompt_bytes or PROMPT_BYTES,
                result_bytes=config.result_bytes,
            ),
            options_by_context=not config.prompt_bytes,
            output_tokens_max=config.output_tokens_max,
            call_tokens_max=config.call_tokens_max,
            in_place_s=config.in_place_s,
            text_interval_s=self._text_interval_s,
            history_bytes_max=config.run_history_bytes_max,
        )

    def _text_interval_s(self) -> float:
        return max(self._config.text_interval_ms / 1000, self.worker.active * TEXT_SHARE_S)

    async def drain(self) -> None:
        """Hands every run over."""
        await self.worker.drain(self._config.drain_grace_s)

    async def close(self) -> None:
        """Closes the connections."""
        await self.tools.close()
        await self._models.close()
        await self._state.close()


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
    health = Health()
    parts = Parts(config, path, health, telemetry, mesh.registered_private())
    server = MeshServer(
        "agent",
        [config.bind],
        health,
        deadlines={f"/{SERVICE}/{name}": CALL_DEADLINE for name in ("NudgeRun", "ListTools")},
        telemetry=telemetry,
    )
    servicer = AgentServicer(parts.worker.nudge, parts.tools.box)
    agent_pb2_grpc.add_AgentServiceServicer_to_server(servicer, server.grpc)
    server.add_service(SERVICE)
    await server.start()
    async with asyncio.TaskGroup() as group:
        following = group.create_task(parts.rights.run())
        keeping = group.create_task(parts.tools.box.run())
        working = group.create_task(parts.worker.run())
        status = await serve_until_signalled(
            [server], parts.drain, config.drain_grace_s, probe_lag_s=config.probe_lag_s
        )
        working.cancel()
        following.cancel()
        keeping.cancel()
    await parts.close()
    return status


if __name__ == "__main__":
    sys.exit(run(serve()))
