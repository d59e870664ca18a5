"""Whatever a client sends to the methods of runs, sessions and documents, it hears a typed answer.

Goal: no message makes a handler fail by a fault of its own. Method: random messages of each
method's type, from values at the borders of their fields, through real servers. Oracle: success or
a typed error that is none of INTERNAL and UNKNOWN. Seed: 20261130, printed with what fails.
"""

from __future__ import annotations

import random
import uuid
from pathlib import Path
from typing import Any, Final

import grpc.aio
import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from sluice.scheduler.v1 import scheduler_pb2
from sluice.status import from_rpc_error
from tests.contract.scheduler_rig import Rig, read_all, scheduler_rig

SEED: Final = 20_261_130
ROUNDS: Final = 60
SERVICE = scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"]
OTHERS = {"Generate", "GenerateText", "Embed", "ListModels", "GetDecision", "GetUsage"}
METHODS = [name for name in SERVICE.methods_by_name if name not in OTHERS]
KNOWN = str(uuid.UUID(int=7))
WORDS = (
    *("", "x", "user", "m", "search", "{}", '{"type":"object"}', "[", "text/plain", "\0", "é" * 40),
    *(KNOWN, KNOWN.upper(), "../..", "a/b", "*", "x" * 300, "manuals"),
)
NUMBERS = (0, 1, 2, 3, 5, 100, 101, 1000, 2**31 - 1)
FLOATS = (0.0, 1.0, -1.0, 1e300, float("inf"), float("nan"))


def scalar(draw: random.Random, field: Any) -> Any:
    """A value of a field that is no message."""
    kind = field.cpp_type
    if kind == FieldDescriptor.CPPTYPE_STRING:
        word = draw.choice(WORDS)
        return word.encode() if field.type == FieldDescriptor.TYPE_BYTES else word
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return draw.random() < 0.5
    if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return draw.choice(FLOATS)
    if kind == FieldDescriptor.CPPTYPE_UINT64:
        return draw.choice((*NUMBERS, 2**63, 2**64 - 1))
    if kind == FieldDescriptor.CPPTYPE_INT64:
        return draw.choice((*NUMBERS, -1, 2**62))
    if kind == FieldDescriptor.CPPTYPE_INT32:
        return draw.choice((*NUMBERS, -1))
    return draw.choice(NUMBERS)


def fill(draw: random.Random, message: Message, depth: int = 0) -> None:
    """Sets some fields."""
    for field in message.DESCRIPTOR.fields:
        if draw.random() < 0.4 or depth > 3:
            continue
        entry = field.message_type
        if entry is not None and entry.GetOptions().map_entry:
            if entry.fields_by_name["value"].message_type is None:
                for _ in range(draw.randint(0, 2)):
                    key = scalar(draw, entry.fields_by_name["key"])
                    getattr(message, field.name)[key] = scalar(draw, entry.fields_by_name["value"])
        elif field.is_repeated:
            for _ in range(draw.randint(0, 3)):
                if entry is None:
                    getattr(message, field.name).append(scalar(draw, field))
                else:
                    fill(draw, getattr(message, field.name).add(), depth + 1)
        elif entry is not None:
            part = getattr(message, field.name)
            part.SetInParent()
            fill(draw, part, depth + 1)
        else:
            setattr(message, field.name, scalar(draw, field))


async def outcome(rig: Rig, method: str, request: Message) -> str:
    """OK, or the code of the error."""
    call = rig.ask(method, request, timeout=0.25)
    try:
        await (read_all(call) if hasattr(call, "read") else call)
    except grpc.aio.AioRpcError as error:
        return f"{from_rpc_error(error).code.name}"
    return "OK"


@pytest.mark.parametrize("method", METHODS)
async def test_whatever_is_sent_is_answered_by_type(tmp_path: Path, method: str) -> None:
    draw = random.Random(f"{SEED}{method}")
    kind = message_factory.GetMessageClass(SERVICE.methods_by_name[method].input_type)
    async with scheduler_rig(tmp_path) as rig:
        rig.names.change("a", concurrent_runs=1000)
        for number in range(ROUNDS):
            request = kind()
            fill(draw, request)
            told = await outcome(rig, method, request)
            assert told not in ("INTERNAL", "UNKNOWN"), (SEED, number, request)
