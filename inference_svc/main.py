"""The inference process: puts one engine, its room, its streams and the server together.

The server is up before the engine: health says NOT_SERVING and ``WatchLoad`` says so too while the
model loads. SIGTERM ends it in order: NOT_SERVING, no new starts, open work ends, the engine
closes.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Final

from inference_svc.adapters.engine_host import EngineFailedError, EngineHost, EngineRefusedError
from inference_svc.adapters.instance import Instance
from inference_svc.adapters.metrics import observe
from inference_svc.adapters.nvml_monitor import open_monitor
from inference_svc.adapters.room import RoomKeeper
from inference_svc.adapters.servicer import InferenceServicer
from inference_svc.config import EngineKind, InferenceConfig, InstanceConfig, load_instance
from inference_svc.ports import Engine
from sluice import logs
from sluice.config import ConfigError, config_path, load
from sluice.deadline import MethodDeadline
from sluice.grants import GrantVerifier
from sluice.inference.v1 import inference_pb2_grpc
from sluice.mesh_config import MeshSettings
from sluice.server import Component, Health, MeshServer, run, serve_until_signalled
from sluice.telemetry import Telemetry

SERVICE: Final = "sluice.inference.v1.InferenceService"
DEADLINE_MAX_S: Final = 86_400.0

log = logs.get("inference_svc.main")


def engine_factory(config: InstanceConfig) -> Callable[[], Engine]:
    """Makes engines of the configured kind. vLLM is imported for vLLM only: it takes seconds and
    hundreds of megabytes. Raises ConfigError for settings that the engine refuses."""
    if config.engine is EngineKind.SIMULATED:
        from inference_svc.adapters.simulated import engine as simulated_engine

        make: Callable[[], Engine] = lambda: simulated_engine.make(config)  # noqa: E731
    else:
        from inference_svc.adapters.vllm_engine import engine as vllm_engine

        make = lambda: vllm_engine.make(config)  # noqa: E731
    try:
        make()  # an engine that is not started costs nothing
    except ValueError as error:
        raise ConfigError(f"instance.{config.name}", str(error)) from error
    return make


def _follow(host: EngineHost, component: Component) -> None:
    """Keeps the health component of the engine up to date."""

    def changed() -> None:
        if host.serving:
            component.up()
        else:
            component.down("the engine is loading" if host.epoch == 0 else "the engine failed")

    host.watch(changed)
    changed()


async def serve() -> int:
    """Serves until the process is asked to end; returns its exit status."""
    path = config_path()
    mesh = load(MeshSettings, "mesh", path=path)
    config = load(InferenceConfig, "inference", path=path)
    own = load_instance(path, config.instance)
    logs.setup("inference", mesh.log_level)
    telemetry = Telemetry.setup(
        "inference",
        mesh.otlp_endpoint,
        mesh.trace_sample_ratio,
        instance=own.name,
        metric_interval_s=mesh.metric_interval_s,
    )
    host = EngineHost(engine_factory(own), own.aliases)
    gpus = open_monitor()
    verifier = GrantVerifier.load(config.keys_dir) if config.require_grant else None
    if verifier is None:
        log.warning("dispatch grants are off: anybody who reaches this port may use the GPU")
    instance = Instance(own.name, host, RoomKeeper(host.capacity), verifier, telemetry)
    servicer = InferenceServicer(instance, gpus)
    observe(telemetry, host, gpus, instance.counts, lambda: servicer.frame_streams)
    health = Health()
    _follow(host, health.component("engine"))
    server = MeshServer(
        "inference",
        [config.bind or own.address],
        health,
        deadlines={
            f"/{SERVICE}/Generate": MethodDeadline(config.generate_deadline_s, DEADLINE_MAX_S),
            f"/{SERVICE}/Embed": MethodDeadline(config.embed_deadline_s, DEADLINE_MAX_S),
        },
        telemetry=telemetry,
    )
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server.grpc)
    server.add_service(SERVICE)
    await server.start()

    async def drain() -> None:
        try:
            await servicer.drain()
        finally:
            servicer.stop()

    try:
        async with asyncio.TaskGroup() as group:
            keeping = group.create_task(host.run())
            status = await serve_until_signalled(
                [server], drain, config.drain_grace_s, probe_lag_s=config.probe_lag_s
            )
            keeping.cancel()
    except BaseExceptionGroup as group:
        await server.grpc.stop(None)  # nothing is served without an engine
        # The engine's own end is this process's: without the group around it.
        for error in group.exceptions:
            if isinstance(error, EngineRefusedError):
                raise ConfigError(f"instance.{own.name}", str(error)) from error
            if isinstance(error, EngineFailedError):
                raise error from None
        raise
    finally:
        await host.close()
        gpus.close()
    return status


if __name__ == "__main__":
    sys.exit(run(serve()))
