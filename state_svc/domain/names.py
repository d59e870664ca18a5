"""What names in keys may look like: nothing that could leave its tenant's keys."""

from __future__ import annotations

import re
from typing import Final

from sluice.errors import invalid

_TENANT: Final = re.compile(r"[a-z0-9-]{1,64}")
_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_MODEL: Final = re.compile(r"[A-Za-z0-9_.:/@+-]{1,256}")


def check_tenant(name: str, field: str) -> str:
    """The name, if it is one of a tenant. Raises INVALID_ARGUMENT."""
    return _check(_TENANT, name, field)


def check_request_id(value: str, field: str) -> str:
    """The id, if it can be one. Raises INVALID_ARGUMENT."""
    return _check(_REQUEST_ID, value, field)


def check_model(value: str, field: str) -> str:
    """The name, if it can be one of a model or alias. Raises INVALID_ARGUMENT."""
    return _check(_MODEL, value, field)


def _check(pattern: re.Pattern[str], value: str, field: str) -> str:
    if not pattern.fullmatch(value):
        raise invalid(field, f"must match {pattern.pattern}")
    return value
