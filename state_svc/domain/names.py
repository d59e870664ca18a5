"""What names in keys may look like: nothing that could leave its tenant's keys."""

from __future__ import annotations

import re
from typing import Final

from sluice.errors import invalid

_TENANT: Final = re.compile(r"[a-z0-9-]{1,64}")
_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_HOLDER: Final = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_UUID: Final = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_MODEL: Final = re.compile(r"[A-Za-z0-9_.:/@+-]{1,256}")
_KEY: Final = re.compile(r"[A-Za-z0-9_.:/-]{1,256}")
_ITEM: Final = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_COLLECTION: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_TOOL: Final = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_DOCUMENT_BYTES_MAX: Final = 256

RESERVED: Final = frozenset({"registry", "runs", "schema"})
"""Hash tags of keys that belong to no tenant. None may have such a name: all keys of a tenant are
deleted with it."""


def check_tenant(name: str, field: str) -> str:
    """The name, if it is one of a tenant. Raises INVALID_ARGUMENT."""
    return _check(_TENANT, name, field)


def check_request_id(value: str, field: str) -> str:
    """The id, if it can be one. Raises INVALID_ARGUMENT."""
    return _check(_REQUEST_ID, value, field)


def check_holder(value: str, field: str) -> str:
    """The name, if it can be one of an agent service. Raises INVALID_ARGUMENT."""
    return _check(_HOLDER, value, field)


def check_uuid(value: str, field: str) -> str:
    """The identifier, if it is a UUID in lower case: nothing could follow it in a key. Raises
    INVALID_ARGUMENT."""
    return _check(_UUID, value, field)


def check_model(value: str, field: str) -> str:
    """The name, if it can be one of a model or alias. Raises INVALID_ARGUMENT."""
    return _check(_MODEL, value, field)


def check_key(value: str, field: str) -> str:
    """The name, if it can be one of a value. Raises INVALID_ARGUMENT."""
    return _check(_KEY, value, field)


def check_item(value: str, field: str) -> str:
    """The name, if it can be one of a blob or its owner. Raises INVALID_ARGUMENT."""
    return _check(_ITEM, value, field)


def check_collection(value: str, field: str) -> str:
    """The name, if it can be one of a collection. Raises INVALID_ARGUMENT."""
    return _check(_COLLECTION, value, field)


def check_tool(value: str, field: str) -> str:
    """The name, if it can be one of a tool. Raises INVALID_ARGUMENT."""
    return _check(_TOOL, value, field)


def check_document(value: str, field: str) -> str:
    """The identifier, if it can be one of a document: any text. Raises INVALID_ARGUMENT."""
    if not 1 <= len(value.encode()) <= _DOCUMENT_BYTES_MAX:
        raise invalid(field, f"must be 1 to {_DOCUMENT_BYTES_MAX} bytes")
    return value


def _check(pattern: re.Pattern[str], value: str, field: str) -> str:
    if not pattern.fullmatch(value):
        raise invalid(field, f"must match {pattern.pattern}")
    return value
