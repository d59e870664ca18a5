"""Model calls of runs at the schedulers' mesh port, under a run credential.

Goal: a step is a request like any other (queue, quota, accounting, records, cancel), of the tenant,
class and models that a scheduler signed, and of nobody else. Method: a mesh with a state service;
credentials signed with the deployment's key, and wrong ones. Oracle: answers beside those of the
public API, decision records, the state service's ledger, the engine's own counts.

Seen to fail on the mutants credential_taken_for_granted and step_class_as_asked.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import grpc.aio
import pytest
import pytest_asyncio

from sluice.channels import ending, open_channel
from sluice.common.v1 import policy_pb2
from sluice.errors import Code, SluiceError
from sluice.grants import GrantSigner
from sluice.run_credentials import CREDENTIAL_TTL_S, CredentialSigner
from sluice.scheduler.v1 import generate_pb2, mesh_pb2, mesh_pb2_grpc, records_pb2
from sluice.status import from_rpc_error
from tests.hermetic import quota_mesh
from tests.hermetic.mesh import Mesh, Shape, mesh
from tests.hermetic.mesh_client import MeshClient, client_of, eventually, fresh_id

BATCH = policy_pb2.PRIORITY_CLASS_BATCH
CRITICAL = policy_pb2.PRIORITY_CLASS_CRITICAL
MODELS = ("sim", "sim-embed")
TOKENS = {"token_ids": [7] * 10}
LONG = {"max_tokens": 1500, "ignore_eos": True}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    shape = Shape(
        instances={
            "sim-0": {"decode_step_ms": 5.0},
            "embed-0": {"generate": False, "embedding_dimensions": 8, "model": "sim-embed"},
        },
        scheduler={
            "prices": ["sim=10:100"],
            "default_model": "sim",
            "aliases": ["fast=sim"],
            "decision_sample_ratio": 1.0,
        },
        state={},
    )
    with mesh(tmp_path_factory.mktemp("steps"), shape) as made:
        yield made


RUN_ID = "00000000-0000-4000-8000-000000000001"


def credential(
    running: Mesh,
    tenant: str = "dev",
    *,
    of_class: policy_pb2.PriorityClass.ValueType = CRITICAL,
    models: Sequence[str] = MODELS,
    age_s: float = 0.0,
) -> mesh_pb2.SignedRunCredential:
    """As a scheduler of this deployment signs it."""
    signer = CredentialSigner(GrantSigner.load(running.runtime / "keys", "test"))
    return signer.sign(
        run_id=RUN_ID,
        tenant=tenant,
        priority_class=of_class,
        models=models,
        now_unix_s=time.time() - age_s,
    )


class Steps:
    """An agent service's view of one scheduler."""

    def __init__(self, stub: Any, good: mesh_pb2.SignedRunCredential) -> None:
        self.stub = stub
        self.good = good

    def start(
        self, given: mesh_pb2.SignedRunCredential | None = None, remaining_s: int = 0, **fields: Any
    ) -> Any:
        """A step that was sent; reading it is the test's."""
        if not fields.keys() & {"prompt", "messages", "token_ids"}:
            fields["prompt"] = "Hello"
        request = mesh_pb2.GenerateStepRequest(
            credential=given or self.good,
            request=generate_pb2.GenerateRequest(**fields),
            step=3,
        )
        if remaining_s:
            request.remaining.seconds = remaining_s
        return self.stub.GenerateStep(request, timeout=20)

    async def generate(self, *args: Any, **fields: Any) -> list[generate_pb2.GenerateResponse]:
        """A step, read to its end."""
        return [message.response async for message in self.start(*args, **fields)]

    async def refused(self, *args: Any, **fields: Any) -> SluiceError:
        """The error of a step that fails."""
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.generate(*args, **fields)
        return from_rpc_error(caught.value)

    async def embed(
        self, texts: Sequence[str], given: mesh_pb2.SignedRunCredential | None = None
    ) -> generate_pb2.EmbedResponse:
        """An EmbedStep."""
        request = mesh_pb2.EmbedStepRequest(
            credential=given or self.good, request=generate_pb2.EmbedRequest(texts=texts)
        )
        response: generate_pb2.EmbedResponse = (
            await self.stub.EmbedStep(request, timeout=10)
        ).response
        return response


@asynccontextmanager
async def steps_of(running: Mesh, good: mesh_pb2.SignedRunCredential) -> AsyncIterator[Steps]:
    async with open_channel(running.mesh_address("scheduler-0")) as channel:
        await channel.channel_ready()
        yield Steps(mesh_pb2_grpc.SchedulerMeshServiceStub(channel), good)


@pytest_asyncio.fixture
async def steps(running: Mesh) -> AsyncIterator[Steps]:
    async with steps_of(running, credential(running)) as made:
        yield made
    running.until_idle()


@pytest_asyncio.fixture
async def client(running: Mesh) -> AsyncIterator[MeshClient]:
    async with client_of(running) as made:
        yield made


async def recorded(client: MeshClient, request_id: str) -> records_pb2.DecisionRecord:
    request = records_pb2.GetDecisionRequest(request_id=request_id)
    answer = await client.stub.GetDecision(request, metadata=client.metadata, timeout=5)
    record: records_pb2.DecisionRecord = answer.decision
    return record


async def test_a_step_is_answered_as_the_public_service_answers(
    client: MeshClient, steps: Steps
) -> None:
    asked: dict[str, Any] = {"prompt": "What is it?", "sampling": {"seed": 3, "max_tokens": 20}}
    public = await client.generate(**asked)
    messages = await steps.generate(**asked)
    kinds = [message.WhichOneof("event") for message in messages]
    assert (kinds[0], kinds[-1], set(kinds[1:-1])) == ("started", "finished", {"delta"})
    assert [message.sequence for message in messages] == list(range(1, len(messages) + 1))
    text = "".join(m.delta.text for m in messages if m.HasField("delta"))
    assert text == public.ok.text()
    assert messages[-1].finished.usage.completion_tokens == 20
    assert messages[-1].finished.cost == public.finished.cost > 0


async def test_identity_class_and_model_are_the_credentials(
    running: Mesh, client: MeshClient, steps: Steps
) -> None:
    """Mutant step_class_as_asked: a run could raise itself."""
    low = credential(running, of_class=BATCH)
    for wanted in (policy_pb2.PRIORITY_CLASS_UNSPECIFIED, CRITICAL):
        request_id = fresh_id("step")
        await steps.generate(low, priority_class=wanted, request_id=request_id)
        record = await recorded(client, request_id)
        assert (record.tenant, record.model, record.priority_class) == ("dev", "sim", BATCH)
        assert (record.run_id, record.step) == (RUN_ID, 3)
    request_id = fresh_id("step")
    await steps.generate(priority_class=BATCH, request_id=request_id)
    assert (await recorded(client, request_id)).priority_class == BATCH


async def test_a_step_without_a_model_takes_the_credentials_for_its_work(steps: Steps) -> None:
    messages = await steps.generate()
    assert messages[0].started.model == "sim"
    answer = await steps.embed(["a text", "another"])
    assert (answer.model, [len(one.values) for one in answer.embeddings]) == ("sim-embed", [8, 8])


@pytest.mark.parametrize("model", ["sim-embed", "other", "fast"])
async def test_a_model_that_is_not_the_credentials_is_unknown(
    running: Mesh, steps: Steps, model: str
) -> None:
    error = await steps.refused(credential(running, models=["sim"]), model=model)
    assert (error.code, error.reason) == (Code.NOT_FOUND, "MODEL_UNKNOWN")


def _changed(good: mesh_pb2.SignedRunCredential, **values: Any) -> mesh_pb2.SignedRunCredential:
    bad = mesh_pb2.SignedRunCredential()
    bad.CopyFrom(good)
    for name, value in values.items():
        setattr(bad, name, value)
    return bad


async def test_a_wrong_credential_opens_nothing(running: Mesh, steps: Steps) -> None:
    """Mutant credential_taken_for_granted: any signature passes."""
    good = steps.good
    other = mesh_pb2.RunCredential.FromString(good.payload)
    other.tenant = "another"
    wrong = {
        "CREDENTIAL_MISSING": mesh_pb2.SignedRunCredential(),
        "CREDENTIAL_SIGNATURE": _changed(good, payload=other.SerializeToString()),
        "CREDENTIAL_UNKNOWN_KEY": _changed(good, key_id="0" * 16),
        "CREDENTIAL_EXPIRED": credential(running, age_s=CREDENTIAL_TTL_S + 10),
    }
    for reason, given in wrong.items():
        request = mesh_pb2.GenerateStepRequest(
            credential=given, request=generate_pb2.GenerateRequest(prompt="x")
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await steps.stub.GenerateStep(request, timeout=5).read()
        error = from_rpc_error(caught.value)
        assert (error.code, error.reason) == (Code.UNAUTHENTICATED, reason)
        embed = mesh_pb2.EmbedStepRequest(
            credential=given, request=generate_pb2.EmbedRequest(texts=["x"])
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await steps.stub.EmbedStep(embed, timeout=5)
        assert from_rpc_error(caught.value).reason == reason
    gone = await steps.refused(credential(running, "nobody"))
    assert (gone.code, gone.reason) == (Code.PERMISSION_DENIED, "RUN_NOT_PERMITTED")


async def test_wrong_fields_are_named_as_the_public_service_names_them(steps: Steps) -> None:
    error = await steps.refused(sampling={"temperature": 9.0})
    assert [one.field for one in error.fields] == ["sampling.temperature"]
    error = await steps.refused(request_id="no id")
    assert [one.field for one in error.fields] == ["request_id"]


async def test_a_cancelled_step_stops_its_engine(running: Mesh, steps: Steps) -> None:
    call = steps.start(sampling=LONG)
    with ending(call):
        await call.read()
        await call.read()
        assert running.in_engine("sim-0") == 1
    took_s = await eventually(lambda: running.in_engine("sim-0") == 0, "the engine is idle")
    assert took_s < 1.0


async def test_what_is_left_to_the_run_ends_a_step(running: Mesh, steps: Steps) -> None:
    begin = time.monotonic()
    error = await steps.refused(remaining_s=1, sampling=LONG)
    assert error.code is Code.DEADLINE_EXCEEDED
    assert 0.9 < time.monotonic() - begin < 3.0
    await eventually(lambda: running.in_engine("sim-0") == 0, "the engine is idle")


async def test_steps_are_charged_and_refused_as_requests_are(running: Mesh) -> None:
    who = quota_mesh.tenant(running, requests_per_min=3)
    async with steps_of(running, credential(running, who.name)) as steps:
        sampling = {"max_tokens": 5, "ignore_eos": True}
        for _ in range(3):
            await steps.generate(**TOKENS, sampling=sampling)
        error = await steps.refused(**TOKENS, sampling=sampling)
        while (
            error.reason == "QUOTA_UNREACHABLE"
        ):  # a machine that stood still: the answer was late
            error = await steps.refused(**TOKENS, sampling=sampling)
    assert (error.code, error.reason) == (Code.RESOURCE_EXHAUSTED, "QUOTA_EXCEEDED")
    assert error.retry_after_s is not None
    assert error.quotas[0].subject == f"tenant:{who.name}"

    def told() -> bool:
        used = quota_mesh.usage(running, who)
        return (used.requests["finished"], used.requests["quota_exceeded"]) == (3, 1)

    running.until(told, "the usage is told", 5.0)
    used = quota_mesh.usage(running, who)
    assert (used.prompt_tokens, used.completion_tokens) == (30, 15)
    assert used.cost == pytest.approx((30 * 10 + 15 * 100) / 1e6)


async def test_many_steps_of_many_runs_share_the_queue_with_direct_requests(
    running: Mesh, client: MeshClient, steps: Steps
) -> None:
    sampling = {"max_tokens": 5, "ignore_eos": True}
    both = [partial(steps.generate, sampling=sampling)] * 20
    answers = await asyncio.gather(
        *(ask() for ask in both), *(client.text(sampling=sampling) for _ in range(20))
    )
    assert len(answers) == 40
