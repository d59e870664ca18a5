"""An agent service and the real state service speak of the same runs.

Oracle: the ports' own words (agent_svc/run_ports.py), which the twin in tests/unit/agent/world.py
keeps too. Method: the state service over Valkey in this process; models and tools are scripted.

Seen to fail on the mutant agent_sleeps_through_nudges.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from agent_svc.adapters import worker as worker_module
from agent_svc.adapters.run_work import Outside, RunWork
from agent_svc.adapters.state_documents import StateDocuments
from agent_svc.adapters.state_runs import StateRuns
from agent_svc.adapters.task_run import Manner
from agent_svc.adapters.worker import Limits, Worker
from agent_svc.domain.ending import Rules
from agent_svc.domain.model import CallId, Event, ToolCall, Waiting, WaitReason
from agent_svc.domain.slots import SHARES, room
from agent_svc.domain.tool_format import Options
from agent_svc.run_ports import Append, LeaseKey, Model, Spec
from sluice.errors import SluiceError
from sluice.scheduler.v1 import runs_pb2 as public_pb2
from sluice.scheduler.v1 import spec_pb2
from sluice.state.v1 import documents_pb2, runs_pb2, sessions_pb2
from state_svc.adapters import run_servicer
from tests.contract.agent_rig import TENANT, Rig, state_service
from tests.unit.agent.world import (
    Script,
    ScriptedModel,
    ScriptedTools,
    answer,
    calls,
    chunks_of,
)
from tests.valkey import ValkeyProcess, valkey

ENDED = (
    runs_pb2.RUN_PHASE_SUCCEEDED,
    runs_pb2.RUN_PHASE_FAILED,
    runs_pb2.RUN_PHASE_CANCELLED,
)


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyProcess]:
    with valkey() as running:
        yield running


@pytest.fixture
async def rig(server: ValkeyProcess) -> AsyncIterator[Rig]:
    async with state_service(server.url) as running:
        yield running


class RigModels:
    """Port Models. The reply is that of the run's number of model calls before this one."""

    def __init__(self, script: Script) -> None:
        self._script = script

    def of_run(self, lease: LeaseKey, spec: Spec, affinity: str) -> Model:
        def before(request_id: str) -> int:
            known = self._script.model_calls
            return sum(one.startswith(f"{lease.run_id}.") for one in known if one != request_id)

        return ScriptedModel(self._script, before)


def tool_calls(script: Script) -> list[int]:
    """How often each tool call was made, by its key."""
    return list(script.effects.values())


@asynccontextmanager
async def agent(rig: Rig, script: Script, **limits: float) -> AsyncIterator[Worker]:
    """An agent service at work."""
    runs = StateRuns(rig.channel, 3.0)
    outside = Outside(
        runs=runs,
        sessions=runs,
        documents=StateDocuments(rig.channel, 3.0),
        usage=runs,
        models=RigModels(script),
        tools=lambda _tenant, _run_id, names: ScriptedTools(script, names),
        chunks_of=chunks_of,
    )
    manner = Manner(
        rules=Rules(),
        options=Options(),
        options_by_context=True,
        output_tokens_max=512,
        call_tokens_max=256,
        in_place_s=1.0,
        text_interval_s=lambda: 0.04,
    )
    work = RunWork(outside, manner, embed_batch=4)
    holder = f"agent:{uuid.uuid4()}"
    bounds = Limits(**limits)  # type: ignore[arg-type]
    worker = Worker(holder, runs, work, bounds, clock=time.monotonic)
    task = asyncio.create_task(worker.run())
    try:
        yield worker
    finally:
        task.cancel()
        await asyncio.wait([task])


def kinds(events: list[public_pb2.RunEvent]) -> list[str]:
    return [str(event.WhichOneof("kind")) for event in events]


async def test_a_run_goes_its_way_and_says_how_it_stands(rig: Rig) -> None:
    script = Script([calls(("find", {"n": 1}), ("put", {"n": 2})), answer("done")], 0.05, 0.05)
    run_id = await rig.create(tools=["find", "put"])
    async with agent(rig, script):
        run = await rig.until(run_id, *ENDED)
    events = await rig.events(run_id)
    assert kinds(events) == [
        "queued",
        "model_step",
        "tool_call_started",
        "tool_call_started",
        "tool_call_ended",
        "tool_call_ended",
        "model_step",
        "ended",
    ]
    assert [event.sequence for event in events] == list(range(1, 9))
    assert run.phase == runs_pb2.RUN_PHASE_SUCCEEDED
    summary = public_pb2.Run.FromString(run.summary)
    assert (summary.steps, summary.tool_calls, summary.answer) == (4, 2, "done")
    assert summary.budget.steps_max == 200
    assert tool_calls(script) == [1, 1]


async def test_a_run_is_claimed_within_moments_of_its_creation(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the nudge: who only polls would look a minute later."""
    monkeypatch.setattr(run_servicer, "POLL_MS", (60_000, 60_000))
    monkeypatch.setattr(worker_module, "BACKOFF_MAX_S", 60.0)
    script = Script([answer("done")], 0.01)
    async with agent(rig, script) as worker:
        async with asyncio.timeout(10):
            while not worker.claims:
                await asyncio.sleep(0.01)
        claims = worker.claims
        begin = time.monotonic()
        run_id = await rig.create(tools=["find"])
        await rig.until(run_id, *ENDED)
        assert time.monotonic() - begin < 10.0
        assert worker.claims > claims


async def test_a_cancel_reaches_a_call_under_way(rig: Rig) -> None:
    script = Script([calls(("find", {"n": 1}))], 0.01, tool_s=60.0)
    run_id = await rig.create(tools=["find"])
    # By the order alone: the renewal, which would tell it too, is far away.
    async with agent(rig, script, lease_s=60.0, renew_s=19.0):
        async with asyncio.timeout(10):
            while "tool_call_started" not in kinds(await rig.events(run_id)):
                await asyncio.sleep(0.01)
        begin = time.monotonic()
        request = runs_pb2.CancelRunRequest(
            tenant=TENANT, run_id=run_id, request_id=str(uuid.uuid4())
        )
        await rig.runs.CancelRun(request)
        await rig.until(run_id, runs_pb2.RUN_PHASE_CANCELLED)
        assert time.monotonic() - begin < 10.0
    assert kinds(await rig.events(run_id))[-2:] == ["tool_call_ended", "ended"]


async def test_a_person_decides_and_the_run_goes_on(rig: Rig) -> None:
    script = Script([calls(("sign", {"n": 1})), answer("done")], 0.01, 0.01)
    run_id = await rig.create(tools=["sign"])
    async with agent(rig, script):
        await rig.until(run_id, runs_pb2.RUN_PHASE_WAITING)
        decision = public_pb2.RunResumed(step=2, decision=public_pb2.RESUME_DECISION_RETRY)
        await rig.runs.ResumeRun(
            runs_pb2.ResumeRunRequest(
                tenant=TENANT,
                run_id=run_id,
                step=2,
                decision=decision.SerializeToString(),
                request_id=str(uuid.uuid4()),
            )
        )
        await rig.until(run_id, runs_pb2.RUN_PHASE_SUCCEEDED)
    assert "resumed" in kinds(await rig.events(run_id))
    assert tool_calls(script) == [1]


async def test_a_turn_reads_its_session_and_leaves_both_messages_there(rig: Rig) -> None:
    script = Script(["Hello again."], 0.05)
    session = await rig.session(("system", "Be brief."), ("user", "Hi"), ("assistant", "Ho"))
    run_id = await rig.create(task="And now?", session=session)
    async with agent(rig, script):
        await rig.until(run_id, runs_pb2.RUN_PHASE_SUCCEEDED)
    asked = [message.content for message in script.prompts[0].messages]
    assert asked == ["Be brief.", "Hi", "Ho", "And now?"]
    request = sessions_pb2.GetSessionRequest(tenant=TENANT, session_id=session, page_size=100)
    found = await rig.sessions.GetSession(request)
    assert found.session.message_count == 5
    assert found.session.open_run_id == ""


async def test_text_reaches_a_watcher_before_the_step_ends(rig: Rig) -> None:
    script = Script(["word " * 100], model_s=1.0)
    run_id = await rig.create()
    texts: list[str] = []
    seen: list[str] = []
    async with agent(rig, script):
        watch = rig.runs.WatchRun(runs_pb2.WatchRunRequest(tenant=TENANT, run_id=run_id))
        async for message in watch:
            if message.WhichOneof("kind") == "text":
                texts = [] if message.text.replaces else texts
                texts.append(message.text.text)
                seen.append("text")
            else:
                event = public_pb2.RunEvent.FromString(message.entry.event)
                seen.append(str(event.WhichOneof("kind")))
    assert seen[0] == "queued"
    assert seen[-2:] == ["model_step", "ended"]
    assert seen.index("model_step") > 5
    assert ("word " * 100).startswith("".join(texts))


async def test_a_dead_agents_run_is_taken_over(rig: Rig) -> None:
    script = Script(
        [calls(("put", {"n": 1})), calls(("put", {"n": 2})), answer("done")], 0.01, tool_s=0.5
    )
    run_id = await rig.create(tools=["put"])
    async with agent(rig, script, lease_s=2.0, renew_s=0.3):
        async with asyncio.timeout(10):
            while len(script.effects) < 2:
                await asyncio.sleep(0.01)
    begin = time.monotonic()
    async with agent(rig, script):
        await rig.until(run_id, *ENDED)
    assert time.monotonic() - begin < 10.0
    first, second = script.effects.values()
    assert (first, second) == (1, 2)


async def test_an_agent_whose_lease_is_lost_is_told_so_by_every_call(rig: Rig) -> None:
    runs = StateRuns(rig.channel, 3.0)
    await rig.create()
    old = (await runs.claim("a", room(SHARES, 1, {}, 0, 1), 1.0)).runs[0]
    assert [one.held for one in await runs.renew([old.lease], 1.0)] == [True]
    await asyncio.sleep(1.2)
    new = (await runs.claim("b", room(SHARES, 1, {}, 0, 1), 60.0)).runs[0]
    assert new.lease.token > old.lease.token
    assert [one.held for one in await runs.renew([old.lease, new.lease], 60.0)] == [False, True]
    question = Waiting(2, WaitReason.APPROVAL, ToolCall(CallId("c"), "find", "{}"))
    append = Append("00000000-0000-4000-8000-000000000001", 1, (Event(2, 1.5, question),), None)
    with pytest.raises(SluiceError) as lost:
        await runs.append(old.lease, append)
    assert lost.value.reason == "LEASE_LOST"
    with pytest.raises(SluiceError) as lost:
        await runs.publish(old.lease, 1, "x", replaces=True)
    assert lost.value.reason == "LEASE_LOST"
    await runs.append(new.lease, append)
    await runs.append(new.lease, append)  # repeated: as before
    read = await runs.read(new.lease, 1 << 20)
    assert read.events[1] == append.events[0]
    with pytest.raises(SluiceError) as long:
        await runs.read(new.lease, 10)
    assert long.value.reason == "RUN_TOO_LONG"


async def test_an_ingest_makes_a_document_searchable(rig: Rig) -> None:
    put = documents_pb2.PutDocumentRequest(
        tenant=TENANT,
        collection="notes",
        document_id="d",
        content=b"alpha beta gamma delta epsilon zeta",
        media_type="text/plain",
        request_id=str(uuid.uuid4()),
    )
    document = (await rig.documents.PutDocument(put)).document
    spec = spec_pb2.RunSpec()
    spec.ingest.collection, spec.ingest.document_id = "notes", "d"
    spec.ingest.generation = document.generation
    spec.budget.steps_max = 10
    spec.budget.wall_time_max.FromSeconds(60)
    script = Script(model_s=0.01)
    run_id = await rig.create_spec(spec)
    async with agent(rig, script):
        await rig.until(run_id, *ENDED)
    events = await rig.events(run_id)
    assert kinds(events) == ["queued", "progress", "progress", "ended"]
    assert [event.progress.done for event in events[1:3]] == [4, 6]
    search = documents_pb2.SearchChunksRequest(
        tenant=TENANT, collection="notes", query="epsilon", top_k=1
    )
    found = await rig.documents.SearchChunks(search)
    assert [hit.chunk.text for hit in found.hits] == ["epsilon"]
