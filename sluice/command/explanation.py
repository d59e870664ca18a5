"""A decision record as a story for people: why a request waited, where it landed, how it ended.

Pure: a record in, lines out. Words are fixed texts; what varies comes from the record, which holds
names, counts and times only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

from google.protobuf.duration_pb2 import Duration

from sluice.common.v1 import policy_pb2

if TYPE_CHECKING:
    from sluice.scheduler.v1 import records_pb2

FILTERS: Final[Mapping[str, str]] = {
    "model": "serve another model",
    "health": "down, starting or unreachable",
    "drain": "draining",
    "breaker": "behind an open breaker",
    "gpu_fault": "with a GPU fault",
    "stale": "with an old report",
    "excluded": "had failed this request before",
    "fingerprint": "with other weights than the output began with",
    "policy": "left out by the placement policy",
    "no_room": "without a free place",
    "no_memory": "without memory for it",
    "kept_for_others": "kept for requests before it",
}
ENDS: Final[Mapping[str, str]] = {
    "ended": "ran to its end there",
    "stopped": "was stopped there",
    "rejected": "was turned away",
    "lost": "failed there",
    "yielded": "gave its place away",
}
ADVICE: Final[Mapping[str, str]] = {
    "QUEUE_FULL": "Too many requests waited. Ask again after the delay that the refusal named.",
    "HOPELESS": "Its first token could not have come in time. A longer first_token_limit, or a"
    " higher class, lets it wait.",
    "NO_INSTANCE": "No instance served the model. `sluice status` shows which are up.",
    "QUOTA_EXCEEDED": "The tenant's quota was used up. It comes back with time.",
    "QUOTA_TOO_SMALL": "It needs more than a whole quota of the tenant: waiting does not help,"
    " a lower max_tokens may.",
    "INSTANCE_LOST": "Instances failed it. What had been delivered cannot be taken back.",
    "FIRST_TOKEN_TIMEOUT": "An instance took it and gave no first token in time.",
    "DEADLINE_EXCEEDED": "Its deadline passed.",
    "INVALID_FIELD": "The request itself was wrong; the refusal named the field.",
}


def story(record: records_pb2.DecisionRecord) -> Iterator[str]:
    """The lines."""
    yield from _head(record)
    yield ""
    way = list(_way(record))
    yield from way
    if way:
        yield ""
    yield from _end(record)


def _way(record: records_pb2.DecisionRecord) -> Iterator[str]:
    yield from _wait(record)
    for number, attempt in enumerate(record.attempts, 1):
        yield from _attempt(number, attempt)
    if record.gate_reason:
        yield f"agent path: {record.gate_reason}"


def _head(record: records_pb2.DecisionRecord) -> Iterator[str]:
    arrived = record.arrival_time.ToDatetime().isoformat(timespec="milliseconds")
    by = f" at {record.scheduler}" if record.scheduler else ""
    yield f"request {record.request_id}"
    yield f"arrived {arrived}Z{by}, tenant {record.tenant}, class {_class(record)}" + (
        f", model {record.model}" if record.model else ""
    )
    if record.run_id:
        step = f"step {record.step} of " if record.step else "a call of "
        yield f"{step}run {record.run_id}"


def _wait(record: records_pb2.DecisionRecord) -> Iterator[str]:
    if not record.model:
        return
    ahead = record.queue_position
    if ahead:
        yield f"When it was queued, about {ahead} {_plural(ahead, 'request')} went before it."
    if record.HasField("queue_time"):
        yield f"It waited {_seconds(record.queue_time)} until its last placement."


def _attempt(number: int, attempt: records_pb2.Attempt) -> Iterator[str]:
    when = f"after {_seconds(attempt.after)}"
    if not attempt.instance:
        yield f"{number}. {when}: refused."
    else:
        yield (
            f"{number}. {when}: placed on {attempt.instance}, expected to cost"
            f" {_score(attempt.score)}; {_had_room(attempt.candidate_count)}."
        )
    others = [one for one in attempt.candidates if one.instance != attempt.instance]
    for one in attempt.candidates:
        mark = ">" if one.instance == attempt.instance else " "
        parts = ", ".join(
            f"{name} {value:+.3f}" for name, value in sorted(one.parts.items()) if value
        )
        yield f"     {mark} {one.instance:<20} {_score(one.score):>10}" + (
            f"   ({parts})" if parts else ""
        )
    more = attempt.candidate_count - len(attempt.candidates)
    if others and more > 0:
        yield f"       and {more} more"
    for name, count in sorted(attempt.filtered.items(), key=lambda item: -item[1]):
        yield f"     not: {count} {FILTERS.get(name, name)}"
    if attempt.instance:
        cause = f" ({attempt.cause.replace('_', ' ')})" if attempt.cause else ""
        tokens = f", after {attempt.tokens} {_plural(attempt.tokens, 'token')}"
        yield f"   It {ENDS.get(attempt.end, attempt.end or 'ran on')}{cause}{tokens}."


def _end(record: records_pb2.DecisionRecord) -> Iterator[str]:
    outcome = policy_pb2.Outcome.Name(record.outcome).removeprefix("OUTCOME_").lower()
    reason = f" ({record.reason})" if record.reason else ""
    times = record.timings
    total = f" after {_seconds(times.total)}" if times.HasField("total") else ""
    yield f"It ended: {outcome.replace('_', ' ')}{reason}{total}."
    if record.quota:
        yield f"The quota: {record.quota}."
    if advice := ADVICE.get(record.reason):
        yield advice
    if times.HasField("first_token"):
        pace = ""
        if times.HasField("per_output_token"):
            pace = f", then a token every {times.per_output_token.ToNanoseconds() / 1e6:.1f} ms"
        yield f"First token after {_seconds(times.first_token)}{pace}."
    if record.charged:
        usage = record.usage
        cached = f" ({usage.cached_tokens} of them cached)" if usage.cached_tokens else ""
        cost = f"; cost {record.cost:.6g}" if record.cost else ""
        yield (
            f"Charged: {usage.prompt_tokens} prompt tokens{cached} and"
            f" {usage.completion_tokens} output tokens{cost}."
        )
    else:
        yield "Nothing was charged."


def _class(record: records_pb2.DecisionRecord) -> str:
    name = policy_pb2.PriorityClass.Name(record.priority_class)
    return name.removeprefix("PRIORITY_CLASS_").lower()


def _had_room(count: int) -> str:
    return "no other instance had room" if count <= 1 else f"{count} instances had room"


def _plural(count: int, word: str) -> str:
    return word if count == 1 else f"{word}s"


def _seconds(duration: Duration) -> str:
    seconds = duration.ToNanoseconds() / 1e9
    return f"{seconds * 1e3:.0f} ms" if seconds < 1.0 else f"{seconds:.2f} s"


def _score(seconds: float) -> str:
    return f"{seconds:.3f} s"
