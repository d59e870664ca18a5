"""A gRPC server of the mesh, and the life of a service process.

Owns the bootstrap: explicit limits, the call interceptor, health, reflection, and the order of an
end: NOT_SERVING, a probe's time, the service's own in-band drain, stop, telemetry, exit 0. A long
stream that is still open when ``stop(grace)`` is called would wait out the whole grace, so streams
end in-band first and the last grace is short.

One event loop. :func:`run` owns the signals: the first asks for an orderly end (or cancels a
start-up), the second ends the process at once.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from google.protobuf import descriptor_pool
from grpc_health.v1 import health_pb2_grpc

from sluice import logs, telemetry_names
from sluice.deadline import MethodDeadline
from sluice.health import HEALTH_SERVICE, Component, Health, HealthServicer
from sluice.interceptors import CallInterceptor
from sluice.loop_lag import LoopLag
from sluice.process import run, shutdown_requested
from sluice.reflection import Reflection
from sluice.server_limits import ServerLimits, server_options
from sluice.telemetry import Telemetry

__all__ = [
    "Component",
    "Health",
    "MeshServer",
    "ServerLimits",
    "ServerTls",
    "run",
    "serve_until_signalled",
]

PROBE_LAG_S = 1.0  # a load balancer's probe interval: how long NOT_SERVING takes to be seen
DRAIN_GRACE_S = 30.0
STOP_GRACE_S = 1.0  # for what is still open after the drain

log = logs.get(__name__)


@dataclass(frozen=True, slots=True)
class ServerTls:
    """TLS of a server: files in PEM form. With ``client_ca_file`` clients must show a
    certificate."""

    certificate_file: Path
    key_file: Path
    client_ca_file: Path | None = None


class MeshServer:
    """A server with everything a service of the mesh has. Register servicers on ``grpc``, name
    them with :meth:`add_service`, then :meth:`start`."""

    def __init__(
        self,
        service: str,
        binds: Sequence[str],
        health: Health,
        limits: ServerLimits | None = None,
        deadlines: Mapping[str, MethodDeadline] | None = None,
        telemetry: Telemetry | None = None,
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
        tls: ServerTls | None = None,
    ) -> None:
        limits = limits or ServerLimits()
        self.service = service
        self.health = health
        self.telemetry = telemetry or Telemetry.off()
        self._binds = tuple(binds)
        self._tls = tls
        self._services: list[str] = []
        self._ports: list[int] = []
        self._reflection: Reflection | None = None
        self._calls = CallInterceptor(deadlines or {}, limits.message_bytes)
        self.grpc = grpc.aio.server(
            interceptors=(self._calls, *interceptors), options=server_options(limits)
        )
        # Generated code registers every method twice: by name, which is enough, and as a
        # "registered method", for each of which the library keeps a task and waits on all of them
        # anew with every call (35 methods: 120 us a call). Health alone keeps that: calls by name
        # are accepted one after the other, and a probe must not stand behind a thousand of them.
        register = self.grpc.add_registered_method_handlers
        self.grpc.add_registered_method_handlers = partial(  # type: ignore[method-assign]
            _register_health_alone, register
        )

    @property
    def calls(self) -> CallInterceptor:
        """The interceptor; its ``counts`` are the calls in progress and ended."""
        return self._calls

    @property
    def ports(self) -> tuple[int, ...]:
        """The ports it listens on, in the order of ``binds``. Valid after :meth:`start`."""
        return tuple(self._ports)

    def add_service(self, full_name: str) -> None:
        """Makes a registered servicer known to reflection and health. ValueError when no imported
        module describes the service (its ``*_pb2``; a ``*_pb2_grpc`` does not always import it):
        reflection would name it and then not know it."""
        try:
            descriptor_pool.Default().FindServiceByName(full_name)
        except KeyError:
            raise ValueError(f"import the module that describes {full_name}") from None
        self._services.append(full_name)
        self.health.add_service(full_name)

    async def start(self) -> None:
        """Binds and serves. OSError when an address is taken or cannot be bound."""
        health_pb2_grpc.add_HealthServicer_to_server(HealthServicer(self.health), self.grpc)
        self._reflection = Reflection((*self._services, HEALTH_SERVICE))
        self._reflection.add_to(self.grpc)
        credentials = None if self._tls is None else _credentials(self._tls)
        for bind in self._binds:
            try:
                if credentials is None:
                    port = self.grpc.add_insecure_port(bind)
                else:
                    port = self.grpc.add_secure_port(bind, credentials)
            except RuntimeError:
                port = 0
            if port == 0:
                raise OSError(f"cannot listen on {bind}: taken, or no address of this machine")
            self._ports.append(port)
        await self.grpc.start()
        self._observe()
        log.info("listening", service=self.service, ports=",".join(map(str, self._ports)))

    def _observe(self) -> None:
        counts = self._calls.counts
        self.telemetry.counter(telemetry_names.RPC_CALLS, counts.ended_readings)
        self.telemetry.gauge(telemetry_names.RPC_OPEN, counts.open_readings)
        self.telemetry.gauge(telemetry_names.HEALTH, self.health.readings)

    async def run_until_signalled(
        self,
        on_drain: Callable[[], Awaitable[None]],
        drain_grace_s: float = DRAIN_GRACE_S,
        *,
        probe_lag_s: float = PROBE_LAG_S,
    ) -> int:
        """:func:`serve_until_signalled` for this one server."""
        return await serve_until_signalled([self], on_drain, drain_grace_s, probe_lag_s=probe_lag_s)

    async def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """Stops: health watchers end, calls in progress have ``grace_s`` seconds. Idempotent."""
        self.health.close()
        if self._reflection is not None:
            self._reflection.close()
        await self.grpc.stop(grace_s)


async def serve_until_signalled(
    servers: Sequence[MeshServer],
    on_drain: Callable[[], Awaitable[None]],
    drain_grace_s: float = DRAIN_GRACE_S,
    *,
    probe_lag_s: float = PROBE_LAG_S,
) -> int:
    """Serves until SIGTERM or SIGINT (see :func:`run`), then ends in order: health says
    NOT_SERVING; after ``probe_lag_s`` ``on_drain`` closes the service's streams in-band and waits
    for open work, at most ``drain_grace_s`` seconds; the servers stop; telemetry is flushed.
    Returns the exit code: 0, also when the drain was cut off. The servers share one health."""
    lag = LoopLag()
    lag.start()
    servers[0].telemetry.gauge(telemetry_names.LOOP_LAG, lag.read)
    await shutdown_requested()
    loop = asyncio.get_running_loop()
    began = loop.time()
    log.info("draining")
    for server in servers:
        server.health.terminate()
    await asyncio.sleep(probe_lag_s)
    try:
        async with asyncio.timeout(drain_grace_s):
            await on_drain()
    except TimeoutError:
        log.warning("drain cut off", grace_s=drain_grace_s)
    except Exception as error:
        log.failure("drain failed", error)
    await asyncio.gather(*(server.stop() for server in servers))
    for telemetry in {id(s.telemetry): s.telemetry for s in servers}.values():
        with contextlib.suppress(Exception):
            await telemetry.shutdown()
    lag.stop()
    log.info("stopped", drain_s=round(loop.time() - began, 3))
    return 0


def _credentials(tls: ServerTls) -> Any:
    pair = (tls.key_file.read_bytes(), tls.certificate_file.read_bytes())
    client_ca = tls.client_ca_file.read_bytes() if tls.client_ca_file else None
    return grpc.ssl_server_credentials(
        [pair], root_certificates=client_ca, require_client_auth=client_ca is not None
    )


def _register_health_alone(
    register: Callable[[str, Any], None], service: str, handlers: object
) -> None:
    """Stands in for ``grpc.aio.Server.add_registered_method_handlers``."""
    if service == HEALTH_SERVICE:
        register(service, handlers)
