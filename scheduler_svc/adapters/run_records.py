"""Runs as the state service stores them and as clients see them. Stateless."""

from __future__ import annotations

import uuid
from typing import Final

from google.protobuf.message import DecodeError

from sluice.scheduler.v1 import runs_pb2
from sluice.state.v1 import runs_pb2 as stored_pb2

ANSWER_LISTED_BYTES_MAX: Final = 1024

ENDED: Final = frozenset(
    (
        stored_pb2.RUN_PHASE_SUCCEEDED,
        stored_pb2.RUN_PHASE_FAILED,
        stored_pb2.RUN_PHASE_CANCELLED,
    )
)

_RUNS: Final = uuid.UUID("3f0d7c4e-5a0b-4f4e-9f5c-0a6f4f1c9d52")


def run_id_of(tenant: str, request_id: str) -> str:
    """The run that a tenant's request starts: always the same, so that whoever asks again finds it,
    by any scheduler, whether the first answer arrived or not."""
    return str(uuid.uuid5(_RUNS, f"{tenant}\0{request_id.lower()}"))


def shown(stored: stored_pb2.StoredRun) -> runs_pb2.Run:
    """A run for its client: the agent's summary under what the state service knows better."""
    try:
        run = runs_pb2.Run.FromString(stored.summary)
    except DecodeError:  # a newer release wrote it
        run = runs_pb2.Run()
    run.run_id = stored.run_id
    run.state = stored.phase  # type: ignore[assignment]  # the numbers are the same
    run.last_sequence = stored.last_sequence
    run.session_id = stored.session_id
    run.ClearField("create_time")
    run.ClearField("end_time")
    if stored.HasField("create_time"):
        run.create_time.CopyFrom(stored.create_time)
    if stored.HasField("end_time"):
        run.end_time.CopyFrom(stored.end_time)
    return run


def listed(stored: stored_pb2.StoredRun) -> runs_pb2.Run:
    """The same with no more than the beginning of its answer."""
    run = shown(stored)
    answer = run.answer.encode()
    if len(answer) > ANSWER_LISTED_BYTES_MAX:
        run.answer = answer[:ANSWER_LISTED_BYTES_MAX].decode(errors="ignore")
    return run


def set_event(event: runs_pb2.RunEvent, run_id: str, entry: stored_pb2.RunEntry) -> None:
    """Makes a new event a durable one."""
    event.MergeFromString(entry.event)
    event.sequence = entry.sequence
    event.run_id = run_id


def set_text(
    event: runs_pb2.RunEvent, run_id: str, sequence: int, text: stored_pb2.LiveText
) -> None:
    """Makes a new event text of the running model call; ``sequence``: of the last durable one."""
    event.sequence = sequence
    event.run_id = run_id
    event.partial_text.step = text.step
    event.partial_text.text = text.text
    event.partial_text.replaces = text.replaces
    event.time.GetCurrentTime()
