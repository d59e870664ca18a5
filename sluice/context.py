"""What a call carries along: its request id and its W3C trace context.

Context variables, bound by the server's interceptor for the task of each call; tasks made by a
handler inherit them. Long-lived tasks that work for many requests pass these values by hand.
"""

from __future__ import annotations

import re
from contextvars import ContextVar

request_id: ContextVar[str] = ContextVar("sluice_request_id", default="")
traceparent: ContextVar[str] = ContextVar("sluice_traceparent", default="")
tracestate: ContextVar[str] = ContextVar("sluice_tracestate", default="")

TRACESTATE_CHARS_MAX = 512

_TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


def is_traceparent(text: str) -> bool:
    """Whether ``text`` is a W3C traceparent, version 00, with ids that are not zero."""
    return _TRACEPARENT.fullmatch(text) is not None


def is_sampled(text: str) -> bool:
    """Whether a valid traceparent carries the sampled flag."""
    return bool(int(text[53:55], 16) & 1)


def trace_id(text: str) -> str:
    """The trace id of a valid traceparent; empty for an empty one."""
    return text[3:35]
