"""Health as an AND over components."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from grpc_health.v1 import health_pb2

from sluice.errors import SluiceError
from sluice.health import WATCHERS_MAX, Health

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN

Run = Callable[[Coroutine[Any, Any, Any]], Any]


def _well(health: Health) -> bool:
    return health.healthy


def test_an_optional_component_is_told_of_and_does_not_count() -> None:
    health = Health()
    health.component("engine").up()
    store = health.component("store", optional=True)
    assert _well(health)
    assert health.failing() == [("store", "starting")]
    assert (0, {"component": "store"}) in health.readings()
    store.up()
    store.down("gone")
    assert _well(health)


def test_all_components_must_be_up() -> None:
    health = Health()
    assert health.failing() == []
    engine, link = health.component("engine"), health.component("link")
    assert not _well(health)
    assert health.failing() == [("engine", "starting"), ("link", "starting")]
    engine.up()
    assert not _well(health)
    link.up()
    assert _well(health)
    engine.down("crashed")
    assert health.failing() == [("engine", "crashed")]
    assert health.component("engine") is engine


def test_terminating_is_a_component_that_nobody_raises_again() -> None:
    health = Health()
    health.component("engine").up()
    health.terminate()
    assert health.failing() == [("terminating", "terminating")]
    health.component("engine").up()
    assert not _well(health)


def test_callbacks_hear_changes_only() -> None:
    health = Health()
    heard: list[bool] = []
    health.watch(heard.append)
    a, b = health.component("a"), health.component("b")
    a.up()
    b.up()
    b.up()
    a.down("x")
    b.down("y")
    a.down("z")
    assert heard == [False, True, False]


def test_all_registered_names_share_the_status_and_others_are_unknown() -> None:
    health = Health()
    health.add_service("pkg.Service")
    assert [health.status(name) for name in ("", "pkg.Service")] == [_SERVING, _SERVING]
    assert health.status("pkg.Other") == _UNKNOWN
    health.component("a")
    assert health.status("pkg.Service") == _NOT_SERVING


def test_a_watcher_sees_the_state_now_and_each_later_one_and_ends_with_close(
    run_virtual: Run,
) -> None:
    async def scenario() -> None:
        health = Health()
        component = health.component("a")
        seen: list[int] = []

        async def watch() -> None:
            async for status in health.stream(""):
                seen.append(status)  # noqa: PERF401

        task = asyncio.create_task(watch())
        await asyncio.sleep(1)
        component.up()
        await asyncio.sleep(1)
        component.down("x")
        component.up()  # back before the watcher could look
        await asyncio.sleep(1)
        health.terminate()
        await asyncio.sleep(1)
        assert not task.done()
        health.close()
        await task
        assert seen == [_NOT_SERVING, _SERVING, _NOT_SERVING]

    run_virtual(scenario())


def test_a_name_that_is_registered_later_becomes_known_to_its_watcher(run_virtual: Run) -> None:
    async def scenario() -> None:
        health = Health()
        stream = health.stream("pkg.Late")
        assert await anext(stream) == _UNKNOWN
        health.add_service("pkg.Late")
        assert await anext(stream) == _SERVING

    run_virtual(scenario())


def test_watchers_are_bounded_and_their_places_come_back(run_virtual: Run) -> None:
    async def scenario() -> None:
        health = Health()
        streams = [health.stream("") for _ in range(WATCHERS_MAX)]
        for stream in streams:
            await anext(stream)
        with pytest.raises(SluiceError) as caught:
            await anext(health.stream(""))
        assert caught.value.reason == "TOO_MANY_WATCHERS"
        await streams[0].aclose()  # type: ignore[attr-defined]
        assert await anext(health.stream("")) == _SERVING

    run_virtual(scenario())
