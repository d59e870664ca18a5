"""What a whole mesh says of its requests: traces and metrics at a real collector.

Goal: every request is exactly one trace, from Envoy's root over scheduler
and relay to the engine, each span under its right parent: also when two starts share a frame, over
HTTP, for embeddings, after a failed attempt, when cancelled, when refused. What is not sampled
leaves no span and is passed on. Counts are exact. Nothing that a client wrote, no answer and no key
is in any of it. Cancelling works alike with tracing on (here) and off (test_mesh_cancel.py).
Method: real processes export to a real OTLP receiver; between scheduler and execution sits a tap
that passes bytes on and reads the starts in them. Two starts come to share a frame because both
wait for KV memory that one request holds. Oracle: ids and parents as exported; what the client was
told; the frames that the tap saw.

Seen to fail on mutants: `FrameStream._start` tracing under the first start's traceparent of a
frame; `InstanceLink._trace` not putting its span into the start; `SchedulerMetrics.refused` without
a span; `Gate._dispatch` without the traceparent; an attribute of the request's span with
what the client wrote; `SchedulerMetrics.ended` counting twice.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
import pytest_asyncio

from sluice import telemetry_names as names
from sluice.common.v1 import policy_pb2
from sluice.errors import SluiceError
from sluice.scheduler.v1 import generate_pb2
from sluice.status import from_rpc_error
from tests.hermetic.execution_tap import Tap, tapped
from tests.hermetic.mesh import Mesh, Shape, mesh
from tests.hermetic.mesh_client import MeshClient, client_of, collect, eventually, fresh_id, sim
from tests.otlp_receiver import OtlpReceiver, Span, otlp_receiver

ABORT_LIMIT_S = 3.0  # an output that is not aborted takes longer
CANARY = "canary-6d1f"
TELEMETRY: Mapping[str, Any] = {"trace_sample_ratio": 1.0, "metric_interval_s": 1.0}
KV = 1024  # tokens of `pair-0`
# Envoy keeps spans for 5 s otherwise.
PROMPT_EXPORT = (
    "\n      tracing.opentelemetry.flush_interval_ms: 100"
    "\n      tracing.opentelemetry.min_flush_spans: 1"
)
RUNTIME_LINE = "\n      http.max_requests_per_io_cycle: 32"

_ids = itertools.count(1)


@dataclass
class Traced:
    """A mesh that exports everything, and where it goes."""

    mesh: Mesh
    receiver: OtlpReceiver
    tap: Tap

    def trace_of(self, request_id: str) -> str:
        """The trace of a request; waits for its span."""

        def found() -> list[Span]:
            attribute = names.ATTR_REQUEST_ID
            return [
                span
                for span in self.receiver.spans()
                if span.name == names.SPAN_REQUEST and span.attributes.get(attribute) == request_id
            ]

        self.receiver.until(found, f"a span of request {request_id}")
        return found()[0].trace_id

    def is_tree(self, trace_id: str, *expected: tuple[str, ...]) -> None:
        """Waits until the trace is made of these paths of span names from its root and of no
        others. What has no parent in the trace, but is not the edge's, begins with "?"."""
        wanted = sorted(expected)
        self.receiver.until(
            lambda: self._paths(trace_id) == wanted, f"{trace_id} with {len(wanted)} spans"
        )

    def _paths(self, trace_id: str) -> list[tuple[str, ...]]:
        spans = {span.span_id: span for span in self.receiver.spans(trace_id)}

        def path(span: Span) -> tuple[str, ...]:
            label = "edge" if span.service == "envoy" else span.name
            above = spans.get(span.parent_id)
            if above is not None:
                return (*path(above), label)
            return (label,) if label == "edge" else ("?", label)

        return sorted(path(span) for span in spans.values())

    def root(self, trace_id: str) -> Span:
        return self.named(trace_id, "envoy")[0]

    def named(self, trace_id: str, what: str) -> list[Span]:
        """Spans of a trace by name or service."""
        spans = self.receiver.spans(trace_id)
        return [span for span in spans if what in (span.name, span.service)]


REQUEST = ("edge", names.SPAN_REQUEST)
QUEUE = (*REQUEST, names.SPAN_QUEUE)
RELAY = (*REQUEST, names.SPAN_RELAY)
GENERATE = (*RELAY, names.SPAN_GENERATE)
AT_ONCE = [("edge",), REQUEST]
WHOLE = [*AT_ONCE, QUEUE, RELAY, GENERATE]


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    tap = Tap()
    pair = {
        "model": "pair",
        "kv_tokens": KV,
        "context_tokens": KV,
        "embedding_dimensions": 8,
        "prefix_cache": False,
    }
    with otlp_receiver() as receiver, tapped(tap):
        shape = Shape(
            instances={"sim-0": {}, "sim-1": {}, "pair-0": pair},
            scheduler={"executions": [tap.address], "default_model": "sim"},
            mesh={**TELEMETRY, "otlp_endpoint": receiver.endpoint},
        )
        folder = tmp_path_factory.mktemp("traced")
        with mesh(folder, shape, absent=["envoy"]) as made:
            tap.channel = grpc.insecure_channel(made["execution-0"].address)
            settings = made.folder / "envoy.yaml"
            text = settings.read_text()
            assert text.count(RUNTIME_LINE) == 1
            settings.write_text(text.replace(RUNTIME_LINE, RUNTIME_LINE + PROMPT_EXPORT))
            made["envoy"].start()
            made.until_ready()
            yield Traced(made, receiver, tap)


@pytest_asyncio.fixture
async def client(traced: Traced) -> AsyncIterator[MeshClient]:
    async with client_of(traced.mesh) as made:
        yield made
    traced.mesh.until_idle()


def traceparent(flags: str = "01") -> tuple[str, str]:
    """A caller's trace id and traceparent, whose span is "5a" * 8."""
    trace_id = f"{next(_ids):032x}"
    return trace_id, f"00-{trace_id}-{'5a' * 8}-{flags}"


def start(client: MeshClient, *metadata: tuple[str, str], **fields: Any) -> Any:
    """A Generate with the caller's own metadata."""
    if not {"token_ids", "messages"} & fields.keys():
        fields = {"prompt": CANARY} | fields
    return client.stub.Generate(
        generate_pb2.GenerateRequest(**fields),
        metadata=(*client.mesh.metadata, *metadata),
        timeout=20,
    )


async def test_two_requests_whose_starts_share_a_frame_are_two_whole_traces(
    client: MeshClient, traced: Traced
) -> None:
    """One brings its caller's trace, the other begins one."""
    holder = start(client, model="pair", token_ids=[65] * 900, sampling={"max_tokens": 120})
    assert (await holder.read()).HasField("started")
    ours, parent = traceparent()
    ids = [fresh_id("frame"), fresh_id("frame")]
    fields = {"model": "pair", "token_ids": [66] * 100, "sampling": {"max_tokens": 40}}
    calls = [
        start(client, ("traceparent", parent), request_id=ids[0], **fields),
        start(client, request_id=ids[1], **fields),
    ]
    answers = [asyncio.ensure_future(collect(call)) for call in calls]
    await eventually(lambda: traced.mesh.waiting() == 2, "both wait for memory")
    holder.cancel()
    for answer in await asyncio.gather(*answers):
        assert answer.ok.finished.usage.completion_tokens == 40

    (first,), (second,) = (traced.tap.starts[request_id] for request_id in ids)
    assert first[0] == second[0], "they did not share a frame"
    assert first[1].slot != second[1].slot

    traces = [traced.trace_of(request_id) for request_id in ids]
    assert traces[0] == ours
    assert traces[1] != ours
    for trace_id, request_id, (_, told) in zip(traces, ids, (first, second), strict=True):
        traced.is_tree(trace_id, *WHOLE)
        (relay,) = traced.named(trace_id, names.SPAN_RELAY)
        (engine,) = traced.named(trace_id, names.SPAN_GENERATE)
        (request,) = traced.named(trace_id, names.SPAN_REQUEST)
        assert told.traceparent == f"00-{trace_id}-{request.span_id}-01"
        for span in (request, relay, engine):
            assert span.attributes[names.ATTR_REQUEST_ID] == request_id
            assert span.attributes[names.ATTR_INSTANCE] == "pair-0"
            assert not span.failed
        assert relay.attributes[names.ATTR_FRAME] == first[0]
        assert engine.attributes[names.ATTR_OUTPUT_TOKENS] == 40
        assert request.attributes[names.ATTR_SIMULATED] is True
        assert request.start_ns <= relay.start_ns <= engine.start_ns < engine.end_ns
    assert traced.root(traces[0]).parent_id == "5a" * 8, "the caller's span is the parent"
    assert traced.root(traces[1]).parent_id == ""
    one, two = (traced.named(trace_id, names.SPAN_GENERATE)[0] for trace_id in traces)
    assert one.attributes[names.ATTR_FRAME] == two.attributes[names.ATTR_FRAME]
    assert max(one.start_ns, two.start_ns) < min(one.end_ns, two.end_ns), "one after the other"


@pytest.mark.parametrize("path", ["/chat", "/v1/generate"])
async def test_a_call_over_http_is_one_trace(client: MeshClient, traced: Traced, path: str) -> None:
    trace_id, parent = traceparent()
    body = {"prompt": CANARY, "sampling": {"max_tokens": 4}}
    response = await client.http.post(path, json=body, headers={"traceparent": parent})
    assert response.status_code == 200
    traced.is_tree(trace_id, *WHOLE)
    assert traced.root(trace_id).parent_id == "5a" * 8


async def test_an_embedding_is_one_trace(client: MeshClient, traced: Traced) -> None:
    trace_id, parent = traceparent()
    await client.stub.Embed(
        generate_pb2.EmbedRequest(model="pair", texts=[CANARY]),
        metadata=(*client.mesh.metadata, ("traceparent", parent)),
        timeout=20,
    )
    execute = (*REQUEST, names.SPAN_EXECUTE)
    expected = [("edge",), REQUEST, QUEUE, execute, (*execute, names.SPAN_EMBED)]
    traced.is_tree(trace_id, *expected)


async def test_a_request_that_is_placed_again_stays_one_trace(
    client: MeshClient, traced: Traced
) -> None:
    traced.mesh.faults({"fail_after": 0, "request_id": "again-*"}, on=["sim-0"])
    # Four at once: least-work placement spreads them over both instances.
    for _ in range(5):
        contexts = [traceparent() for _ in range(4)]
        calls = [
            start(client, ("traceparent", parent), request_id=fresh_id("again"))
            for _, parent in contexts
        ]
        answers = await asyncio.gather(*(collect(call) for call in calls))
        again = [
            trace_id
            for (trace_id, _), answer in zip(contexts, answers, strict=True)
            if answer.ok.finished.attempts == 2
        ]
        if again:
            trace_id = again[0]
            break
    else:
        pytest.fail("20 requests never met the instance that fails")
    traced.is_tree(trace_id, *WHOLE, RELAY, GENERATE)
    relays = traced.named(trace_id, names.SPAN_RELAY)
    engines = traced.named(trace_id, names.SPAN_GENERATE)
    assert [(span.failed, span.attributes[names.ATTR_INSTANCE]) for span in relays] == [
        (True, "sim-0"),
        (False, "sim-1"),
    ]
    assert [span.failed for span in engines] == [True, False]
    (request,) = traced.named(trace_id, names.SPAN_REQUEST)
    assert not request.failed
    assert request.attributes[names.ATTR_ATTEMPTS] == 2


async def test_a_cancelled_request_is_traced_as_far_as_it_came(
    client: MeshClient, traced: Traced
) -> None:
    trace_id, parent = traceparent()
    fields = {"model": "pair", "token_ids": [65] * 900, "sampling": {"max_tokens": 120}}
    running = start(client, ("traceparent", parent), **fields)
    for _ in range(2):
        await running.read()
    waiting_id, waiting_parent = traceparent()
    waiting = start(client, ("traceparent", waiting_parent), **fields)
    await eventually(lambda: traced.mesh.waiting() == 1, "the second waits")
    waiting.cancel()
    await eventually(lambda: traced.mesh.waiting() == 0, "the second is gone")
    running.cancel()
    traced.is_tree(trace_id, *WHOLE)
    (request,) = traced.named(trace_id, names.SPAN_REQUEST)
    assert (request.error, request.failed) == ("CANCELLED", True)
    assert request.attributes[names.ATTR_OUTCOME] == "cancelled"
    (engine,) = traced.named(trace_id, names.SPAN_GENERATE)
    assert engine.attributes[names.ATTR_FINISH_REASONS] == "cancelled"
    traced.is_tree(waiting_id, ("edge",), REQUEST, QUEUE)
    (request,) = traced.named(waiting_id, names.SPAN_REQUEST)
    assert request.error == "CANCELLED"


@pytest.mark.parametrize(
    ("fields", "reason", "expected"),
    [
        ({"request_id": "no spaces, please"}, "INVALID_FIELD", AT_ONCE),
        ({"model": "absent"}, "MODEL_UNKNOWN", AT_ONCE),
        ({"sampling": {"temperature": 9.0}}, "INVALID_FIELD", AT_ONCE),
        ({"messages": [{"role": "boss"}]}, "INVALID_FIELD", AT_ONCE),
        (
            {
                "messages": [{"role": "user", "content": "x"}],
                "tools": [{"name": "t", "parameters_json": "no JSON"}],
            },
            "INVALID_FIELD",
            [*AT_ONCE, QUEUE, RELAY],
        ),
        ({"model": "pair", "token_ids": [65] * (KV + 1)}, "CONTEXT_LENGTH_EXCEEDED", WHOLE),
        (
            {"prompt": sim(CANARY, hang_after=0), "first_token_limit": {"nanos": 200_000_000}},
            "FIRST_TOKEN_TIMEOUT",
            WHOLE,
        ),
    ],
    ids=[
        "wrong",
        "no such model",
        "out of range",
        "no such role",
        "wrong to the engine",
        "too long",
        "too late",
    ],
)
async def test_a_refused_request_is_traced_with_the_reason_that_the_client_hears(
    client: MeshClient,
    traced: Traced,
    fields: dict[str, Any],
    reason: str,
    expected: list[tuple[str, ...]],
) -> None:
    trace_id, parent = traceparent()
    answer = await collect(start(client, ("traceparent", parent), **fields))
    assert answer.refused.reason == reason
    traced.is_tree(trace_id, *expected)
    (request,) = traced.named(trace_id, names.SPAN_REQUEST)
    assert (request.error, request.failed) == (reason, True)


async def test_what_is_not_sampled_leaves_no_span_and_is_passed_on(
    client: MeshClient, traced: Traced
) -> None:
    trace_id, parent = traceparent("00")
    request_id = fresh_id("unsampled")
    call = start(
        client,
        ("traceparent", parent),
        ("tracestate", "vendor=abc"),
        request_id=request_id,
        sampling={"max_tokens": 4},
    )
    (await collect(call)).ok.check()
    ((_, told),) = traced.tap.starts[request_id]
    assert told.traceparent.startswith(f"00-{trace_id}-")
    assert told.traceparent.endswith("-00")
    assert told.tracestate == "vendor=abc"
    # What came later is there, from every process.
    later, parent = traceparent()
    (await collect(start(client, ("traceparent", parent)))).ok.check()
    traced.is_tree(later, *WHOLE)
    assert traced.receiver.spans(trace_id) == []


async def wrong_key(client: MeshClient, parent: str) -> SluiceError:
    """A request under a key that nobody has."""
    metadata = (("authorization", f"Bearer {CANARY}"), ("traceparent", parent))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.stub.GenerateText(
            generate_pb2.GenerateTextRequest(prompt=CANARY), metadata=metadata, timeout=20
        )
    return from_rpc_error(caught.value)


async def test_requests_are_counted_once_by_class_and_outcome(
    client: MeshClient, traced: Traced
) -> None:
    """No other test uses the class batch or an unknown key."""
    batch: dict[str, Any] = {"priority_class": policy_pb2.PRIORITY_CLASS_BATCH}
    sampling = {"max_tokens": 6}
    finished = [
        await client.generate(CANARY, sampling=sampling, **batch),
        await client.generate(CANARY, sampling=sampling, **batch),
    ]
    await client.text(CANARY, sampling=sampling, **batch)
    refused = await client.generate(model="pair", token_ids=[65] * (KV + 1), **batch)
    assert refused.refused.reason == "CONTEXT_LENGTH_EXCEEDED"
    leaving = client.start(CANARY, sampling={"max_tokens": 3000}, **batch)
    for _ in range(2):
        await leaving.read()
    leaving.cancel()
    for _ in range(2):
        trace_id, parent = traceparent()
        assert (await wrong_key(client, parent)).reason == "KEY_UNKNOWN"
    traced.is_tree(trace_id, *AT_ONCE)
    assert traced.named(trace_id, names.SPAN_REQUEST)[0].error == "KEY_UNKNOWN"
    await eventually(lambda: not traced.mesh.leftovers(), "the cancelled one is over")

    receiver = traced.receiver

    def counted() -> dict[str, float]:
        outcomes = ("finished", "cancelled", "invalid")
        by_outcome = {
            outcome: receiver.sum(
                "scheduler", names.REQUESTS.name, **{"class": "batch", "outcome": outcome}
            ).value
            for outcome in outcomes
        }
        strangers = receiver.sum("scheduler", names.REQUESTS.name, outcome="unauthenticated")
        return by_outcome | {"strangers": strangers.value}

    expected = {"finished": 3, "cancelled": 1, "invalid": 1, "strangers": 2}
    receiver.until(lambda: counted() == expected, f"{expected}, not {counted()}")
    label = {"class": "batch"}
    # Three that finished and the one that left after its first token.
    first_token = receiver.sum("scheduler", names.TTFT.name, **label)
    assert first_token.value == 4
    assert first_token.total < sum(
        receiver.sum("scheduler", names.REQUEST_TIME.name, **label, outcome=outcome).total
        for outcome in ("finished", "cancelled")
    )
    assert receiver.sum("scheduler", names.TPOT.name, **label).value >= 3
    assert receiver.sum("scheduler", names.REQUEST_TIME.name, **label).value == 5
    assert receiver.sum("scheduler", names.QUEUE_TIME.name, **label).value == 5
    assert all(answer.ok.finished.usage.completion_tokens == 6 for answer in finished)


async def test_what_the_services_count_agrees(client: MeshClient, traced: Traced) -> None:
    """Tokens as delivered are those that the engines made, once nothing runs; series of an instance
    and of a replica are told apart."""
    await client.text(CANARY, sampling={"max_tokens": 20})
    receiver = traced.receiver
    accepted = {"result": "accepted"}
    receiver.until(
        lambda: (
            receiver.sum("inference", names.STARTS.name, **accepted).value
            and receiver.sum("scheduler", names.TENANT_TOKENS.name, direction="output").value >= 20
            and receiver.sum("inference", names.ENGINE_TOKENS.name, direction="output").value >= 20
            and receiver.sum("execution", names.FRAMES.name).value
        ),
        "counts of every service",
    )
    assert {span.instance for span in receiver.spans() if span.service == "inference"} >= {
        "pair-0",
        "sim-1",
    }
    for service in ("scheduler", "execution", "inference"):
        assert receiver.sum(service, names.HEALTH.name).value >= 1


LEAVING = pytest.mark.parametrize("how", ["stream", "text", "embed in the queue"])


@LEAVING
@pytest.mark.parametrize("flags", ["01", "00"], ids=["traced", "not traced"])
async def test_a_cancel_reaches_the_engine_whether_traced_or_not(
    client: MeshClient, traced: Traced, flags: str, how: str
) -> None:
    """Without any collector: test_mesh_cancel.py."""
    metadata = (*client.mesh.metadata, ("traceparent", traceparent(flags)[1]))
    fields: dict[str, Any] = {"prompt": CANARY, "sampling": {"max_tokens": 4000}}
    call: Any
    if how == "stream":
        call = client.stub.Generate(generate_pb2.GenerateRequest(**fields), metadata=metadata)
        await call.read()
    elif how == "text":
        call = client.stub.GenerateText(
            generate_pb2.GenerateTextRequest(**fields), metadata=metadata
        )
    else:
        call = client.stub.Embed(
            generate_pb2.EmbedRequest(model="pair", texts=["x " * 2000]), metadata=metadata
        )
    if how != "embed in the queue":
        await eventually(lambda: traced.mesh.in_engine() == 1, "the engine works")
    call.cancel()
    await eventually(lambda: not traced.mesh.leftovers(), "all is free", ABORT_LIMIT_S)


def test_names_and_labels_are_those_of_the_registry(traced: Traced) -> None:
    """Runs after the tests above, on all that they caused."""
    receiver = traced.receiver
    receiver.until(lambda: receiver.metric_names(), "metrics")
    assert receiver.metric_names() <= set(names.METRICS)
    for name, labels in receiver.series():
        assert labels == set(names.METRICS[name].labels), name
    attributes = {value for key, value in vars(names).items() if key.startswith("ATTR_")}
    for span in receiver.spans():
        if span.service != "envoy":
            assert span.name in names.SPANS
            assert span.attributes.keys() <= attributes, span


def test_nothing_that_a_client_wrote_and_no_key_is_in_telemetry_or_logs(traced: Traced) -> None:
    """Every prompt, an unknown key and a query above held the canary."""
    url = f"{traced.mesh.url}/v1/models"
    answer = httpx.get(url, params={"q": CANARY}, headers=traced.mesh.headers, trust_env=False)
    assert answer.status_code == 400
    calls = traced.receiver.calls
    traced.receiver.until(lambda: traced.receiver.calls >= calls + 6, "the exports after that")
    logs = "".join(process.text() for process in traced.mesh.processes.values())
    for secret in (CANARY, traced.mesh.api_key, traced.mesh.admin_key, "<user>: "):
        assert not traced.receiver.contains(secret), secret
        assert secret not in logs, secret
