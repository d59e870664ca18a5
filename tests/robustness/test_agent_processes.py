"""Agent services as real processes that die at named fault points or by SIGKILL.

Goal: a run goes on in another process, ends once, and each effect of an idempotent tool is there
exactly once, while a once tool is never called twice by itself. Method: a mesh with one agent
service whose tools are HTTP calls to a server of the test, which keeps an effects table by
idempotency key; the agent dies in the middle of a run and is started again. Oracle: the run's
events as a client watches them, and the table. Seed: none; each death is at a stated place.

Seen to fail on mutants: agent_process_once_repeated.
"""

from __future__ import annotations

import json
import signal
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
import pytest

from sluice import fault_points
from sluice.scheduler.v1 import runs_pb2, scheduler_pb2_grpc
from tests.hermetic.mesh import Mesh, Shape, mesh

PARAMETERS = '{"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}'


@dataclass
class Effects:
    """What the tools did: requests by key, and effects, which a key has once."""

    requests: Counter[str] = field(default_factory=Counter)
    table: dict[str, str] = field(default_factory=dict)


@pytest.fixture(scope="module")
def effects() -> Iterator[tuple[Effects, int]]:
    kept = Effects()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            key = self.headers["idempotency-key"]
            kept.requests[key] += 1
            kept.table.setdefault(key, body.decode())
            answer = json.dumps({"stored": json.loads(body)["n"]}).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield kept, server.server_address[1]
    server.shutdown()
    thread.join()
    server.server_close()


def tool(name: str, effect: str, port: int) -> dict[str, Any]:
    return {
        "name": name,
        "description": "Stores a number.",
        "effect": effect,
        "http": {
            "method": "POST",
            "url": f"http://127.0.0.1:{port}/{name}",
            "parameters_json": PARAMETERS,
            "idempotency_header": "Idempotency-Key",
        },
        "egress": {"hosts": [f"127.0.0.1:{port}"], "private_allowed": [f"127.0.0.1:{port}"]},
    }


@pytest.fixture(scope="module")
def running(
    tmp_path_factory: pytest.TempPathFactory, effects: tuple[Effects, int]
) -> Iterator[Mesh]:
    port = effects[1]
    shape = Shape(
        agents=2,
        agent={"lease_s": 1.0, "renew_s": 0.3},
        tools=[tool("put", "idempotent", port), tool("pay", "once", port)],
    )
    with mesh(tmp_path_factory.mktemp("agents"), shape) as made:
        made["agent-1"].kill()  # stands by for the test that needs two
        yield made


class Client:
    """A client of the public API."""

    def __init__(self, running: Mesh) -> None:
        self._mesh = running
        self._channel = grpc.insecure_channel(running.target)
        self._stub: Any = scheduler_pb2_grpc.SchedulerServiceStub(self._channel)

    def start(self, *replies: dict[str, Any]) -> str:
        """Starts a run in the background, once an agent service is seen again; its id."""
        task = "Do it. [[sim: " + json.dumps({"replies": replies}) + "]]"
        request = runs_pb2.RunAgentRequest(
            task=task, tools=["put", "pay"], request_id=str(uuid.uuid4()), background=True
        )
        end = time.monotonic() + 20
        while True:
            events = self._stub.RunAgent(request, metadata=self._mesh.metadata, timeout=20)
            try:
                return str(next(iter(events)).event.run_id)
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE or time.monotonic() > end:
                    raise
            time.sleep(0.1)

    def watch(self, run_id: str, *, until: str = "ended") -> list[runs_pb2.RunEvent]:
        """The durable events of a run, up to one of a kind; through losses of the stream."""
        events: list[runs_pb2.RunEvent] = []
        while not events or events[-1].WhichOneof("kind") != until:
            request = runs_pb2.WatchRunRequest(run_id=run_id, from_sequence=len(events) + 1)
            try:
                for answer in self._stub.WatchRun(
                    request, metadata=self._mesh.metadata, timeout=40
                ):
                    if answer.event.WhichOneof("kind") != "partial_text":
                        events.append(answer.event)
                        if answer.event.WhichOneof("kind") == until:
                            break
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
        return events

    def resume(self, run_id: str, step: int, decision: int) -> None:
        """Decides for a run that waits."""
        request = runs_pb2.ResumeRunRequest(
            run_id=run_id,
            step=step,
            decision=decision,  # type: ignore[arg-type]
            request_id=str(uuid.uuid4()),
        )
        self._stub.ResumeRun(request, metadata=self._mesh.metadata, timeout=10)

    def close(self) -> None:
        self._channel.close()


@pytest.fixture
def client(running: Mesh) -> Iterator[Client]:
    made = Client(running)
    yield made
    made.close()


def armed(running: Mesh, point: str) -> None:
    """Starts the agent anew so that it dies at a point, or not at all."""
    agent = running["agent-0"]
    if agent.alive:
        agent.kill()
    environ = {k: v for k, v in agent.environ.items() if k != fault_points.VARIABLE}
    agent.environ = environ | ({fault_points.VARIABLE: point} if point else {})
    agent.start()


def kinds(events: list[runs_pb2.RunEvent]) -> list[str]:
    return [str(event.WhichOneof("kind")) for event in events]


def done(effects: Effects, run_id: str) -> int:
    """Effects of a run."""
    return sum(key.startswith(run_id) for key in list(effects.table))


PUT = {"tool": "put", "arguments": {"n": 1}}
PAY = {"tool": "pay", "arguments": {"n": 2}}
DONE = {"answer": "done"}


@pytest.mark.parametrize(
    "point",
    [
        "agent.after_model_call",
        "agent.after_tool_call",
        "agent.after_append:2",
        "agent.before_end",
    ],
)
def test_a_run_goes_on_in_another_process_and_its_effect_is_there_once(
    point: str, running: Mesh, client: Client, effects: tuple[Effects, int]
) -> None:
    armed(running, point)
    run_id = client.start(PUT, DONE)
    assert running["agent-0"].ended(20) == fault_points.EXIT_STATUS
    armed(running, "")
    events = client.watch(run_id)
    assert kinds(events).count("ended") == 1
    assert events[-1].ended.answer == "done"
    assert kinds(events).count("tool_call_ended") == 1
    key = f"{run_id}:2"
    assert [one for one in effects[0].table if one.startswith(run_id)] == [key]
    assert json.loads(effects[0].table[key]) == {"n": 1}
    # Made again, with its key, only where its result was not stored.
    assert effects[0].requests[key] == (2 if point == "agent.after_tool_call" else 1)


def test_a_once_call_in_doubt_asks_a_person_and_is_not_made_again(
    running: Mesh, client: Client, effects: tuple[Effects, int]
) -> None:
    armed(running, "agent.after_tool_call")
    run_id = client.start(PAY, DONE)
    assert running["agent-0"].ended(20) == fault_points.EXIT_STATUS
    armed(running, "")
    events = client.watch(run_id, until="waiting")
    assert events[-1].waiting.reason == runs_pb2.WAIT_REASON_IN_DOUBT
    client.resume(run_id, events[-1].waiting.step, runs_pb2.RESUME_DECISION_SKIP)
    events = client.watch(run_id)
    assert events[-1].ended.answer == "done"
    assert effects[0].requests[f"{run_id}:2"] == 1


def test_a_run_survives_kills_at_any_moment(
    running: Mesh, client: Client, effects: tuple[Effects, int]
) -> None:
    armed(running, "")
    replies = [{"tool": "put", "arguments": {"n": number}} for number in range(6)]
    run_id = client.start(*replies, DONE)
    for count in (2, 4):
        running.until(lambda: done(effects[0], run_id) >= count, "the run goes on")  # noqa: B023
        armed(running, "")
    events = client.watch(run_id)
    assert events[-1].ended.answer == "done"
    assert kinds(events).count("tool_call_ended") == 6
    mine = [json.loads(text)["n"] for key, text in effects[0].table.items() if run_id in key]
    assert sorted(mine) == list(range(6))


def test_an_agent_that_stood_still_does_nothing_more_for_a_run_that_another_took_over(
    running: Mesh, client: Client, effects: tuple[Effects, int]
) -> None:
    armed(running, "")
    replies = [{"tool": "put", "arguments": {"n": number}} for number in range(5)]
    run_id = client.start(*replies, DONE)
    running.until(lambda: done(effects[0], run_id) >= 2, "the run goes on")
    running["agent-0"].send(signal.SIGSTOP)
    running["agent-1"].start()
    try:
        events = client.watch(run_id)
        made = {key: n for key, n in effects[0].requests.items() if key.startswith(run_id)}
    finally:
        running["agent-0"].send(signal.SIGCONT)
    time.sleep(2.0)  # what it would still do, it does now
    assert {k: n for k, n in effects[0].requests.items() if k.startswith(run_id)} == made
    assert running.serving("agent-0")
    running["agent-1"].kill()
    assert client.watch(run_id) == events
    assert kinds(events).count("ended") == 1
    numbers = [json.loads(text)["n"] for key, text in effects[0].table.items() if run_id in key]
    assert sorted(numbers) == list(range(5))


def test_the_log_holds_no_argument_of_a_call(running: Mesh) -> None:
    assert '"n"' not in running["agent-0"].text()
