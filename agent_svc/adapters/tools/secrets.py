"""Secrets of tools: values of environment variables, for headers, and for nothing else.

Which variables a declaration may name says sluice/tool_rules.py. A value never enters a result,
log, error or metric: what a server echoes of it is hidden.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final

from agent_svc.ports import ToolError

HIDDEN: Final = "[secret]"
CHARS_MIN: Final = 6  # a shorter value would be found in innocent text everywhere
_SCHEMES: Final = frozenset({"bearer", "digest", "negotiate", "apikey", "api-key"})


class Secrets:
    """The secrets of one declaration: header names and the variables that hold their values."""

    def __init__(self, headers: Mapping[str, str], environ: Mapping[str, str]) -> None:
        self._values = {name: environ.get(variable, "") for name, variable in headers.items()}
        self._missing = sorted({v for v in headers.values() if not _usable(environ.get(v, ""))})
        texts = set(self._values.values())
        # "Bearer xyz" is also hidden where only "xyz" comes back.
        texts |= {word for text in texts for word in text.split()}
        texts |= {json.dumps(text)[1:-1] for text in texts}
        kept = {one for one in texts if len(one) >= CHARS_MIN and one.lower() not in _SCHEMES}
        self._texts = sorted(kept, key=len, reverse=True)

    @property
    def problem(self) -> str:
        """Which variables are not set or hold what no header can, for operators; else empty."""
        return f"not set: {', '.join(self._missing)}" if self._missing else ""

    def headers(self) -> dict[str, str]:
        """Header names and values. Raises ToolError where one is not set."""
        if self._missing:
            raise ToolError("TOOL_UNAVAILABLE", "A secret of the tool is not set.", made=False)
        return dict(self._values)

    def hide(self, text: str) -> str:
        """``text`` without the secrets' values."""
        for value in self._texts:
            text = text.replace(value, HIDDEN)
        return text


def _usable(value: str) -> bool:
    return bool(value) and value.isascii() and value.isprintable()
