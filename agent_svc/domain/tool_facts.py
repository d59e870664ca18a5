"""What the tools gave, as plain data for an answer in words.

Pure. A small model goes on with what it reads, also with the JSON of calls or a sum that stands
beside its result: so one result stands alone, and of a simple value only names and values are
there. Where several calls are to be told apart, or nothing was found, the call stands before it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

from agent_svc.domain.tool_prompt import RESULT_BYTES_MIN, Limits, Result, Step, cut
from sluice.json_schemas import JsonError, parse

CALL_BYTES_MAX: Final = 200  # of a call, beside its result
PLAIN_BYTES_MAX: Final = 64 * 1024  # a longer result stays as it is
_NOTHING: Final = "nothing was found"
_TABLE: Final = frozenset(("columns", "rows", "cut"))
_MORE: Final = "(and more rows)"
_EMPTY: Final = frozenset(("", "[]", "{}", "null", '""', '{"result":[]}', '{"result":null}'))


def facts(steps: Sequence[Step], room: int, limits: Limits) -> tuple[str, int]:
    """The results of these steps, in their order, and how many there was no room for: the oldest.
    ``room``: bytes; the last result is there in any case, with ``RESULT_BYTES_MIN`` bytes at
    least."""
    results = [result for step in steps for result in step.results]
    parts: list[str] = []
    for result in reversed(results):
        text = _NOTHING if _is_empty(result) else plain(result.text)
        call = ""
        if len(results) > 1 or text == _NOTHING:
            call = f"{result.call.name} {cut(result.call.arguments_json, CALL_BYTES_MAX)}:\n"
        left = room - len(call.encode())
        if parts and left < RESULT_BYTES_MIN:
            break
        most = max(RESULT_BYTES_MIN, min(limits.result_bytes, left))
        whole = result.size_bytes if result.size_bytes > len(result.text.encode()) else 0
        parts.append(call + cut(text, most, whole))
        room -= len(parts[-1].encode()) + 2
    return "\n\n".join(reversed(parts)), len(results) - len(parts)


def _is_empty(result: Result) -> bool:
    return len(result.text) < 64 and "".join(result.text.split()) in _EMPTY


def plain(text: str) -> str:
    """JSON of names with simple values, or with lists of such objects, as lines ``name: value``; a
    table's rows as lines ``column: value, column: value``; everything else as it is."""
    if len(text) > PLAIN_BYTES_MAX:
        return text
    try:
        value = parse(text)
    except JsonError:
        return text
    if not isinstance(value, dict) or not value:
        return text
    if rows := _rows(value):
        return "\n".join(rows)
    lines: list[str] = []
    for name, part in value.items():
        if not isinstance(part, list):
            part = [{"": part}]
        if not part or not all(isinstance(one, dict) for one in part):
            return text
        for number, one in enumerate(part, start=1):
            counted = f"{name} {number}" if len(part) > 1 else name
            for key, inner in one.items():
                if isinstance(inner, dict | list):
                    return text
                lines.append(f"{f'{counted} {key}'.strip()}: {_shown(inner)}")
    return "\n".join(lines)


def _rows(value: dict[str, object]) -> list[str]:
    """The lines of a table, as the SQL tool gives one: ``columns`` and ``rows``, and nothing of
    weight beside them. Empty: it is none. In JSON a small model takes a value of another row."""
    columns, rows = value.get("columns"), value.get("rows")
    if not isinstance(columns, list) or not isinstance(rows, list) or value.keys() - _TABLE:
        return []
    lines: list[str] = []
    for row in rows:
        if not isinstance(row, list) or len(row) != len(columns):
            return []
        if any(isinstance(one, dict | list) for one in (*columns, *row)):
            return []
        cells = (f"{_shown(name)}: {_shown(one)}" for name, one in zip(columns, row, strict=True))
        lines.append(", ".join(cells))
    if lines and value.get("cut"):
        lines.append(_MORE)
    return lines


def _shown(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
