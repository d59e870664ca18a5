"""Live requests: joining, flushing and the one end, under virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

import pytest

from scheduler_svc.adapters import live_request
from scheduler_svc.adapters.answers import deltas_due, finished
from scheduler_svc.adapters.live_request import TEXT_CHARS_MAX, LiveRequest
from scheduler_svc.domain.flush import FlushBudget
from scheduler_svc.domain.model import InstanceName, Outcome, PriorityClass, Ticket, TicketId
from sluice.common.v1 import result_pb2
from sluice.errors import internal
from sluice.inference.v1 import inference_pb2

Run = Callable[[Coroutine[object, object, None]], None]


def make_live(*, streams: int = 1, whole: bool = False, n: int = 1) -> LiveRequest:
    flush = FlushBudget(write_cost_s=0.001, write_share=0.5)
    for _ in range(streams - 1):  # the live request itself is one more
        flush.begin(PriorityClass.STANDARD)
    ticket = Ticket(
        id=TicketId(1),
        request_id="r1",
        tenant="dev",
        model="m",
        priority_class=PriorityClass.STANDARD,
        arrival_s=0.0,
        deadline_s=100.0,
        first_token_limit_s=100.0,
        prompt_tokens=1,
        output_tokens=1,
        size_bytes=1,
    )
    work = inference_pb2.Work(request_id="r1")
    work.sampling.n = n
    live = LiveRequest(
        ticket, work, flush, loop=asyncio.get_running_loop(), whole=whole, want_token_ids=True
    )
    live.dispatched(InstanceName("chat-0"), 1, asyncio.get_running_loop().time(), lambda _: None)
    return live


def delta(position: int, text: str = "a", index: int = 0) -> inference_pb2.Delta:
    return inference_pb2.Delta(text=text, token_ids=[7], position=position, index=index)


def test_the_first_token_is_due_at_once_and_the_next_after_the_flush_interval(
    run_virtual: Run,
) -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        live = make_live(streams=50)  # 50 * 1 ms / 0.5 = 100 ms between flushes
        began = loop.time()
        assert live.append(delta(0), loop.time())
        await live.ready()
        assert loop.time() == began
        assert [m.delta.text for m in deltas_due(live)] == ["a"]
        live.flushed(loop.time())
        waiting = asyncio.ensure_future(live.ready())
        await asyncio.sleep(0.01)
        for position in (1, 2, 3):
            live.append(delta(position), loop.time())
        await waiting
        assert abs(loop.time() - began - 0.1) < 1e-6
        (message,) = deltas_due(live)
        assert (message.delta.text, message.delta.position) == ("aaa", 1)
        assert list(message.delta.token_ids) == [7, 7, 7]

    run_virtual(scenario())


def test_who_wants_few_messages_gets_no_more(run_virtual: Run) -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        live = make_live(streams=1)  # 1 ms / 0.5 = 2 ms between flushes
        live.flush_min_s = 0.03
        live.append(delta(0), loop.time())
        await live.ready()
        deltas_due(live)
        began = loop.time()
        live.flushed(began)
        live.append(delta(1), loop.time())
        await live.ready()
        assert abs(loop.time() - began - 0.03) < 1e-6

    run_virtual(scenario())


def test_an_end_is_due_at_once_with_what_was_left(run_virtual: Run) -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        live = make_live(streams=200)
        live.append(delta(0), loop.time())
        deltas_due(live)
        live.flushed(loop.time())
        live.append(delta(1), loop.time())
        began = loop.time()
        waiting = asyncio.ensure_future(live.ready())
        await asyncio.sleep(0.001)
        ended = inference_pb2.Ended()
        ended.outputs.add(finish_reason=result_pb2.FINISH_REASON_LENGTH)
        ended.usage.completion_tokens = 2
        live.end(ended)
        await waiting
        assert loop.time() - began < 0.01
        assert [m.delta.text for m in deltas_due(live)] == ["a"]
        message = finished(live, loop.time())
        assert message.finished.usage.completion_tokens == 2
        assert message.finished.timings.per_output_token.nanos >= 0

    run_virtual(scenario())


def test_a_gap_an_overlap_and_an_unknown_output_do_not_fit(run_virtual: Run) -> None:
    async def scenario() -> None:
        now = asyncio.get_running_loop().time()
        live = make_live()
        assert live.append(delta(0), now)
        assert not live.append(delta(2), now)
        assert not live.append(delta(0), now)
        assert not live.append(delta(0, index=1), now)
        assert live.append(delta(1), now)

    run_virtual(scenario())


def test_outputs_of_one_request_are_joined_apart(run_virtual: Run) -> None:
    async def scenario() -> None:
        now = asyncio.get_running_loop().time()
        live = make_live(n=2)
        live.append(delta(0, "a", 0), now)
        live.append(delta(0, "b", 1), now)
        live.append(delta(1, "c", 1), now)
        assert [(m.delta.index, m.delta.text) for m in deltas_due(live)] == [(0, "a"), (1, "bc")]

    run_virtual(scenario())


def test_an_unread_buffer_over_the_bound_ends_the_request_as_slow_consumer(
    run_virtual: Run,
) -> None:
    async def scenario() -> None:
        now = asyncio.get_running_loop().time()
        live = make_live()
        full = "x" * live_request.STREAM_BUFFER_CHARS_MAX
        assert live.append(delta(0, full), now)
        assert not live.over
        assert live.append(delta(1, "x"), now)
        assert live.outcome is Outcome.SLOW_CONSUMER
        assert live.error is not None and live.error.reason == "SLOW_CONSUMER"

    run_virtual(scenario())


def test_a_request_ends_once(run_virtual: Run) -> None:
    async def scenario() -> None:
        live = make_live()
        live.end(inference_pb2.Ended())
        live.fail(internal("r1"), Outcome.INTERNAL)
        assert live.error is None
        other = make_live()
        other.fail(internal("r1"), Outcome.INTERNAL)
        other.end(inference_pb2.Ended())
        assert other.ended is None

    run_virtual(scenario())


def test_a_whole_answer_waits_for_its_end_only(run_virtual: Run) -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        live = make_live(whole=True)
        waiting = asyncio.ensure_future(live.finished())
        for position in range(10):
            live.append(delta(position), loop.time())
            await asyncio.sleep(0.1)
        assert not waiting.done()
        live.end(inference_pb2.Ended())
        await waiting
        assert "".join(live.outputs[0].parts) == "a" * 10

    run_virtual(scenario())


@pytest.mark.parametrize("beside", ["token_ids", "logprobs"])
def test_a_whole_answer_is_bounded_with_what_it_carries_beside_text(
    run_virtual: Run, beside: str
) -> None:
    async def scenario() -> None:
        live = make_live(whole=True)
        live.want_token_ids = beside == "token_ids"
        piece = inference_pb2.Delta(token_ids=[7] * 1000)
        if beside == "logprobs":
            entry = result_pb2.TokenLogprob(token=b"x" * 100)
            piece.logprobs.extend([entry] * 100)
        while not live.over and piece.position < 2 * TEXT_CHARS_MAX:
            live.append(piece, 1.0)
            piece.position += 1000
        assert live.error is not None
        assert live.error.reason == "OUTPUT_TOO_LARGE"
        answer = sum(output.tokens for output in live.outputs) if live.want_token_ids else 0
        answer += sum(entry.ByteSize() for output in live.outputs for entry in output.logprobs)
        assert answer <= 4 * TEXT_CHARS_MAX + 20_000

    run_virtual(scenario())


def test_the_first_token_is_reported_once(run_virtual: Run) -> None:
    async def scenario() -> None:
        now = asyncio.get_running_loop().time()
        live = make_live()
        heard: list[LiveRequest] = []
        live.dispatched(InstanceName("chat-0"), 1, now, heard.append)
        live.append(delta(0), now + 1)
        live.append(delta(1), now + 2)
        assert heard == [live]
        assert live.first_token_s == now + 1

    run_virtual(scenario())
