"""What must hold of every acknowledged run, whatever was killed when. Each function says what is
wrong; nothing said: all is well."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sluice.scheduler.v1 import runs_pb2
from tests.robustness.chaos.effects import Effects
from tests.robustness.chaos.orders import STEPS, Order


def judge(order: Order, run: runs_pb2.Run, effects: Effects) -> Iterator[str]:
    """An order whose run was acknowledged and then left to itself until it ended."""
    events = [order.events[number] for number in sorted(order.events)]
    for problem in (*_history(order, events), *_effects(order, effects), *_account(run, events)):
        yield f"{order.name} ({order.run_id}): {problem}"


def _history(order: Order, events: Sequence[runs_pb2.RunEvent]) -> Iterator[str]:
    numbers = [event.sequence for event in events]
    if numbers != list(range(1, len(numbers) + 1)):
        yield f"its events are numbered {numbers}"
    kinds = [event.WhichOneof("kind") for event in events]
    if kinds.count("ended") != 1 or kinds[-1] != "ended":
        yield f"it did not end exactly once, last: {kinds}"
        return
    ended = events[-1].ended
    if ended.state != runs_pb2.RUN_STATE_SUCCEEDED or ended.answer != order.answer:
        yield f"it ended with {ended}".replace("\n", " ")
    steps = [event.model_step for event in events if event.HasField("model_step")]
    if len(steps) != STEPS or any(step.problem for step in steps):
        yield f"it has {len(steps)} model steps, problems: {[step.problem for step in steps]}"
    yield from _calls(events)


def _calls(events: Sequence[runs_pb2.RunEvent]) -> Iterator[str]:
    """A call has one start and one end under its key; a key belongs to one call."""
    started = [event.tool_call_started for event in events if event.HasField("tool_call_started")]
    ended = [event.tool_call_ended.call_id for event in events if event.HasField("tool_call_ended")]
    keys = {call.idempotency_key for call in started}
    if len(keys) != STEPS - 1 or "" in keys:
        yield f"its calls have the keys {sorted(keys)}"
    if len(set(ended)) != len(ended) or len(ended) != STEPS - 1:
        yield f"its calls ended as {ended}"


def _effects(order: Order, effects: Effects) -> Iterator[str]:
    for charge in order.charges:
        if (times := effects.charged(charge)) != 1:
            yield f"{charge} was charged {times} times"
    if (times := effects.mailed(order.name)) != 1:
        yield f"its mail was sent {times} times; decided: {order.decided}"


def _account(run: runs_pb2.Run, events: Sequence[runs_pb2.RunEvent]) -> Iterator[str]:
    steps = [event.model_step for event in events if event.HasField("model_step")]
    for field in ("prompt_tokens", "completion_tokens"):
        told, summed = getattr(run.usage, field), sum(getattr(one.usage, field) for one in steps)
        if told != summed:
            yield f"its {field} are {told}, those of its steps {summed}"
    if run.steps < len(steps) or run.tool_calls != STEPS - 1:
        yield f"it counts {run.steps} steps and {run.tool_calls} calls"
