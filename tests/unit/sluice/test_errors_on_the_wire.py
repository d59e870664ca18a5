"""SluiceError to ``google.rpc.Status`` and back."""

from __future__ import annotations

import grpc
import grpc.aio
from google.rpc import error_details_pb2, status_pb2
from hypothesis import given
from hypothesis import strategies as st

from sluice.errors import (
    Code,
    FieldViolation,
    QuotaViolation,
    SluiceError,
    deadline_exceeded,
    exhausted,
    internal,
    invalid,
    unavailable,
)
from sluice.status import (
    DETAILS_KEY,
    DOMAIN,
    STATUS_BYTES_MAX,
    from_rpc_error,
    from_status,
    grpc_code,
    to_status,
    trailers,
)

_TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=80)
_ERRORS = st.builds(
    SluiceError,
    st.sampled_from([code for code in Code if code is not Code.OK]),
    st.from_regex(r"[A-Z][A-Z0-9_]{0,30}", fullmatch=True),
    _TEXT,
    metadata=st.dictionaries(st.from_regex(r"[a-z_]{1,10}", fullmatch=True), _TEXT, max_size=3),
    retry_after_s=st.none() | st.integers(0, 10**7).map(lambda ms: ms / 1000),
    fields=st.lists(st.builds(FieldViolation, _TEXT, _TEXT), max_size=3),
    quotas=st.lists(
        st.builds(QuotaViolation, _TEXT, _TEXT, _TEXT, st.integers(0, 10**12)), max_size=3
    ),
)


def _all(error: SluiceError) -> tuple[object, ...]:
    return (
        error.code,
        error.reason,
        error.message,
        dict(error.metadata),
        error.retry_after_s,
        error.fields,
        error.quotas,
    )


@given(_ERRORS)
def test_an_error_survives_the_wire(error: SluiceError) -> None:
    wire = to_status(error).SerializeToString()
    assert _all(from_status(status_pb2.Status.FromString(wire))) == _all(error)


@given(_ERRORS)
def test_every_status_carries_error_info_of_this_domain(error: SluiceError) -> None:
    info = error_details_pb2.ErrorInfo()
    assert to_status(error).details[0].Unpack(info)
    assert (info.domain, info.reason) == (DOMAIN, error.reason)


def test_a_status_that_is_too_long_keeps_reason_and_retry_delay() -> None:
    fields = [FieldViolation("f" * 600, "d" * 600) for _ in range(40)]
    error = SluiceError(
        Code.INVALID_ARGUMENT, "MANY", "Too many.", fields=fields, retry_after_s=2.5
    )
    status = to_status(error)
    assert status.ByteSize() <= STATUS_BYTES_MAX
    back = from_status(status)
    assert (back.reason, back.retry_after_s, back.fields) == ("MANY", 2.5, ())


def test_a_retry_delay_is_also_a_trailer_in_whole_seconds_rounded_up() -> None:
    assert dict(trailers(exhausted("BUSY", "Busy.", 1.2)))["retry-after"] == "2"
    assert dict(trailers(exhausted("BUSY", "Busy.", 0.0)))["retry-after"] == "0"
    assert "retry-after" not in dict(trailers(unavailable("DRAINING", "Draining.")))


def _rpc_error(
    code: grpc.StatusCode, details: str, trailing: tuple[tuple[str, str | bytes], ...] = ()
) -> grpc.aio.AioRpcError:
    metadata = grpc.aio.Metadata(*trailing)
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, details, None)


def test_a_failed_call_gives_the_peers_error_back() -> None:
    error = exhausted("QUOTA", "Over the quota.", 3.0, quotas=[QuotaViolation("t", "rpm")])
    back = from_rpc_error(_rpc_error(grpc_code(error.code), error.message, trailers(error)))
    assert _all(back) == _all(error)


def test_a_foreign_status_loses_its_text() -> None:
    back = from_rpc_error(_rpc_error(grpc.StatusCode.UNAVAILABLE, "secret at 10.0.0.1"))
    assert back.reason == "PEER_UNAVAILABLE"
    assert "secret" not in str(back)
    foreign = status_pb2.Status(code=5, message="secret")
    foreign.details.add().Pack(error_details_pb2.ErrorInfo(reason="X", domain="elsewhere"))
    assert from_status(foreign).reason == "PEER_NOT_FOUND"
    assert "secret" not in str(from_status(foreign))


def test_details_that_are_broken_or_of_another_code_are_not_believed() -> None:
    for value in (b"\xff\xff", to_status(unavailable("X", "x")).SerializeToString()):
        back = from_rpc_error(_rpc_error(grpc.StatusCode.NOT_FOUND, "", ((DETAILS_KEY, value),)))
        assert back.reason == "PEER_NOT_FOUND"


def test_an_unknown_code_is_unknown() -> None:
    assert from_status(status_pb2.Status(code=99)).code is Code.UNKNOWN


def test_codes_are_those_of_grpc() -> None:
    assert {code.name: code.value for code in Code} == {
        code.name: code.value[0] for code in grpc.StatusCode
    }


def test_the_words_for_errors_have_their_codes() -> None:
    assert invalid("a.b", "is wrong").fields == (FieldViolation("a.b", "is wrong"),)
    assert invalid("a.b", "is wrong").message == "a.b: is wrong"
    assert deadline_exceeded().code is Code.DEADLINE_EXCEEDED
    assert internal("r1").metadata == {"request_id": "r1"}
