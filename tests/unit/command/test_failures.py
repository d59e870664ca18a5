"""How errors become one line and an exit status."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from scheduler_svc.domain.quota_errors import never
from sluice.command.cli import run
from sluice.command.cli_support import EXIT_BUSY, status_of
from sluice.command.client import MeshClient
from sluice.command.failures import NotReadyError, StartError, UnreachableError, one_line
from sluice.config import ConfigError
from sluice.errors import (
    Code,
    FieldViolation,
    QuotaViolation,
    SluiceError,
    deadline_exceeded,
    not_found,
    permission_denied,
)
from sluice.quota.exchange import Limits, QuotaKind
from sluice.scheduler.v1 import generate_pb2, scheduler_pb2_grpc


def test_the_line_holds_code_reason_field_quota_and_retry_delay() -> None:
    error = SluiceError(
        Code.RESOURCE_EXHAUSTED,
        "QUOTA",
        "Too much.",
        retry_after_s=1.25,
        fields=[FieldViolation("a.b", "must be less.")],
        quotas=[QuotaViolation("tenant:dev", "10 a minute")],
    )
    assert one_line(error) == (
        "RESOURCE_EXHAUSTED QUOTA: Too much; a.b: must be less; tenant:dev: 10 a minute;"
        " try again in 1.2 s"
    )


def test_a_field_that_the_message_names_already_is_not_repeated() -> None:
    error = SluiceError(
        Code.INVALID_ARGUMENT, "BAD", "a: must be 1", fields=[FieldViolation("a", "must be 1")]
    )
    assert one_line(error) == "INVALID_ARGUMENT BAD: a: must be 1"


def test_a_field_that_says_what_the_message_says_is_not_repeated() -> None:
    model = not_found("MODEL_UNKNOWN", "no such model for this tenant: 'm'", field="model")
    assert one_line(model) == "NOT_FOUND MODEL_UNKNOWN: no such model for this tenant: 'm'"
    text = "tools[0]: 'x' is not in this tenant's list of tools; ListTools has those that are, and"
    tool = permission_denied("TOOL_NOT_ALLOWED", text, field="tools[0]")
    assert one_line(tool) == (
        "PERMISSION_DENIED TOOL_NOT_ALLOWED: tools[0]: 'x' is not in this tenant's list of tools;"
        " `sluice agent tools` lists those that are, and"
    )


def test_a_reason_that_is_the_codes_name_is_said_once() -> None:
    assert one_line(deadline_exceeded(message="Late.")) == "DEADLINE_EXCEEDED: Late"


def test_a_quota_that_the_message_names_already_is_not_repeated() -> None:
    assert one_line(never(QuotaKind.TOKENS_PER_DAY, "dev", Limits(tokens_per_day=5))) == (
        "RESOURCE_EXHAUSTED QUOTA_TOO_SMALL: The request needs more than the tenant's whole quota"
        " of tokens per day"
    )


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (SluiceError(Code.INVALID_ARGUMENT, "R", "m"), 4),
        (SluiceError(Code.UNAUTHENTICATED, "R", "m"), 4),
        (SluiceError(Code.NOT_FOUND, "R", "m"), 4),
        (SluiceError(Code.RESOURCE_EXHAUSTED, "R", "m"), 5),
        (SluiceError(Code.UNAVAILABLE, "R", "m"), 5),
        (SluiceError(Code.DEADLINE_EXCEEDED, "R", "m"), 6),
        (SluiceError(Code.INTERNAL, "R", "m"), 1),
        (UnreachableError("gone"), 3),
        (ConfigError("a.b", "wrong"), 2),
        (StartError("busy"), 1),
        (NotReadyError("a", "late"), 1),
        (ModuleNotFoundError("x", name="x"), 1),
        (FileNotFoundError(2, "No such file", "/x"), 1),
        (UnicodeEncodeError("utf-8", "secret text\udcff", 11, 12, "no surrogates"), 2),
        (RuntimeError("secret text"), 1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_error_has_one_line_and_its_status(
    capsys: pytest.CaptureFixture[str], error: Exception, status: int
) -> None:
    assert status_of(error) == status
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert "secret text" not in said


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["nonsense"], 2),
        (["up", "--engine", "gpt"], 2),
        (["models", "--endpoint", "banana"], 2),
        (["agent", "run", " "], 2),
        (["agent", "run", "x", "--temperature", "9"], 2),
        (["--version"], 0),
        (["--help"], 0),
        ([], 0),
    ],
)
def test_wrong_use_is_a_line_and_not_a_traceback(
    capsys: pytest.CaptureFixture[str], arguments: list[str], status: int
) -> None:
    assert run(arguments, {}) == status
    assert "Traceback" not in capsys.readouterr().err


class _Reset(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Ends as the library says that a peer vanished in the middle of an answer."""

    def Generate(
        self, request: generate_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[generate_pb2.GenerateResponse]:
        yield generate_pb2.GenerateResponse()
        context.abort(grpc.StatusCode.INTERNAL, "Received RST_STREAM with error code 2")


def test_a_stream_that_is_reset_says_that_the_connection_broke() -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(_Reset(), server)  # type: ignore[abstract]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with MeshClient(f"127.0.0.1:{port}", "k") as client:
            answer = client.generate(generate_pb2.GenerateRequest(prompt="x"), 5.0)
            with pytest.raises(SluiceError, match="broke mid-answer; ask again") as caught:
                list(answer)
    finally:
        server.stop(None)
    assert status_of(caught.value) == EXIT_BUSY
