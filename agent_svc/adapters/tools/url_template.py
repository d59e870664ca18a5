"""URLs with {name} in their path and query, filled with arguments.

Pure. An argument never leaves its place: it is percent-encoded, and what a path would read as a
step (".", "..") or as nothing is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from urllib.parse import quote

from agent_svc.ports import ToolError
from sluice.tool_rules import PLACEHOLDER

ARGUMENT_CHARS_MAX = 2048  # of one argument in a URL
URL_CHARS_MAX = 8192


def fill(template: str, arguments: Mapping[str, object]) -> str:
    """The URL. Raises ToolError for an argument that does not fit."""
    path, question, query = template.partition("?")

    def segment(name: str) -> str:
        text = as_text(arguments.get(name))
        if text.strip() in ("", ".", ".."):
            raise _refused()
        return quote(text, safe="")

    filled = PLACEHOLDER.sub(lambda match: segment(match[1]), path)
    if question:
        filled += "?" + PLACEHOLDER.sub(
            lambda match: quote(as_text(arguments.get(match[1])), safe=""), query
        )
    if len(filled) > URL_CHARS_MAX:
        raise _refused()
    return filled


def with_query(url: str, pairs: Sequence[tuple[str, object]]) -> str:
    """``url`` with further pairs in its query; lists give one pair each."""
    parts = [
        f"{quote(name, safe='')}={quote(as_text(one), safe='')}"
        for name, value in pairs
        for one in (value if isinstance(value, list) else [value])
    ]
    if not parts:
        return url
    filled = url + ("&" if "?" in url else "?") + "&".join(parts)
    if len(filled) > URL_CHARS_MAX:
        raise _refused()
    return filled


def as_text(value: object) -> str:
    """A scalar as it stands in a URL or header. Raises ToolError for anything else."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if not isinstance(value, str | int | float):
        raise _refused()
    text = str(value)
    if len(text) > ARGUMENT_CHARS_MAX or any(0xD800 <= ord(char) <= 0xDFFF for char in text):
        raise _refused()
    return text


def _refused() -> ToolError:
    return ToolError("TOOL_REFUSED", "An argument does not fit into the request.", made=False)
