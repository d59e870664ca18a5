"""``KeyValueService`` and ``BlobService``: small values with compare-and-set, large results."""

from __future__ import annotations

from typing import Any, Final

from google.protobuf.duration_pb2 import Duration

from sluice.errors import invalid, not_found
from sluice.state.v1 import values_pb2, values_pb2_grpc
from state_svc.adapters.store_errors import store_errors
from state_svc.domain.names import check_item, check_key, check_tenant
from state_svc.ports import BlobStore, KeyValueStore

VALUE_BYTES_MAX: Final = 1 << 20
BLOB_BYTES_MAX: Final = 4 << 20
TTL_S_MIN: Final = 1
TTL_S_MAX: Final = 90 * 86_400
BLOB_TTL_S: Final = 7 * 86_400


class KeyValueServicer(values_pb2_grpc.KeyValueServiceServicer):
    """See the proto."""

    def __init__(self, store: KeyValueStore) -> None:
        self._store = store

    async def GetValue(
        self, request: values_pb2.GetValueRequest, context: Any
    ) -> values_pb2.GetValueResponse:
        """Reads a value."""
        check_tenant(request.tenant, "tenant")
        check_key(request.key, "key")
        with store_errors():
            record = await self._store.get(request.tenant, request.key)
        if record is None:
            raise not_found("VALUE_UNKNOWN", "There is no such value.")
        return values_pb2.GetValueResponse(value=record.value, version=record.version)

    async def PutValue(
        self, request: values_pb2.PutValueRequest, context: Any
    ) -> values_pb2.PutValueResponse:
        """Writes a value."""
        check_tenant(request.tenant, "tenant")
        check_key(request.key, "key")
        if len(request.value) > VALUE_BYTES_MAX:
            raise invalid("value", f"at most {VALUE_BYTES_MAX} bytes")
        ttl_ms = _ttl_ms(request.ttl, request.HasField("ttl"), TTL_S_MAX)
        expected = request.expected_version if request.HasField("expected_version") else None
        with store_errors():
            version = await self._store.put(
                request.tenant, request.key, request.value, ttl_ms, _checkable(expected)
            )
        return values_pb2.PutValueResponse(version=version)

    async def DeleteValue(
        self, request: values_pb2.DeleteValueRequest, context: Any
    ) -> values_pb2.DeleteValueResponse:
        """Deletes a value."""
        check_tenant(request.tenant, "tenant")
        check_key(request.key, "key")
        expected = request.expected_version if request.HasField("expected_version") else None
        with store_errors():
            if not await self._store.delete(request.tenant, request.key, _checkable(expected)):
                raise not_found("VALUE_UNKNOWN", "There is no such value.")
        return values_pb2.DeleteValueResponse()


class BlobServicer(values_pb2_grpc.BlobServiceServicer):
    """See the proto."""

    def __init__(self, store: BlobStore) -> None:
        self._store = store

    async def PutBlob(
        self, request: values_pb2.PutBlobRequest, context: Any
    ) -> values_pb2.PutBlobResponse:
        """Stores a blob."""
        check_tenant(request.tenant, "tenant")
        check_item(request.owner, "owner")
        check_item(request.name, "name")
        if len(request.content) > BLOB_BYTES_MAX:
            raise invalid("content", f"at most {BLOB_BYTES_MAX} bytes")
        ttl_ms = _ttl_ms(request.ttl, request.HasField("ttl"), BLOB_TTL_S)
        with store_errors():
            await self._store.put(
                request.tenant, request.owner, request.name, request.content, ttl_ms
            )
        return values_pb2.PutBlobResponse()

    async def GetBlob(
        self, request: values_pb2.GetBlobRequest, context: Any
    ) -> values_pb2.GetBlobResponse:
        """Reads a part of a blob."""
        check_tenant(request.tenant, "tenant")
        check_item(request.owner, "owner")
        check_item(request.name, "name")
        if request.size_max > BLOB_BYTES_MAX:
            raise invalid("size_max", f"at most {BLOB_BYTES_MAX}")
        size_max = request.size_max or BLOB_BYTES_MAX
        with store_errors():
            part = await self._store.get(
                request.tenant,
                request.owner,
                request.name,
                min(request.offset, BLOB_BYTES_MAX),  # nothing lies beyond
                size_max,
            )
        if part is None:
            raise not_found("BLOB_UNKNOWN", "There is no such blob.")
        return values_pb2.GetBlobResponse(content=part.content, size_bytes=part.size_bytes)

    async def DeleteBlobs(
        self, request: values_pb2.DeleteBlobsRequest, context: Any
    ) -> values_pb2.DeleteBlobsResponse:
        """Deletes all blobs of an owner."""
        check_tenant(request.tenant, "tenant")
        check_item(request.owner, "owner")
        with store_errors():
            deleted = await self._store.delete_all(request.tenant, request.owner)
        return values_pb2.DeleteBlobsResponse(deleted=deleted)


def _ttl_ms(ttl: Duration, given: bool, default_s: int) -> int:
    if not given:
        return default_s * 1000
    seconds = ttl.seconds + ttl.nanos / 1e9
    if not TTL_S_MIN <= seconds <= TTL_S_MAX:
        raise invalid("ttl", f"must be {TTL_S_MIN} to {TTL_S_MAX} s")
    return int(seconds * 1000)


def _checkable(expected: int | None) -> int | None:
    """A version that the store can compare exactly; no version is as large as what is cut off."""
    return None if expected is None else min(expected, 1 << 52)
