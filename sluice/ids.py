"""Identifiers. Stateless; uniqueness comes from the operating system's random source."""

from __future__ import annotations

import os
import re
import uuid
from typing import Final

REQUEST_ID_CHARS_MAX = 128
_REQUEST_ID: Final = re.compile(rf"[!-~]{{1,{REQUEST_ID_CHARS_MAX}}}")


def new_request_id() -> str:
    """A request id for a caller that sent none: a UUID (version 4) as text."""
    return str(uuid.uuid4())


def new_epoch() -> int:
    """An incarnation number, 1 to 2**63 - 1: differs between two starts of anything."""
    return (int.from_bytes(os.urandom(8), "big") >> 1) or 1


def is_request_id(text: str) -> bool:
    """Whether a caller's request id is acceptable: 1 to 128 visible ASCII characters."""
    return _REQUEST_ID.fullmatch(text) is not None
