"""Structured logs."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest

from sluice import context, logs

GRPC = "grpc._cython.cygrpc"
ExecuteBatchError: Any = import_module(GRPC).ExecuteBatchError  # which has no types


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    stream = io.StringIO()
    logs.setup("scheduler", "info", stream)
    yield stream
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    logging.captureWarnings(False)


def _last(stream: io.StringIO) -> dict[str, object]:
    line: dict[str, object] = json.loads(stream.getvalue().splitlines()[-1])
    return line


def test_a_line_is_one_json_object_with_its_call_and_fields(lines: io.StringIO) -> None:
    context.request_id.set("r1")
    context.traceparent.set("00-" + "a" * 32 + "-" + "b" * 16 + "-01")
    logs.get("test").info("instance lost", instance="a", running=3, share=0.5, on=True, none=None)
    line = _last(lines)
    assert line["message"] == "instance lost"
    assert (line["level"], line["service"], line["logger"]) == ("info", "scheduler", "test")
    assert (line["request_id"], line["trace_id"]) == ("r1", "a" * 32)
    assert (line["instance"], line["running"], line["share"]) == ("a", 3, 0.5)
    assert str(line["time"]).endswith("+00:00")
    assert lines.getvalue().count("\n") == 1


def test_a_field_cannot_replace_what_the_format_sets(lines: io.StringIO) -> None:
    logs.get("test").info("text", service="forged", level="forged")
    assert _last(lines)["service"] == "scheduler"
    assert _last(lines)["level"] == "info"


def test_newlines_and_length_are_kept_in_bounds(lines: io.StringIO) -> None:
    logs.get("test").warning("a\nb" * 5000, field="x\n" * 5000)
    assert lines.getvalue().count("\n") == 1
    assert len(str(_last(lines)["message"])) == logs.TEXT_CHARS_MAX
    assert len(str(_last(lines)["field"])) == logs.FIELD_CHARS_MAX


def test_a_failure_carries_its_traceback(lines: io.StringIO) -> None:
    try:
        raise ValueError("what happened")
    except ValueError as error:
        logs.get("test").failure("handler failed", error, method="/a/B")
    line = _last(lines)
    assert line["error_type"] == "ValueError"
    assert "what happened" in str(line["error"])
    assert line["method"] == "/a/B"


def test_levels_hold_and_noisy_libraries_are_quiet(lines: io.StringIO) -> None:
    logs.get("test").debug("not written")
    logging.getLogger("grpc").info("not written")
    logging.getLogger("opentelemetry.sdk").warning("not written")
    logging.getLogger("elsewhere").info("written with %s", "arguments")
    assert len(lines.getvalue().splitlines()) == 1
    assert _last(lines)["message"] == "written with arguments"


def test_an_exc_info_that_is_only_true_does_not_break_a_line() -> None:
    stream = io.StringIO()
    logs.setup("test", stream=stream)
    record = logging.LogRecord("opentelemetry.x", logging.ERROR, "f", 1, "no", None, None)
    record.exc_info = True  # type: ignore[assignment]  # as OpenTelemetry leaves it
    logging.getLogger("opentelemetry.x").handle(record)
    assert json.loads(stream.getvalue())["message"] == "no"


def test_a_library_says_the_same_thing_once_a_minute_and_ours_always() -> None:
    stream = io.StringIO()
    logs.setup("test", stream=stream)
    for _ in range(3):
        logging.getLogger("opentelemetry.exporter").error("cannot reach %s", "collector")
        logs.get("sluice.x").info("twice")
    messages = [json.loads(line)["message"] for line in stream.getvalue().splitlines()]
    assert messages.count("cannot reach collector") == 1
    assert messages.count("twice") == 3


SEND_STATUS = "(<grpc._cython.cygrpc.SendStatusFromServerOperation object at 0x7f>,)"
SEND_MESSAGE = "(<grpc._cython.cygrpc.SendMessageOperation object at 0x7f>,)"


@pytest.mark.parametrize(
    ("error", "logger", "written"),
    [
        (ExecuteBatchError(f'Failed "execute_batch": {SEND_STATUS}'), GRPC, False),
        (ExecuteBatchError(f'Failed "execute_batch": {SEND_MESSAGE}'), GRPC, True),
        (ExecuteBatchError(f"Failed grpc_call_start_batch: 3 {SEND_STATUS}"), GRPC, True),
        (ValueError(f'Failed "execute_batch": {SEND_STATUS}'), GRPC, True),
        (ExecuteBatchError(f'Failed "execute_batch": {SEND_STATUS}'), "sluice", True),
    ],
    ids=["hung up", "a message", "a wrong call", "another error", "another logger"],
)
def test_a_client_that_hung_up_is_no_error(
    lines: io.StringIO, error: Exception, logger: str, written: bool
) -> None:
    """Of all that gRPC says only this is kept out."""
    logging.getLogger(logger).error("raised in core by servicer method", exc_info=error)
    assert bool(lines.getvalue()) is written
