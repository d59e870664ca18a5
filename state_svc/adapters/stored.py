"""Records of the registry as messages. One that cannot be read, by whatever damage, is left out,
with a line in the log: it must not take the others with it."""

from __future__ import annotations

from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from sluice import logs
from state_svc.ports import Record

M = TypeVar("M", bound=Message)

log = logs.get(__name__)


def read(message: type[M], record: Record) -> M | None:
    """The message in a record; ``None``: there is none."""
    try:
        return message.FromString(record.value)
    except DecodeError:
        log.error(
            "a stored record cannot be read", kind=message.DESCRIPTOR.name, version=record.version
        )
        return None
