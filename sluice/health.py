"""Health: an AND over named components, served as grpc.health.v1. An optional component is told of
like the others and does not count.

Owns the components' states and the watchers. Synchronous: a change is seen by ``Check`` at once and
by watchers on the next turn of the loop. All services of a process share one health; the names are
"" and every registered service. For one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from sluice.errors import exhausted, not_found

HEALTH_SERVICE = "grpc.health.v1.Health"
WATCHERS_MAX = 256
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class Component:
    """A part of a service that has to be well for the service to be; down until said to be up."""

    __slots__ = ("_health", "name", "optional", "reason")

    def __init__(self, health: Health, name: str, *, optional: bool = False) -> None:
        self._health = health
        self.name = name
        self.optional = optional
        self.reason = "starting"  # why it is down; empty: it is up

    def up(self) -> None:
        """It works."""
        self._set("")

    def down(self, reason: str) -> None:
        """It does not; ``reason`` is a short fixed text for operators."""
        assert reason
        self._set(reason)

    def _set(self, reason: str) -> None:
        if self.reason != reason:
            self.reason = reason
            self._health.changed()


class Health:
    """The health of a process: healthy when every component is up."""

    def __init__(self) -> None:
        self._components: dict[str, Component] = {}
        self._services: dict[str, Component | None] = {"": None}
        self._callbacks: list[Callable[[bool], None]] = []
        self._watchers: set[asyncio.Event] = set()
        self._closed = False
        self._healthy = True
        self._terminating = self.component("terminating")
        self._terminating.up()

    def component(self, name: str, *, optional: bool = False) -> Component:
        """The component of that name; made on first use, down with reason ``starting``.
        ``optional``: the service serves without it."""
        component = self._components.get(name)
        if component is None:
            component = self._components[name] = Component(self, name, optional=optional)
            self.changed()
        return component

    def add_service(self, full_name: str, needs: Component | None = None) -> None:
        """Makes a service's name known to Check and Watch. ``needs``: what it needs beside the
        health of all, as a service has that is only reached through this process."""
        self._services[full_name] = needs
        self.changed()

    @property
    def healthy(self) -> bool:
        """Whether all components that count are up."""
        return self._healthy

    def failing(self) -> list[tuple[str, str]]:
        """(name, reason) of the components that are down."""
        return [(c.name, c.reason) for c in self._components.values() if c.reason]

    def readings(self) -> list[tuple[int, dict[str, str]]]:
        """Per component 1 (up) or 0, for the metric ``sluice.health``."""
        return [(0 if c.reason else 1, {"component": c.name}) for c in self._components.values()]

    def watch(self, callback: Callable[[bool], None]) -> None:
        """Calls ``callback(healthy)`` when the answer changes; it must not block or raise."""
        self._callbacks.append(callback)

    def terminate(self) -> None:
        """NOT_SERVING from now on: the process ends."""
        self._terminating.down("terminating")

    def close(self) -> None:
        """Ends all Watch streams, which would otherwise hold up the server's stop."""
        self._closed = True
        self.changed()

    def changed(self) -> None:
        """Called by components."""
        healthy = not any(c.reason for c in self._components.values() if not c.optional)
        if healthy != self._healthy:
            self._healthy = healthy
            for callback in self._callbacks:
                callback(healthy)
        for event in self._watchers:
            event.set()

    def status(self, service: str) -> int:
        """As in grpc.health.v1."""
        if service not in self._services:
            return _UNKNOWN
        needs = self._services[service]
        return _SERVING if self._healthy and not (needs and needs.reason) else _NOT_SERVING

    async def stream(self, service: str) -> AsyncIterator[int]:
        """The status now and whenever it changes, until :meth:`close`."""
        if len(self._watchers) >= WATCHERS_MAX:
            raise exhausted("TOO_MANY_WATCHERS", "Too many watchers of the health.", 1.0)
        event = asyncio.Event()
        self._watchers.add(event)
        try:
            last = None
            while not self._closed:
                status = self.status(service)
                if status != last:
                    yield status
                    last = status
                    continue  # it may have changed while that was written
                event.clear()
                await event.wait()
        finally:
            self._watchers.discard(event)


class HealthServicer(health_pb2_grpc.HealthServicer):
    """grpc.health.v1 over a :class:`Health`."""

    def __init__(self, health: Health) -> None:
        self._health = health

    async def Check(
        self,
        request: health_pb2.HealthCheckRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> health_pb2.HealthCheckResponse:
        status = self._health.status(request.service)
        if status == _UNKNOWN:
            raise not_found("SERVICE_UNKNOWN", "No service of that name is registered here.")
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(
        self,
        request: health_pb2.HealthCheckRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        async for status in self._health.stream(request.service):
            yield health_pb2.HealthCheckResponse(status=status)
