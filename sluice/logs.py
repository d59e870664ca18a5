"""Structured logs: one JSON object per line on stderr.

Owns the format and the bounds. Every line has time (UTC), level, service, logger and message, the
request and trace ids of the call it was written in, and named fields. A message is a fixed text;
what varies goes into fields. No prompt, completion, tool argument, key or grant is ever logged.

Writing is synchronous: lines are few (never per token or frame) and stderr is a file or a pipe
that the supervisor reads.
"""

from __future__ import annotations

import json
import logging
import sys
import traceback
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TextIO

from sluice import context

TEXT_CHARS_MAX = 2048
FIELD_CHARS_MAX = 512
FIELDS_MAX = 32
TRACE_CHARS_MAX = 8192  # the end of a traceback says most

_FIELDS = "sluice_fields"
NEVER = logging.CRITICAL + 1

# Libraries that log every call or export below these levels.
_QUIET = {
    "grpc": logging.WARNING,
    "asyncio": logging.WARNING,
    "opentelemetry": logging.ERROR,
    # Log whole URLs and headers.
    "httpx2": logging.WARNING,
    "httpcore2": logging.WARNING,
    # The MCP library writes into errors what a server sent; its sessions log as "client".
    "mcp": NEVER,
    "client": NEVER,
}
_REPEATING = ("opentelemetry",)
_STATUS = "SendStatusFromServerOperation"
REPEAT_S = 60.0  # how often the same line of such a library is written

Scalar = str | int | float | bool | None


class JsonFormatter(logging.Formatter):
    """A record as one line of JSON."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Scalar] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage()[:TEXT_CHARS_MAX],
        }
        if request_id := context.request_id.get():
            line["request_id"] = request_id
        if trace_id := context.trace_id(context.traceparent.get()):
            line["trace_id"] = trace_id
        fields: Mapping[str, Scalar] = getattr(record, _FIELDS, {})
        for name, value in list(fields.items())[:FIELDS_MAX]:
            line.setdefault(name, _bounded(value))
        # A library may leave a bare True here instead of what logging documents.
        error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
        if error is not None:
            line["error_type"] = type(error).__name__
            line["error"] = "".join(traceback.format_exception(error))[-TRACE_CHARS_MAX:]
        return json.dumps(line, ensure_ascii=False)


class RepeatFilter(logging.Filter):
    """Lets the same complaint of a library pass once a minute: an exporter without a collector
    complains at every try. Bounded by the libraries' message templates."""

    def __init__(self) -> None:
        super().__init__()
        self._passed_at: dict[tuple[str, str], float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if not record.name.startswith(_REPEATING):
            return True
        key = (record.name, str(record.msg))
        passed_at = self._passed_at.get(key)
        if passed_at is not None and record.created - passed_at < REPEAT_S:
            return False
        self._passed_at[key] = record.created
        return True


class HungUpFilter(logging.Filter):
    """Keeps out what gRPC says with a traceback when a call's status cannot be sent any more: its
    client has hung up, most often at its deadline, and gRPC has not noted that yet. A call that
    is wrong in itself has another text."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
        if record.name != "grpc._cython.cygrpc" or type(error).__name__ != "ExecuteBatchError":
            return True
        text = str(error)
        return not (text.startswith('Failed "execute_batch"') and _STATUS in text)


def _bounded(value: Scalar) -> Scalar:
    if isinstance(value, int | float | bool) or value is None:
        return value
    return str(value)[:FIELD_CHARS_MAX]


class Log:
    """A named logger whose lines take fields: ``log.info("instance lost", instance=name)``."""

    __slots__ = ("_logger",)

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def debug(self, message: str, **fields: Scalar) -> None:
        self._write(logging.DEBUG, message, fields)

    def info(self, message: str, **fields: Scalar) -> None:
        self._write(logging.INFO, message, fields)

    def warning(self, message: str, **fields: Scalar) -> None:
        self._write(logging.WARNING, message, fields)

    def error(self, message: str, **fields: Scalar) -> None:
        self._write(logging.ERROR, message, fields)

    def failure(self, message: str, error: BaseException, **fields: Scalar) -> None:
        """An error with its traceback. The only place where an exception's text appears."""
        if self._logger.isEnabledFor(logging.ERROR):
            exc_info = (type(error), error, error.__traceback__)
            self._logger.error(message, exc_info=exc_info, extra={_FIELDS: fields})

    def _write(self, level: int, message: str, fields: Mapping[str, Scalar]) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, message, extra={_FIELDS: fields})


def get(name: str) -> Log:
    """The logger of a module: ``log = logs.get(__name__)``."""
    return Log(name)


def setup(service: str, level: str = "info", stream: TextIO | None = None) -> None:
    """Sends everything that is logged in this process to ``stream`` (stderr). Called once, first
    thing in a service's main; a second call replaces the first."""
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonFormatter(service))
    handler.addFilter(RepeatFilter())
    handler.addFilter(HungUpFilter())
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
    for name, least in _QUIET.items():
        logging.getLogger(name).setLevel(max(least, root.level))
    logging.captureWarnings(True)
