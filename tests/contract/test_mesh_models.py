"""Model calls of runs over a scheduler's mesh API, which the test plays.

Oracle: what the schedulers got, and agent_svc/run_ports.py. Seen to fail on the mutant
step_by_the_librarys_iterator.
"""

from __future__ import annotations

import asyncio
import gc
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from agent_svc.adapters.mesh_models import MeshModels, Scheduler, ranked
from agent_svc.domain.model import Budget, Choice, Message, RunId, ToolInfo
from agent_svc.run_ports import LeaseKey, Model, Prompt, Spec, TaskSpec, Written
from sluice import context
from sluice.common.v1 import result_pb2, sampling_pb2
from sluice.errors import Code, SluiceError, exhausted, unauthenticated, unavailable
from sluice.scheduler.v1 import generate_pb2, mesh_pb2, mesh_pb2_grpc
from sluice.server import Health, MeshServer

NOW_S = 1_700_000_000.0
LEASE = LeaseKey("t", RunId("r"), 1)


@dataclass
class Played(mesh_pb2_grpc.SchedulerMeshServiceServicer):
    """A scheduler. ``script``: what becomes of each call; words, then perhaps an error."""

    script: list[list[str | SluiceError]] = field(default_factory=list)
    steps: list[mesh_pb2.GenerateStepRequest] = field(default_factory=list)
    embeds: list[mesh_pb2.EmbedStepRequest] = field(default_factory=list)
    renewals: int = 0
    open_calls: int = 0
    traceparents: list[str] = field(default_factory=list)

    async def GenerateStep(self, request: Any, call: Any) -> AsyncIterator[Any]:
        self.steps.append(request)
        self.traceparents.append(context.traceparent.get())
        self.open_calls += 1
        try:
            plan = self.script.pop(0) if self.script else ["ok"]
            for word in plan:
                if isinstance(word, SluiceError):
                    raise word
                if word == "hang":
                    await asyncio.sleep(60)
                delta = generate_pb2.GenerateDelta(text=word)
                response = generate_pb2.GenerateResponse(delta=delta)
                yield mesh_pb2.GenerateStepResponse(response=response)
            finished = generate_pb2.GenerateFinished(
                outputs=[generate_pb2.OutputFinish(finish_reason=result_pb2.FINISH_REASON_LENGTH)],
                usage=result_pb2.Usage(prompt_tokens=5, completion_tokens=2, cached_tokens=1),
                cost=0.5,
                request_id=request.request.request_id,
            )
            response = generate_pb2.GenerateResponse(finished=finished)
            yield mesh_pb2.GenerateStepResponse(response=response)
        finally:
            self.open_calls -= 1

    async def EmbedStep(self, request: Any, call: Any) -> Any:
        self.embeds.append(request)
        if self.script:
            error = self.script.pop(0)[0]
            assert isinstance(error, SluiceError)
            raise error
        vectors = [generate_pb2.Embedding(values=[1.0, 0.5]) for _ in request.request.texts]
        return mesh_pb2.EmbedStepResponse(response=generate_pb2.EmbedResponse(embeddings=vectors))

    async def RenewRunCredential(self, request: Any, call: Any) -> Any:
        self.renewals += 1
        return mesh_pb2.RenewRunCredentialResponse(credential=credential(NOW_S + 3600))


def credential(expire_s: float) -> mesh_pb2.SignedRunCredential:
    content = mesh_pb2.RunCredential(run_id="r", tenant="t")
    content.expire_time.FromSeconds(int(expire_s))
    return mesh_pb2.SignedRunCredential(payload=content.SerializeToString(), signature=b"s")


def spec(expire_s: float = NOW_S + 3600) -> Spec:
    work = TaskSpec((Message("user", "Hi"),), (), Choice.AUTO, "", False, 0, None)
    sampling = sampling_pb2.SamplingParams(temperature=0.25)
    return Spec(
        work,
        Budget(1, 1, 1, 1.0, 1.0),
        credential(expire_s).SerializeToString(),
        sampling=sampling.SerializeToString(),
    )


@asynccontextmanager
async def schedulers(*played: Played) -> AsyncIterator[tuple[MeshModels, list[Played]]]:
    """These schedulers in the order in which the run "r" asks them."""
    servers = []
    for one in played:
        server = MeshServer("scheduler", ["127.0.0.1:0"], Health())
        mesh_pb2_grpc.add_SchedulerMeshServiceServicer_to_server(one, server.grpc)
        await server.start()
        servers.append(server)
    addresses = [f"127.0.0.1:{server.ports[0]}" for server in servers]
    order = [one.address for one in ranked([Scheduler(a, None) for a in addresses], "r")]
    by_address = dict(zip(addresses, played, strict=True))
    models = MeshModels(addresses, wall=lambda: NOW_S)
    try:
        yield models, [by_address[address] for address in order]
    finally:
        await models.close()
        for server in servers:
            await server.stop(0.1)


async def generate(model: Model, prompt: Prompt | None = None) -> tuple[str, Written]:
    parts: list[str] = []
    async for piece in model.generate(
        prompt or Prompt([Message("user", "Hi")]),
        step=3,
        request_id="r.3",
        max_tokens=9,
        total_tokens_max=70,
        deadline_s=30.0,
    ):
        if isinstance(piece, Written):
            return "".join(parts), piece
        parts.append(piece)
    raise AssertionError("no end")


async def test_a_call_carries_the_runs_credential_and_what_is_asked() -> None:
    async with schedulers(Played([["Hel", "lo"]])) as (models, (played,)):
        tool = ToolInfo("find", "Finds.", {"type": "object"})
        prompt = Prompt([Message("user", "Hi")], '{"type":"object"}', (tool,), True)
        traced = "00-" + "1" * 32 + "-" + "2" * 16 + "-01"
        context.traceparent.set(traced)
        text, written = await generate(models.of_run(LEASE, spec(), "r"), prompt)
        context.traceparent.set("")
    assert text == "Hello"
    assert written == Written("length", 5, 2, 1, 0.5, "r.3")
    (asked,) = played.steps
    assert asked.credential == credential(NOW_S + 3600)
    assert (asked.step, asked.request.request_id) == (3, "r.3")
    assert asked.remaining.seconds == 30
    sampling = asked.request.sampling
    assert (sampling.temperature, sampling.max_tokens) == (0.25, 9)
    assert sampling.total_tokens_max == 70
    assert sampling.structured_output.json_schema == '{"type":"object"}'
    assert sampling.keep_special_tokens
    assert asked.request.tools[0].parameters_json == '{"type": "object"}'
    assert played.traceparents == [traced]


async def test_after_a_reply_that_ran_on_the_call_is_sampled_otherwise() -> None:
    async with schedulers(Played([["ok"], ["ok"]])) as (models, (played,)):
        for otherwise in (False, True):
            prompt = Prompt([Message("user", "Hi")], otherwise=otherwise)
            await generate(models.of_run(LEASE, spec(), "r"), prompt)
    before, after = (asked.request.sampling for asked in played.steps)
    assert not before.HasField("frequency_penalty")
    assert after.frequency_penalty > 0
    assert after.temperature == 0.25, "the run's own"


async def test_the_next_scheduler_is_asked_when_the_first_is_unavailable() -> None:
    draining = unavailable("DRAINING", "x", 1.0)
    async with schedulers(Played(), Played()) as (models, (first, second)):
        first.script = [[draining]]
        text, _ = await generate(models.of_run(LEASE, spec(), "r"))
    assert text == "ok"
    assert (len(first.steps), len(second.steps)) == (1, 1)


async def test_when_none_is_available_the_soonest_delay_is_told() -> None:
    async with schedulers(Played(), Played()) as (models, (first, second)):
        first.script = [[unavailable("NO_INSTANCE", "x", 9.0)]]
        second.script = [[unavailable("DRAINING", "x", 2.0)]]
        with pytest.raises(SluiceError) as refused:
            await generate(models.of_run(LEASE, spec(), "r"))
    assert (refused.value.reason, refused.value.retry_after_s) == ("DRAINING", 2.0)


async def test_a_refusal_is_the_runs_to_wait_out_and_not_another_schedulers() -> None:
    async with schedulers(Played(), Played()) as (models, (first, second)):
        first.script = [[exhausted("QUEUE_FULL", "x", 4.0)]]
        with pytest.raises(SluiceError) as refused:
            await generate(models.of_run(LEASE, spec(), "r"))
    assert (refused.value.reason, refused.value.retry_after_s) == ("QUEUE_FULL", 4.0)
    assert second.steps == []


async def test_what_breaks_after_the_first_text_is_not_begun_again_elsewhere() -> None:
    async with schedulers(Played(), Played()) as (models, (first, second)):
        first.script = [["Hel", unavailable("INSTANCE_LOST", "x")]]
        with pytest.raises(SluiceError) as lost:
            await generate(models.of_run(LEASE, spec(), "r"))
    assert lost.value.reason == "INSTANCE_LOST"
    assert second.steps == []


async def test_a_scheduler_that_is_gone_is_passed_over() -> None:
    models = MeshModels(["127.0.0.1:1"], wall=lambda: NOW_S)
    with pytest.raises(SluiceError) as gone:
        await generate(models.of_run(LEASE, spec(), "r"))
    await models.close()
    assert (gone.value.code, gone.value.reason) == (Code.UNAVAILABLE, "SCHEDULER_UNREACHABLE")


async def test_a_credential_is_renewed_ahead_of_its_time_and_kept() -> None:
    async with schedulers(Played()) as (models, (played,)):
        model = models.of_run(LEASE, spec(NOW_S + 60), "r")
        await generate(model)
        await generate(model)
    assert played.renewals == 1
    assert played.steps[0].credential == credential(NOW_S + 3600)


async def test_an_expired_credential_is_renewed_once_and_a_refused_one_ends_it() -> None:
    expired = unauthenticated("CREDENTIAL_EXPIRED", "x")
    async with schedulers(Played()) as (models, (played,)):
        played.script = [[expired], ["ok"]]
        model = models.of_run(LEASE, spec(), "r")
        assert (await generate(model))[0] == "ok"
        assert played.renewals == 1
        played.script = [[expired], [expired]]
        with pytest.raises(SluiceError) as refused:
            await generate(model)
    assert refused.value.reason == "CREDENTIAL_EXPIRED"
    assert played.renewals == 2


async def test_closing_a_call_ends_it_at_the_scheduler() -> None:
    async with schedulers(Played([["a", "hang"]])) as (models, (played,)):
        model = models.of_run(LEASE, spec(), "r")
        stream = model.generate(
            Prompt([Message("user", "Hi")]),
            step=1,
            request_id="r.1",
            max_tokens=9,
            total_tokens_max=70,
            deadline_s=30.0,
        )
        assert await anext(stream) == "a"
        assert played.open_calls == 1
        await stream.aclose()
        async with asyncio.timeout(1):
            while played.open_calls:
                await asyncio.sleep(0.01)


async def test_nothing_of_a_finished_call_is_held() -> None:
    """Mutant step_by_the_librarys_iterator: each call keeps its last message until a full garbage
    collection."""
    async with schedulers(Played()) as (models, (played,)):
        model = models.of_run(LEASE, spec(), "r")
        gc.collect()
        gc.disable()
        try:
            for _ in range(3):
                await generate(model)
            await asyncio.sleep(0.1)  # the generators that were let go are closed by the loop
            kind = mesh_pb2.GenerateStepResponse
            held = [one for one in gc.get_objects() if type(one) is kind]
        finally:
            gc.enable()
    assert len(played.steps) == 3
    assert held == []


async def test_vectors_come_as_little_endian_floats() -> None:
    async with schedulers(Played(), Played()) as (models, (first, second)):
        first.script = [[unavailable("DRAINING", "x")]]
        model = models.of_run(LEASE, spec(), "r")
        vectors = await model.embed(["a", "b"], request_id="r.2", deadline_s=5.0)
    assert vectors == [struct.pack("<2f", 1.0, 0.5)] * 2
    assert list(second.embeds[0].request.texts) == ["a", "b"]
    assert second.embeds[0].request.request_id == "r.2"


def test_a_scheduler_that_goes_moves_only_its_own_runs() -> None:
    known = [Scheduler(f"10.0.0.{number}:50052", None) for number in range(5)]
    firsts = {f"run-{n}": ranked(known, f"run-{n}")[0].address for n in range(500)}
    assert set(firsts.values()) == {one.address for one in known}
    left = known[1:]
    for run_id, address in firsts.items():
        now = ranked(left, run_id)[0].address
        assert now == address or address == known[0].address
