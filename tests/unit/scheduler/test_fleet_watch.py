"""How addresses come and go: by whole lists, looked up again and again, never by one event."""

from __future__ import annotations

import asyncio
import socket
from typing import Any, cast

import pytest

from scheduler_svc.adapters import fleet_watch
from scheduler_svc.adapters.fleet_watch import RESOLVE_INTERVAL_S, RETIRE_MAX_S, FleetWatch
from scheduler_svc.domain.model import InstanceName, InstanceReport
from sluice.clock import run_virtual

STEP_S = RESOLVE_INTERVAL_S + 0.1


class Observer:
    """Notes who left."""

    def __init__(self) -> None:
        self.removed: list[str] = []

    def report(self, report: InstanceReport, address: str) -> None:
        """See FleetObserver."""

    def unreachable(self, name: InstanceName, reason: str) -> None:
        """See FleetObserver."""

    def remove(self, name: InstanceName) -> None:
        """See FleetObserver."""
        self.removed.append(name)


class Watch(FleetWatch):
    """Its instances answer when the test says so; an address is its own name."""

    def __init__(self, observer: Observer) -> None:
        super().__init__(["dns:///chat:7"], cast("Any", None), observer)
        self.answers: dict[str, asyncio.Event] = {}

    async def _watch(self, address: str) -> None:
        await self.answers.setdefault(address, asyncio.Event()).wait()
        self._looked.add(address)
        self._names[address] = InstanceName(address)
        await asyncio.Event().wait()


class Dns:
    """What the name stands for; ``None`` while nobody can be asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *hosts: str) -> None:
        self.hosts: tuple[str, ...] | None = hosts
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(loop, "getaddrinfo", self.look_up)

    async def look_up(self, host: str, port: int, **_: object) -> list[tuple[Any, ...]]:
        """As the loop's."""
        if self.hosts is None:
            raise OSError("no answer")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port)) for one in self.hosts]


async def started(
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[Watch, Observer, Dns, asyncio.Task[None]]:
    observer, dns = Observer(), Dns(monkeypatch, "10.0.0.1", "10.0.0.2")
    watch = Watch(observer)
    task = asyncio.create_task(watch.run())
    await asyncio.sleep(0.1)
    for answer in watch.answers.values():
        answer.set()
    await asyncio.sleep(0.1)
    return watch, observer, dns, task


def test_old_ones_stay_until_the_new_ones_have_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant seen to fail: removed_before_the_new_one."""

    async def main() -> None:
        watch, observer, dns, task = await started(monkeypatch)
        dns.hosts = ("10.0.0.3",)
        await asyncio.sleep(STEP_S)
        assert observer.removed == []
        watch.answers["10.0.0.3:7"].set()
        await asyncio.sleep(STEP_S)
        assert sorted(observer.removed) == ["10.0.0.1:7", "10.0.0.2:7"]
        assert watch.knows_all
        task.cancel()

    run_virtual(main())


def test_old_ones_go_in_the_end_although_a_new_one_never_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        _, observer, dns, task = await started(monkeypatch)
        dns.hosts = ("10.0.0.1", "10.0.0.3")
        await asyncio.sleep(RETIRE_MAX_S - STEP_S)
        assert observer.removed == []
        await asyncio.sleep(3 * STEP_S)
        assert observer.removed == ["10.0.0.2:7"]
        task.cancel()

    run_virtual(main())


def test_what_came_and_went_while_nobody_could_be_asked_is_seen_at_the_next_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        watch, observer, dns, task = await started(monkeypatch)
        dns.hosts = None
        await asyncio.sleep(10 * STEP_S)
        assert observer.removed == []
        dns.hosts = ("10.0.0.2", "10.0.0.4")
        await asyncio.sleep(STEP_S)
        watch.answers["10.0.0.4:7"].set()
        await asyncio.sleep(STEP_S)
        assert observer.removed == ["10.0.0.1:7"]
        assert watch._watchers.keys() == {"10.0.0.2:7", "10.0.0.4:7"}
        task.cancel()

    run_virtual(main())


def test_reports_are_asked_for_more_often_than_silence_is_taken_for_absence() -> None:
    assert 4 * fleet_watch.REPORT_INTERVAL_S <= fleet_watch.SILENCE_LIMIT_S
