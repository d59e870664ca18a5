"""Checks that requests of runs, sessions and documents share. Stateless."""

from __future__ import annotations

import uuid
from typing import Final

from sluice.errors import invalid
from sluice.ids import new_request_id

PAGE_DEFAULT: Final = 20
PAGE_MAX: Final = 100
PAGE_TOKEN_BYTES_MAX: Final = 512


def page_size(asked: int) -> int:
    """The size of a page. INVALID_ARGUMENT beyond the largest."""
    if asked > PAGE_MAX:
        raise invalid("page_size", f"must be 1 to {PAGE_MAX}")
    return asked or PAGE_DEFAULT


def check_page_token(token: str) -> None:
    """Raises INVALID_ARGUMENT for one that no page has."""
    if len(token.encode()) > PAGE_TOKEN_BYTES_MAX:
        raise invalid("page_token", "is none of a previous response")


def check_uuid(text: str, field: str) -> None:
    """Raises INVALID_ARGUMENT unless it is a UUID in its usual form."""
    try:
        usual = str(uuid.UUID(text)) == text.lower()
    except ValueError:
        usual = False
    if not usual:
        raise invalid(field, "must be a UUID")


def request_id_of(given: str) -> str:
    """The identifier of a request, in lower case; without one a new one. INVALID_ARGUMENT unless it
    is a UUID."""
    if not given:
        return new_request_id()
    check_uuid(given, "request_id")
    return given.lower()
