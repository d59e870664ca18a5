"""How errors become one line and an exit status."""

from __future__ import annotations

import pytest

from sluice.command.cli import run
from sluice.command.cli_support import status_of
from sluice.command.failures import NotReadyError, StartError, UnreachableError, one_line
from sluice.config import ConfigError
from sluice.errors import Code, FieldViolation, QuotaViolation, SluiceError


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
    [(["nonsense"], 2), (["up", "--engine", "gpt"], 2), (["--version"], 0), (["--help"], 0)],
)
def test_wrong_use_is_a_line_and_not_a_traceback(
    capsys: pytest.CaptureFixture[str], arguments: list[str], status: int
) -> None:
    assert run(arguments, {}) == status
    assert "Traceback" not in capsys.readouterr().err
