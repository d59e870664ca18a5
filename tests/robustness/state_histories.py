"""Clients that use sessions and runs while two state services and their store are killed and
stopped, and the histories of what they asked and heard.

``python -m tests.robustness.state_histories --seconds 60 --seeds 0-4`` runs it for longer and says
what it found; a test runs it for seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

import grpc.aio
from google.protobuf.duration_pb2 import Duration
from grpc_health.v1 import health_pb2

from sluice.errors import Code
from sluice.state.v1 import runs_pb2, sessions_pb2
from sluice.state.v1.runs_pb2_grpc import RunServiceStub
from sluice.state.v1.sessions_pb2_grpc import SessionServiceStub
from sluice.status import from_rpc_error
from tests.robustness.linearizability import (
    UNKNOWN,
    Operation,
    is_linearizable,
    run_model,
    session_model,
)
from tests.robustness.state_process import StateProcess, state_service, until_health
from tests.valkey import ValkeyProcess, valkey

CLIENTS: Final = 8
CALL_S: Final = 1.0
LEASE_S: Final = 1
KEYS: Final = 2  # sessions and runs in use at a time
MESSAGES_MAX: Final = 40  # then another session takes its place
EVENTS_MAX: Final = 30
ALWAYS: Final = ("--appendonly", "yes", "--appendfsync", "always")
REFUSED: Final = {"VERSION_CONFLICT": "conflict", "LEASE_LOST": "lost"}
LOST: Final = {Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED, Code.CANCELLED}


@dataclass
class Histories:
    """By key: what was asked. ``holds``: by run, from when until when somebody held it for sure."""

    sessions: dict[str, list[Operation]] = field(default_factory=dict)
    runs: dict[str, list[Operation]] = field(default_factory=dict)
    holds: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def problems(self) -> list[str]:
        """Keys whose history nothing explains."""
        found = [
            f"session {key}"
            for key, history in self.sessions.items()
            if not is_linearizable(history, (), session_model)
        ]
        found += [
            f"run {key}"
            for key, history in self.runs.items()
            if not is_linearizable(history, (None, 0, 1), run_model)
        ]
        for key, holds in self.holds.items():
            ordered = sorted(holds)
            if any(a[1] > b[0] for a, b in pairwise(ordered)):
                found.append(f"two owners at once of run {key}")
        return found

    def figures(self) -> dict[str, int]:
        """What was done."""
        every = [one for keys in (self.sessions, self.runs) for one in keys.values()]
        operations = [one for history in every for one in history]
        return {
            "keys": len(every),
            "operations": len(operations),
            "unanswered": sum(one.result == UNKNOWN for one in operations),
            "refused": sum(one.result in ("conflict", "lost") for one in operations),
            "faults": len(self.faults),
        }


class Client:
    """One of many: asks, and notes what it heard."""

    def __init__(self, name: str, channel: grpc.aio.Channel, seed: int, notes: Histories) -> None:
        self.name, self.rng, self.notes = name, random.Random(seed), notes
        self._sessions: Any = SessionServiceStub(channel)
        self._runs: Any = RunServiceStub(channel)

    async def _call(self, method: Any, request: Any) -> tuple[Any, float, float]:
        """Answer, reason of a refusal or UNKNOWN; when it was asked, when answered."""
        called = time.monotonic()
        try:
            answer = await method(request, timeout=CALL_S)
        except grpc.aio.AioRpcError as raised:
            error = from_rpc_error(raised)
            if error.reason in REFUSED:
                return REFUSED[error.reason], called, time.monotonic()
            if error.code not in LOST:
                raise
            await asyncio.sleep(0.2 + 0.4 * self.rng.random())
            return UNKNOWN, called, float("inf")
        return answer, called, time.monotonic()

    async def insist(self, method: Any, request: Any) -> Any:
        """The answer of a request that may be repeated."""
        while (answer := (await self._call(method, request))[0]) == UNKNOWN:
            pass
        return answer

    async def talk(self, keys: list[str], until: float) -> None:
        """Reads sessions and appends to them, mostly at the version that it saw."""
        while time.monotonic() < until:
            await asyncio.sleep(0.06 * self.rng.random())
            key = self.rng.choice(keys)
            count = await self._read(key)
            if count is None:
                continue
            if count >= MESSAGES_MAX and key in keys:
                place = keys.index(key)
                keys[place] = await self.a_session()
                continue
            expected = None if self.rng.random() < 0.2 else count + 1
            message = f"{self.name}.{self.rng.getrandbits(40)}"
            request = sessions_pb2.AppendSessionRequest(
                tenant="a",
                session_id=key,
                messages=[message.encode()],
                expected_version=expected,
                request_id=str(uuid.uuid4()),
            )
            answer, called, returned = await self._call(self._sessions.AppendSession, request)
            result = answer if isinstance(answer, str) else answer.session.version
            self.notes.sessions[key].append(
                Operation(("append", message, expected), result, called, returned)
            )

    async def _read(self, key: str) -> int | None:
        request = sessions_pb2.GetSessionRequest(tenant="a", session_id=key, page_size=1_000)
        answer, called, returned = await self._call(self._sessions.GetSession, request)
        if isinstance(answer, str):
            return None
        messages = tuple(one.decode() for one in answer.messages)
        self.notes.sessions[key].append(Operation(("read",), messages, called, returned))
        return len(messages)

    async def a_session(self) -> str:
        request = sessions_pb2.CreateSessionRequest(tenant="a", request_id=str(uuid.uuid4()))
        answer = await self.insist(self._sessions.CreateSession, request)
        key = str(answer.session.session_id)
        self.notes.sessions.setdefault(key, [])
        return key

    async def a_run(self) -> None:
        run_id = str(uuid.uuid4())
        self.notes.runs[run_id] = []  # claimed by another before the answer is here
        request = runs_pb2.CreateRunRequest(
            tenant="a",
            run_id=run_id,
            request_id=run_id,
            events=[b"first"],
            priority=1,
            active_max=10,
        )
        await self.insist(self._runs.CreateRun, request)

    async def work(self, until: float) -> None:
        """Claims runs, appends, gives back, or goes on long after its lease."""
        while time.monotonic() < until:
            await asyncio.sleep(0.1 * self.rng.random())
            request = runs_pb2.ClaimRunsRequest(
                holder=self.name, runs_max=1, lease=Duration(seconds=LEASE_S)
            )
            answer, called, returned = await self._call(self._runs.ClaimRuns, request)
            if isinstance(answer, str):
                for history in self.notes.runs.values():
                    history.append(Operation(("claim",), UNKNOWN, called))
                continue
            for claimed in answer.runs:
                key = claimed.run.run_id
                self.notes.runs[key].append(Operation(("claim",), claimed.token, called, returned))
                given_back = await self._hold(claimed)
                end = min(called + LEASE_S, given_back)
                if end > returned:
                    self.notes.holds.setdefault(key, []).append((returned, end))

    async def _hold(self, claimed: runs_pb2.ClaimedRun) -> float:
        """When it was about to give the run back."""
        last = claimed.run.last_sequence
        for _ in range(self.rng.randrange(4)):
            await asyncio.sleep(0.04 * self.rng.random())
            answer, _ = await self._append(claimed, last, runs_pb2.RUN_PHASE_RUNNING)
            if answer != last + 1:
                return float("inf")
            last += 1
        if self.rng.random() < 0.3:
            await asyncio.sleep(LEASE_S * (0.5 + self.rng.random()))
        ended = last > EVENTS_MAX
        phase = runs_pb2.RUN_PHASE_SUCCEEDED if ended else runs_pb2.RUN_PHASE_QUEUED
        answer, called = await self._append(claimed, last, phase)
        if ended and answer == last + 1:
            await self.a_run()
        return called

    async def _append(
        self, claimed: runs_pb2.ClaimedRun, last: int, phase: Any
    ) -> tuple[Any, float]:
        run = claimed.run
        request = runs_pb2.AppendRunRequest(
            lease=runs_pb2.Lease(tenant="a", run_id=run.run_id, token=claimed.token),
            expected_sequence=last,
            append_id=str(uuid.uuid4()),
            events=[b"event"],
            phase=phase,
        )
        answer, called, returned = await self._call(self._runs.AppendRun, request)
        result = answer if isinstance(answer, str) else answer.last_sequence
        after = "hold" if phase == runs_pb2.RUN_PHASE_RUNNING else "give back"
        asked = ("append", claimed.token, last, after)
        self.notes.runs[run.run_id].append(Operation(asked, result, called, returned))
        return result, called


class Faults:
    """What is done to the processes."""

    def __init__(
        self,
        services: Sequence[tuple[StateProcess, grpc.aio.Channel]],
        store: ValkeyProcess,
        seed: int,
    ) -> None:
        self._services, self._store = services, store
        self._rng = random.Random(seed)

    async def run(self, until: float, notes: Histories) -> None:
        """One after the other, each some time after the one before is over."""
        while time.monotonic() < until - 2.0:
            await asyncio.sleep(0.3 + 1.5 * self._rng.random())
            name = self._rng.choice(("kill_service", "stop_service", "kill_store", "stop_store"))
            notes.faults.append(name)
            await getattr(self, name)()
            for _, channel in self._services:
                await until_health(channel, health_pb2.HealthCheckResponse.SERVING)

    async def kill_service(self) -> None:
        service, _ = self._rng.choice(self._services)
        service.kill()
        service.start()

    async def stop_service(self) -> None:
        service, _ = self._rng.choice(self._services)
        service.send(signal.SIGSTOP)
        await asyncio.sleep(self._rng.random())
        service.send(signal.SIGCONT)

    async def kill_store(self) -> None:
        self._store.kill()
        await asyncio.to_thread(self._store.start)

    async def stop_store(self) -> None:
        self._store.send(signal.SIGSTOP)
        await asyncio.sleep(self._rng.random())
        self._store.send(signal.SIGCONT)


async def histories(seed: int, seconds: float) -> Histories:
    """Runs clients and faults for so long."""
    notes = Histories()
    with valkey(*ALWAYS) as store:
        async with state_service(store.url) as one, state_service(store.url) as other:
            services = (one, other)
            first = Client("first", one[1], seed, notes)
            keys = [await first.a_session() for _ in range(KEYS)]
            for _ in range(KEYS):
                await first.a_run()
            until = time.monotonic() + seconds
            clients = [
                Client(f"c{n}", services[n % 2][1], seed * 100 + n, notes)
                for n in range(2 * CLIENTS)
            ]
            async with asyncio.TaskGroup() as group:
                group.create_task(Faults(services, store, seed).run(until, notes))
                for client in clients[:CLIENTS]:
                    group.create_task(client.talk(keys, until))
                for client in clients[CLIENTS:]:
                    group.create_task(client.work(until))
    return notes


def main(arguments: Sequence[str]) -> int:
    """See the module's text; returns an exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seeds", default="0")
    options = parser.parse_args(arguments)
    first, _, last = options.seeds.partition("-")
    status = 0
    for seed in range(int(first), int(last or first) + 1):
        notes = asyncio.run(histories(seed, options.seconds))
        problems = notes.problems()
        status |= bool(problems)
        print(json.dumps({"seed": seed, **notes.figures(), "problems": problems}), flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
