"""What it takes to append to a session: gRPC, the state service, Valkey with its log on the disk.

``python -m bench.session_append``: starts Valkey with `appendfsync` everysec and always, each with
a state service, on free ports; appends two messages of 200 bytes one call
after the other, then with 16 callers; prints JSON. ``measure`` is what `make bench-agent` calls.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
import uuid
from typing import Any, Final

import grpc.aio

from sluice.state.v1 import sessions_pb2
from sluice.state.v1.sessions_pb2_grpc import SessionServiceStub
from tests.robustness.state_process import state_service
from tests.valkey import valkey

STORE_TIMEOUT_S: Final = 5.0  # what a busy disk takes is measured and refuses nothing
ROUNDS: Final = 1_000
QUICK_ROUNDS: Final = 100
CALLERS: Final = 16
MESSAGES: Final = (b"u" * 200, b"a" * 200)
PER_SESSION: Final = 100  # appends to one session, so that its bounds are far


async def a_session(stub: Any) -> str:
    """A new session's id."""
    request = sessions_pb2.CreateSessionRequest(tenant="bench", request_id=str(uuid.uuid4()))
    return str((await stub.CreateSession(request)).session.session_id)


async def append(stub: Any, session_id: str, version: int) -> None:
    """One append, at the version that the session has."""
    await stub.AppendSession(
        sessions_pb2.AppendSessionRequest(
            tenant="bench",
            session_id=session_id,
            messages=MESSAGES,
            expected_version=version,
            request_id=str(uuid.uuid4()),
        )
    )


async def one_by_one(stub: Any, rounds: int) -> list[float]:
    """Milliseconds of each call."""
    taken: list[float] = []
    while len(taken) < rounds:
        session_id = await a_session(stub)
        for number in range(min(PER_SESSION, rounds - len(taken))):
            began = time.perf_counter()
            await append(stub, session_id, number + 1)
            taken.append((time.perf_counter() - began) * 1e3)
    return taken


async def figures(channel: grpc.aio.Channel, rounds: int) -> dict[str, float]:
    """p50 and p99 of one caller in ms, and appends per second of many."""
    stub: Any = SessionServiceStub(channel)
    await one_by_one(stub, max(rounds // 10, 20))  # connections and scripts are there
    taken = await one_by_one(stub, rounds)
    began = time.perf_counter()
    await asyncio.gather(*(one_by_one(stub, rounds // 10) for _ in range(CALLERS)))
    return {
        "p50": round(statistics.median(taken), 3),
        "p99": round(statistics.quantiles(taken, n=100)[98], 3),
        "per_s": round(CALLERS * (rounds // 10) / (time.perf_counter() - began)),
    }


async def measured(rounds: int) -> dict[str, float]:
    """The figures of both ways to keep the log."""
    found: dict[str, float] = {}
    for fsync, suffix in (("everysec", ""), ("always", "_always")):
        with valkey("--appendonly", "yes", "--appendfsync", fsync) as store:
            async with state_service(store.url, STORE_TIMEOUT_S) as (_, channel):
                for name, value in (await figures(channel, rounds)).items():
                    found[f"session_append_ms_{name}{suffix}".replace("_ms_per", "_per")] = value
    return found


def measure(*, quick: bool = False) -> dict[str, float]:
    """``session_append_ms_p50`` (everysec), ``session_append_ms_p50_always``, and more."""
    return asyncio.run(measured(QUICK_ROUNDS if quick else ROUNDS))


if __name__ == "__main__":
    print(json.dumps(measure(), indent=2))
