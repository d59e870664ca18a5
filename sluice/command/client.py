"""Calls the mesh as its clients do: gRPC through Envoy, under an API key.

For the command line: blocking, one channel, no retries (the mesh has already tried elsewhere when a
status arrives). Every call has a deadline. Errors are SluiceError with the mesh's own reason, or
UnreachableError when nothing answers at the address.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeVar, cast

import grpc
from google.protobuf.message import DecodeError, Message
from google.protobuf.timestamp_pb2 import Timestamp
from google.rpc import status_pb2

from sluice.command.failures import UnreachableError
from sluice.errors import Code, SluiceError
from sluice.scheduler.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    generate_pb2,
    records_pb2,
    scheduler_pb2_grpc,
)
from sluice.status import DETAILS_KEY, foreign, from_status

T = TypeVar("T")

MESSAGE_BYTES_MAX: Final = 8 << 20
_OPTIONS: Final = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
)
# The mesh says what it means with details. Without them these are what the library makes of a
# stream that was reset, as when a scheduler dies in the middle of an answer.
_BROKEN: Final = (Code.INTERNAL, Code.UNKNOWN)
CALL_TIMEOUT_S: Final = 15.0
ADMIN_TIMEOUT_S: Final = 5.0


class MeshClient:
    """One connection to Envoy. Use as a context manager."""

    def __init__(self, endpoint: str, key: str) -> None:
        self.endpoint = endpoint
        self._channel = grpc.insecure_channel(endpoint, options=_OPTIONS)
        self._scheduler = scheduler_pb2_grpc.SchedulerServiceStub(self._channel)
        self._admin = admin_pb2_grpc.SchedulerAdminServiceStub(self._channel)
        self._metadata = (("authorization", f"Bearer {key}"),)

    def __enter__(self) -> MeshClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def generate(
        self, request: generate_pb2.GenerateRequest, timeout_s: float
    ) -> Iterator[generate_pb2.GenerateResponse]:
        """Streams one generation; leaving the iterator early cancels it."""
        complete = False
        with self._typed_errors():
            call = self._scheduler.Generate(request, timeout=timeout_s, metadata=self._metadata)
            try:
                for message in call:
                    complete = message.HasField("finished")
                    yield message
            finally:
                cast("grpc.Call", call).cancel()
        if not complete:
            raise SluiceError(
                Code.DATA_LOSS, "STREAM_CUT", "The stream ended without its last message."
            )

    def generate_text(
        self, request: generate_pb2.GenerateTextRequest, timeout_s: float
    ) -> generate_pb2.GenerateTextResponse:
        """One generation in one piece."""
        return self._call(
            lambda: self._scheduler.GenerateText(
                request, timeout=timeout_s, metadata=self._metadata
            )
        )

    def list_models(self) -> generate_pb2.ListModelsResponse:
        """The models that the key may use."""
        return self._call(
            lambda: self._scheduler.ListModels(
                generate_pb2.ListModelsRequest(), timeout=CALL_TIMEOUT_S, metadata=self._metadata
            )
        )

    def decision(self, request_id: str) -> records_pb2.DecisionRecord:
        """Why a request of the key's tenant waited, landed where it did, or was refused."""
        request = records_pb2.GetDecisionRequest(request_id=request_id)
        return self._call(
            lambda: self._scheduler.GetDecision(
                request, timeout=CALL_TIMEOUT_S, metadata=self._metadata
            )
        ).decision

    def usage(self, begin_s: float, end_s: float) -> Sequence[records_pb2.UsageRecord]:
        """What the key's tenant used in the hours that meet [begin, end), Unix times."""
        request = records_pb2.GetUsageRequest(
            begin_time=Timestamp(seconds=int(begin_s)), end_time=Timestamp(seconds=int(end_s))
        )
        return self._call(
            lambda: self._scheduler.GetUsage(
                request, timeout=CALL_TIMEOUT_S, metadata=self._metadata
            )
        ).records

    def status(self) -> admin_pb2.WatchStatusResponse | None:
        """One report of the scheduler; needs the admin key. None when it sends none."""
        with self._typed_errors():
            call = self._admin.WatchStatus(
                admin_pb2.WatchStatusRequest(), timeout=ADMIN_TIMEOUT_S, metadata=self._metadata
            )
            try:
                return next(iter(call), None)
            finally:
                cast("grpc.Call", call).cancel()

    def call(self, method: str, request: Message, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        """Calls a unary method of the public service by its name."""
        call = getattr(self._scheduler, method)
        return self._call(lambda: call(request, timeout=timeout_s, metadata=self._metadata))

    def stream(self, method: str, request: Message, timeout_s: float) -> Iterator[Any]:
        """Streams a method of the public service; leaving the iterator early cancels it."""
        with self._typed_errors():
            call = getattr(self._scheduler, method)(
                request, timeout=timeout_s, metadata=self._metadata
            )
            try:
                yield from call
            finally:
                call.cancel()

    def admin(self, method: str, request: Message) -> Any:
        """Calls a unary method of the administration service; needs the admin key."""
        call = getattr(self._admin, method)
        return self._call(lambda: call(request, timeout=ADMIN_TIMEOUT_S, metadata=self._metadata))

    def _call(self, call: Callable[[], T]) -> T:
        with self._typed_errors():
            return call()

    @contextmanager
    def _typed_errors(self) -> Iterator[None]:
        try:
            yield
        except grpc.RpcError as error:
            raise self._typed(error) from None

    def _typed(self, error: grpc.RpcError) -> SluiceError | UnreachableError:
        # The library raises calls as errors: they carry code and trailers.
        call = cast("grpc.Call", error)
        status = _details(call.trailing_metadata())
        if status is not None:
            return from_status(status)
        code = Code(call.code().value[0])
        if code is Code.UNAVAILABLE and "failed to connect" in (call.details() or "").lower():
            return UnreachableError(
                f"nothing answers at {self.endpoint}: is the mesh running (`sluice status`)?"
            )
        if code in _BROKEN:
            return SluiceError(
                Code.UNAVAILABLE,
                "CONNECTION_BROKEN",
                "The connection to the mesh broke mid-answer; ask again.",
            )
        return foreign(code)


def _details(metadata: object) -> status_pb2.Status | None:
    for key, value in cast("Iterable[tuple[str, str | bytes]]", metadata or ()):
        if key == DETAILS_KEY and isinstance(value, bytes):
            try:
                return status_pb2.Status.FromString(value)
            except DecodeError:
                return None
    return None
