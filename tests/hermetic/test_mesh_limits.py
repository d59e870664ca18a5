"""Bounds of the whole mesh: sizes at the limit and one beyond, full queues, slow clients.

Goal: at a limit a request is served, one beyond it is refused with a typed error that names it, and
what a client does to itself harms nobody else. Method: one mesh with an engine
of one sequence (`sim`), an engine with a context of millions of tokens (`wide`), a fast one
(`fast`) and an embedding model with long vectors. Oracle: the named limits, and that all is free
afterwards.

Seen to fail on the mutants in tests/mutants: first_come_first_served, prompt_limit_off_by_one,
slow_client_hears_cancelled, slow_client_holds_the_engine, whole_answer_unbounded,
write_limit_ignored.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any

import grpc.aio
import pytest
import pytest_asyncio
from google.rpc import error_details_pb2, status_pb2

from scheduler_svc.adapters.live_request import STREAM_BUFFER_CHARS_MAX, TEXT_CHARS_MAX
from scheduler_svc.adapters.translate import PROMPT_BYTES_MAX
from scheduler_svc.domain.limits import SchedulerLimits
from scheduler_svc.domain.model import PriorityClass
from sluice.common.v1 import policy_pb2, sampling_pb2
from sluice.errors import Code, SluiceError
from sluice.ids import REQUEST_ID_CHARS_MAX
from sluice.scheduler.v1 import generate_pb2
from sluice.server_limits import MESSAGE_BYTES
from sluice.status import from_rpc_error
from tests.hermetic.mesh import Mesh, Shape, mesh
from tests.hermetic.mesh_client import MeshClient, client_of, eventually, fresh_id
from tests.hermetic.raw_h2 import GENERATE, RawH2, grpc_frame

CRITICAL = policy_pb2.PRIORITY_CLASS_CRITICAL
MILLIONS = 6_000_000
ONE = {"max_tokens": 1}
SHAPE = Shape(
    instances={
        "sim-0": {"sequences_max": 1, "decode_step_ms": 10.0},
        "wide-0": {
            "model": "wide",
            "context_tokens": MILLIONS,
            "kv_tokens": 2 * MILLIONS,
            "step_tokens_max": MILLIONS,
            "prefill_tokens_per_s": 1e9,
        },
        "fast-0": {
            "model": "fast",
            "decode_step_ms": 0.5,
            "context_tokens": 200_000,
            "kv_tokens": 2_000_000,
        },
        "embed-0": {"model": "vectors", "generate": False, "embedding_dimensions": 4096},
    },
    scheduler={
        "default_model": "sim",
        # Room for the thousand streams of the full queue.
        "write_cost_us": 1.0,
        "first_token_critical_s": 600.0,
        "deadline_batch_s": 1.0,
        "write_limit_s": 2.0,
    },
)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    with mesh(tmp_path_factory.mktemp("limits"), SHAPE) as made:
        yield made


@pytest_asyncio.fixture
async def client(running: Mesh) -> AsyncIterator[MeshClient]:
    async with client_of(running) as made:
        yield made
    if not all(process.alive for process in running.processes.values()):
        running.recover()
    running.until_idle()


async def refusal(call: Any) -> SluiceError:
    """The typed error of a call that fails."""
    with pytest.raises(SluiceError) as caught:
        await call
    return caught.value


# Sizes.


async def test_a_json_body_at_the_limit_is_served(client: MeshClient, running: Mesh) -> None:
    limit = running.envoy.body_bytes_max

    def body(size: int) -> bytes:
        head = json.dumps({"model": "wide", "sampling": ONE, "text": ""}).encode()
        filled = head[:-2] + b"a" * (size - len(head)) + head[-2:]
        assert len(filled) == size
        return filled

    for size in (limit - 1, limit):
        response = await client.http.post("/chat", content=body(size))
        assert response.status_code == 200, response.text
        assert response.json()["usage"]["completion_tokens"] == 1
    over = await client.http.post("/chat", content=body(limit + 1))
    assert over.status_code == 413
    assert over.json()["details"][0]["reason"] == "BODY_TOO_LARGE"


async def test_a_prompt_at_the_limit_is_served(client: MeshClient) -> None:
    def text(size: int) -> dict[str, Any]:
        return {"model": "wide", "sampling": ONE, "text": "a" * size}

    for size in (PROMPT_BYTES_MAX - 1, PROMPT_BYTES_MAX):
        assert (await client.text(**text(size))).usage.completion_tokens == 1
    error = await refusal(client.text(**text(PROMPT_BYTES_MAX + 1)))
    assert (error.code, error.fields[0].field) == (Code.INVALID_ARGUMENT, "text")
    assert str(PROMPT_BYTES_MAX) in error.message


async def test_a_message_over_the_limit_is_refused_and_not_called_busy(client: MeshClient) -> None:
    def padded(size: int) -> generate_pb2.GenerateTextRequest:
        request = generate_pb2.GenerateTextRequest(text="a" * (size - 5))
        assert request.ByteSize() == size
        return request

    for size, reason in (
        (MESSAGE_BYTES, "INVALID_FIELD"),
        (MESSAGE_BYTES + 1, "MESSAGE_TOO_LARGE"),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.stub.GenerateText(padded(size), metadata=client.mesh.metadata, timeout=20)
        error = from_rpc_error(caught.value)
        assert (error.code, error.reason) == (Code.INVALID_ARGUMENT, reason)


@pytest.mark.parametrize("count", [255, 256])
async def test_an_answer_over_4_mib_passes_every_hop(client: MeshClient, count: int) -> None:
    response = await client.stub.Embed(
        generate_pb2.EmbedRequest(texts=["a"] * count, model="vectors"),
        metadata=client.mesh.metadata,
        timeout=30,
    )
    assert len(response.embeddings) == count
    assert (response.ByteSize() > 4 << 20) == (count == 256)


async def test_a_whole_answer_is_bounded(client: MeshClient, running: Mesh) -> None:
    share = TEXT_CHARS_MAX // 8  # of each of 8 outputs
    fits, over = fresh_id("fits"), fresh_id("over")
    cuts = list(range(8_192, share, 8_192))  # one output of the engine is 8 KiB long
    running.faults(
        {"request_id": fits, "reply": "a" * share, "reply_cuts": cuts},
        {"request_id": over, "reply": "a" * (share + 1), "reply_cuts": cuts},
        on=["fast-0"],
    )
    sampling = {"n": 8, "max_tokens": share + 9}
    answer = await client.text(model="fast", request_id=fits, sampling=sampling)
    assert sum(len(output.text) for output in answer.outputs) == TEXT_CHARS_MAX
    error = await refusal(client.text(model="fast", request_id=over, sampling=sampling))
    assert (error.code, error.reason) == (Code.RESOURCE_EXHAUSTED, "OUTPUT_TOO_LARGE")


async def test_an_identifier_at_the_limit_is_kept(client: MeshClient) -> None:
    for size in (REQUEST_ID_CHARS_MAX - 1, REQUEST_ID_CHARS_MAX):
        answer = await client.text(request_id="r" * size, sampling=ONE)
        assert answer.request_id == "r" * size
    error = await refusal(client.text(request_id="r" * (REQUEST_ID_CHARS_MAX + 1), sampling=ONE))
    assert error.fields[0].field == "request_id"
    headers = {"x-request-id": "r" * (REQUEST_ID_CHARS_MAX + 1)}
    response = await client.http.post(
        "/chat", json={"prompt": "x", "sampling": ONE}, headers=headers
    )
    # One that nobody can use is replaced, as if none had been sent.
    assert len(response.json()["request_id"]) == 36


async def test_outputs_and_tokens_at_the_limit(client: MeshClient) -> None:
    for count in (7, 8):
        answer = await client.text(model="wide", sampling={"n": count, "max_tokens": 1})
        assert len(answer.outputs) == count
    for most in (1, 2):
        answer = await client.text(sampling={"max_tokens": most})
        assert answer.usage.completion_tokens == most
    for kept in (127, 128):
        assert (await client.text(cache_salt="s" * kept, sampling=ONE)).text


async def test_a_prompt_fills_the_context_but_for_one_token(client: MeshClient) -> None:
    for prompt, tokens in ((8_190, 2), (8_191, 1)):
        answer = await client.text(token_ids=[97] * prompt, sampling={"max_tokens": 2**31 - 1})
        assert answer.usage.completion_tokens == tokens
    error = await refusal(client.text(token_ids=[97] * 8_192, sampling=ONE))
    assert error.reason == "CONTEXT_LENGTH_EXCEEDED"
    assert "8192" in error.message


# Queues. The engine of `sim` runs one sequence.


async def busy(client: MeshClient) -> Any:
    """A stream that keeps the only place of `sim` until it is cancelled."""
    call = client.start("busy", sampling={"max_tokens": 8_000}, priority_class=CRITICAL)
    await call.read()
    await call.read()
    return call


def retry_of(response: Any) -> float:
    """The delay in a JSON refusal, after checks that header and body agree."""
    details = {entry["@type"].rsplit(".", 1)[1]: entry for entry in response.json()["details"]}
    delay = float(details["RetryInfo"]["retry_delay"].rstrip("s"))
    assert int(response.headers["retry-after"]) >= delay
    return delay


async def test_a_full_queue_refuses_with_a_delay(client: MeshClient, running: Mesh) -> None:
    most = SchedulerLimits().classes[PriorityClass.CRITICAL].tenant_requests_max
    call = await busy(client)
    fields: dict[str, Any] = {"priority_class": CRITICAL, "timeout": 60.0}
    waiting = [asyncio.create_task(client.text(**fields)) for _ in range(most - 1)]
    await eventually(lambda: running.waiting() == most - 1, "one place is left")
    waiting.append(asyncio.create_task(client.text(**fields)))
    await eventually(lambda: running.waiting() == most, "the queue is full")
    error = await refusal(client.text(**fields))
    assert (error.code, error.reason) == (Code.RESOURCE_EXHAUSTED, "QUEUE_FULL")
    assert error.metadata["scope"] == "tenant"
    assert error.retry_after_s is not None
    assert 0.4 <= error.retry_after_s <= 36.0
    body = {"prompt": "x", "priority_class": "PRIORITY_CLASS_CRITICAL"}
    response = await client.http.post("/chat", json=body)
    assert response.status_code == 429
    assert retry_of(response) >= 0.4
    waiting.pop().cancel()
    await eventually(lambda: running.waiting() == most - 1, "a place is free")
    waiting.append(asyncio.create_task(client.text(**fields)))
    await eventually(lambda: running.waiting() == most, "it was taken")
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    call.cancel()


async def test_who_cannot_be_served_in_time_is_told_so(client: MeshClient, running: Mesh) -> None:
    """Too long a wait is 429 with a delay, not 500."""
    call = await busy(client)
    error = await refusal(client.text(first_token_limit={"nanos": 300_000_000}))
    assert (error.code, error.reason) == (Code.RESOURCE_EXHAUSTED, "HOPELESS")
    assert error.retry_after_s
    response = await client.http.post("/chat", json={"prompt": "x", "first_token_limit": "0.3s"})
    assert response.status_code == 429
    assert retry_of(response) > 0
    assert running.waiting() == 0
    call.cancel()


async def test_who_waits_too_long_is_told_before_the_deadline(client: MeshClient) -> None:
    """HTTP carries none, so the class's own applies: 1 s here. The queue lets go of a request when
    its first token would most likely be late: at three quarters of its time at the soonest."""
    call = await busy(client)
    body = {"prompt": "x", "priority_class": "PRIORITY_CLASS_BATCH"}
    begin = time.monotonic()
    response = await client.http.post("/chat", json=body)
    waited_s = time.monotonic() - begin
    assert response.status_code == 429
    assert response.json()["details"][0]["reason"] == "HOPELESS"
    assert retry_of(response) > 0
    assert 0.7 <= waited_s <= 2.0
    call.cancel()


async def test_a_deadline_that_passes_midway_is_an_error_and_no_short_answer(
    client: MeshClient,
) -> None:
    body = {
        "prompt": "x",
        "model": "wide",
        "priority_class": "PRIORITY_CLASS_BATCH",
        "sampling": {"max_tokens": 5_000},
    }
    response = await client.http.post("/chat", json=body)
    assert response.status_code == 504, response.text
    assert response.json()["details"][0]["reason"] == "DEADLINE_EXCEEDED"


async def test_the_earlier_deadline_goes_first(client: MeshClient, running: Mesh) -> None:
    """Deadlines order the queue of a tenant."""
    call = await busy(client)
    done: list[str] = []

    async def ask(name: str, timeout: float) -> None:
        await client.text(name, timeout=timeout, sampling=ONE)
        done.append(name)

    def waits(count: int) -> bool:
        return running.waiting() == count

    tasks = []
    for number, (name, timeout) in enumerate((("late", 25.0), ("soon", 10.0), ("middle", 18.0))):
        tasks.append(asyncio.create_task(ask(name, timeout)))
        await eventually(partial(waits, number + 1), f"{name} waits")
    call.cancel()
    await asyncio.gather(*tasks)
    assert done == ["soon", "middle", "late"]


async def test_without_an_instance_requests_are_refused_in_time(
    client: MeshClient, running: Mesh
) -> None:
    running["sim-0"].kill()
    await eventually(lambda: running.status().instances[2].state == "down", "it is down")
    assert running.status().instances[2].name == "sim-0"
    error = await refusal(client.text(first_token_limit={"nanos": 300_000_000}))
    assert (error.code, error.reason) == (Code.UNAVAILABLE, "NO_INSTANCE")
    assert error.retry_after_s
    response = await client.http.post("/chat", json={"prompt": "x", "first_token_limit": "0.3s"})
    assert response.status_code == 503
    assert retry_of(response) > 0
    listed = {
        model["name"]: model for model in (await client.http.get("/v1/models")).json()["models"]
    }
    assert listed["sim"]["available"] is False, "known, though not up"


# Clients that do not read.

# The text of a stream that is far more than all buffers between the engine and a client hold.
FLOOD = " morning" * 40_000


def stalled(running: Mesh, request_id: str) -> tuple[RawH2, int]:
    """A client whose stream window stays closed, and its stream."""
    running.faults({"request_id": request_id, "reply": FLOOD}, on=["fast-0"])
    client = RawH2(running.envoy.port, stream_window=0)
    request = generate_pb2.GenerateRequest(
        prompt="x",
        model="fast",
        request_id=request_id,
        sampling=sampling_pb2.SamplingParams(n=4, max_tokens=50_000),
    )
    headers = list(running.metadata)
    return client, client.request(GENERATE, grpc_frame(request.SerializeToString()), headers)


def reason_of(outcome: dict[str, Any]) -> str:
    """The reason in the details of a gRPC status."""
    import base64

    raw = outcome["grpc-status-details-bin"]
    status = status_pb2.Status.FromString(base64.b64decode(raw + "=" * (-len(raw) % 4)))
    info = error_details_pb2.ErrorInfo()
    status.details[0].Unpack(info)
    return info.reason


async def test_who_does_not_read_is_ended_and_harms_nobody(
    client: MeshClient, running: Mesh
) -> None:
    """The engine stops when the buffer of 64 Ki characters is full; what the client had already
    coming, it may still read, and then why it was ended. A second stream runs on meanwhile."""
    beside = asyncio.create_task(
        client.generate("beside", model="fast", sampling={"max_tokens": 4_000, "temperature": 0.0})
    )
    raw, stream = stalled(running, fresh_id("slow"))
    with raw:
        await asyncio.to_thread(raw.pump, 0.2)
        await eventually(lambda: running.in_engine("fast-0") == 5, "both run")
        await eventually(lambda: running.in_engine("fast-0") <= 1, "the slow one is stopped", 10.0)
        assert len((await beside).ok.text()) > STREAM_BUFFER_CHARS_MAX // 8
        raw.h2.increment_flow_control_window(1 << 24, stream)
        raw.flush()
        outcome = await asyncio.to_thread(raw.outcome, stream, 10.0)
    assert outcome.get("grpc-status") == "8", outcome.keys()
    assert reason_of(outcome) == "SLOW_CONSUMER"
    assert len(outcome["data"]) < len(FLOOD)
    # It was the client's doing; the instance is not blamed for it.
    assert "out of order" not in running["scheduler-0"].text()


async def test_who_never_reads_is_let_go_after_the_limit(client: MeshClient, running: Mesh) -> None:
    """A write that nobody takes for `write_limit_s` (2 s here) ends the request; nothing of it is
    held any longer, though its client is still there."""
    raw, stream = stalled(running, fresh_id("never"))
    with raw:
        await asyncio.to_thread(raw.pump, 0.2)
        await eventually(lambda: running.status().open_streams == 1, "it is open")
        await eventually(lambda: running.status().open_streams == 0, "it was let go", 8.0)
        assert running.in_engine("fast-0") == 0
        assert (await client.generate(sampling=ONE)).ok.messages
        raw.h2.increment_flow_control_window(1 << 24, stream)
        raw.flush()
        outcome = await asyncio.to_thread(raw.outcome, stream, 10.0)
    assert outcome["grpc-status"] == "8"
    assert reason_of(outcome) == "SLOW_CONSUMER"
