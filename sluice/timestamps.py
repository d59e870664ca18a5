"""Times in messages, which may hold anything."""

from __future__ import annotations

from google.protobuf.timestamp_pb2 import Timestamp

from sluice.errors import invalid


def unix_seconds(when: Timestamp, field: str) -> float:
    """Seconds since 1970. INVALID_ARGUMENT names the field that holds no time: years 1 to 9999."""
    try:
        return when.ToNanoseconds() / 1e9
    except ValueError:
        raise invalid(field, "must be a time between the years 1 and 9999") from None
