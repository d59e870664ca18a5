"""Every reason that a client can hear is in the one list, and the page of errors is made from it.

Seen to fail on mutants: a reason taken out of the list; one with another code than it is raised
with; a line of the page changed by hand.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from sluice import errors, reasons
from sluice.errors import Code, SluiceError
from sluice.status import from_status, to_status

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("scheduler_svc", "execution_svc", "inference_svc", "agent_svc", "state_svc", "sluice")
LISTED = {**reasons.REQUESTS, **reasons.RUNS, **reasons.ADMIN, **reasons.INSTANCES}
KNOWN = {**LISTED, **reasons.EDGE}
# Position of the reason, and the code, of what makes an error.
MAKERS: dict[str, tuple[int | None, Code | None]] = {
    "SluiceError": (1, None),
    "Refusal": (None, None),
    "invalid": (2, Code.INVALID_ARGUMENT),
    "exhausted": (0, Code.RESOURCE_EXHAUSTED),
    "unavailable": (0, Code.UNAVAILABLE),
    "not_found": (0, Code.NOT_FOUND),
    "permission_denied": (0, Code.PERMISSION_DENIED),
    "unauthenticated": (0, Code.UNAUTHENTICATED),
    "failed_precondition": (0, Code.FAILED_PRECONDITION),
    "_denied": (0, Code.PERMISSION_DENIED),
    "deadline_exceeded": (0, Code.DEADLINE_EXCEEDED),
}
# Raised, and never sent to a client of the mesh.
INSIDE = {
    "CLOCKS_DIFFER",
    "STREAM_CUT",
    "CONNECTION_BROKEN",
    "SERVICE_UNKNOWN",
    "TOO_MANY_WATCHERS",
}


def name_of(node: ast.expr | None) -> str:
    """The last name of an expression like `Code.INTERNAL`, or a literal's value."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    return node.attr if isinstance(node, ast.Attribute) else ""


def raised(package: str) -> Iterator[tuple[str, str, str]]:
    """(reason, code, place) of every error that is made with a literal reason; an unknown code is
    empty."""
    for path in sorted((ROOT / package).rglob("*.py")):
        if "v1" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            maker = node.func.id if isinstance(node.func, ast.Name) else ""
            if maker not in MAKERS:
                continue
            position, code = MAKERS[maker]
            keywords = {keyword.arg: keyword.value for keyword in node.keywords}
            argument = keywords.get("reason")
            if argument is None and position is not None and len(node.args) > position:
                argument = node.args[position]
            reason = name_of(argument)
            if maker == "Refusal":
                reason = reason or name_of(node.args[0])
                code_name = name_of(node.args[1])
            else:
                code_name = code.name if code else name_of(node.args[0])
            if reason.isupper():
                yield reason, code_name, f"{path.relative_to(ROOT)}:{node.lineno}"


def test_every_reason_that_a_service_raises_is_in_the_list_with_its_code() -> None:
    found = [one for package in PACKAGES for one in raised(package)]
    assert len(found) > 100
    missing = [
        (reason, code, place)
        for reason, code, place in found
        if reason not in INSIDE
        and (
            reason not in KNOWN
            or (code in Code.__members__ and Code[code] not in KNOWN[reason].codes)
        )
    ]
    assert missing == []


def test_every_reason_in_the_list_is_raised_somewhere() -> None:
    used = {reason for package in PACKAGES for reason, _, _ in raised(package)}
    text = (ROOT / "envoy" / "envoy.yaml.j2").read_text()
    named = "".join(
        path.read_text()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if path.name != "reasons.py"
    )
    unused = {reason for reason in LISTED if reason not in used and f'"{reason}"' not in named}
    assert unused == set()
    assert [reason for reason in reasons.EDGE if reason not in text] == []


def test_the_page_of_errors_is_current() -> None:
    command = f"python -m sluice.reasons > {reasons.PAGE}"
    assert (ROOT / reasons.PAGE).read_text() == reasons.render(), command


@pytest.mark.parametrize("reason", KNOWN)
def test_an_error_of_any_reason_says_its_scope_and_that_nothing_was_charged(reason: str) -> None:
    for code in KNOWN[reason].codes:
        error = reasons.complete(SluiceError(code, reason, "text", metadata={"model": "m"}))
        told = from_status(to_status(error))
        assert (told.code, told.reason) == (code, reason)
        assert told.metadata == {"scope": KNOWN[reason].scope, "charged": "false", "model": "m"}
        assert code in reasons.HTTP_STATUS


def test_what_an_error_says_itself_holds() -> None:
    error = SluiceError(
        Code.RESOURCE_EXHAUSTED, "QUEUE_FULL", "x", metadata={"scope": "tenant", "charged": "true"}
    )
    assert reasons.complete(error).metadata == {"scope": "tenant", "charged": "true"}
    unknown = reasons.complete(errors.invalid("f", "d", "ENGINE_SAYS_NO"))
    assert unknown.metadata == {"scope": "request", "charged": "false"}


def test_every_code_of_a_refusal_has_an_http_status() -> None:
    assert set(reasons.HTTP_STATUS) == set(Code) - {
        Code.OK,
        Code.UNKNOWN,
        Code.OUT_OF_RANGE,
        Code.DATA_LOSS,
    }
