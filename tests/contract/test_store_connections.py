"""Stores behind TLS and access control lists, as a company's Redis is.

The Valkey of the tests is built without TLS: a proxy in this process ends it, with a certificate of
its own authority. Oracle: what is written is read; what is refused is refused by type, and no
password is in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from state_svc.adapters.valkey_link import ValkeyLink
from state_svc.adapters.valkey_registry import ValkeyRegistry
from state_svc.ports import Kind, StoreUnavailableError
from tests.certificates import self_signed
from tests.valkey import ValkeyProcess, valkey

PASSWORD = "canary-7d1f"
# Only our own keys and channels, and no administration; everybody else may ask whether it is there.
RULES = ("--user", "sluice", "on", f">{PASSWORD}", "~sluice:*", "&sluice:*", "+@all", "-@admin")
OTHERS = ("--user", "default", "on", "nopass", "-@all", "+ping")


@pytest.fixture(scope="module")
def guarded() -> Iterator[ValkeyProcess]:
    """A store that nobody but ``sluice`` may use, and that one only for its keys."""
    with valkey(*OTHERS, *RULES) as it:
        yield it


@asynccontextmanager
async def tls(port: int, chain: Path, private: Path) -> AsyncIterator[int]:
    """A port that speaks TLS for the store at ``port``."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(chain, private)

    async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                sink.write(data)
                await sink.drain()
        sink.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner, outer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(copy(reader, outer), copy(inner, writer))

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


@asynccontextmanager
async def registry(url: str) -> AsyncIterator[ValkeyRegistry]:
    link = ValkeyLink(url, timeout_s=2.0)
    try:
        yield ValkeyRegistry(link)
    finally:
        await link.close()


async def test_a_user_of_the_store_with_rights_to_its_keys_only_is_enough(
    guarded: ValkeyProcess,
) -> None:
    async with registry(f"redis://sluice:{PASSWORD}@127.0.0.1:{guarded.port}/0") as store:
        await store.put(Kind.TENANTS, "acl", b"value", expected=0)
        assert (await store.read(Kind.TENANTS)).records["acl"].value == b"value"
        assert await store.delete(Kind.TENANTS, "acl")


@pytest.mark.parametrize("user", ["", f"sluice:wrong-{PASSWORD}@"])
async def test_who_may_not_use_the_store_is_told_without_the_password(
    guarded: ValkeyProcess, user: str
) -> None:
    async with registry(f"redis://{user}127.0.0.1:{guarded.port}/0") as store:
        with pytest.raises(StoreUnavailableError) as refused:
            await store.read(Kind.TENANTS)
    assert PASSWORD not in str(refused.value)


async def test_a_store_behind_tls_is_used_if_its_certificate_is_trusted(
    guarded: ValkeyProcess, tmp_path: Path
) -> None:
    chain, private = self_signed(tmp_path)
    async with tls(guarded.port, chain, private) as port:
        address = f"rediss://sluice:{PASSWORD}@127.0.0.1:{port}/0"
        async with registry(f"{address}?ssl_ca_certs={chain}") as store:
            await store.put(Kind.TENANTS, "tls", b"value", expected=0)
            assert (await store.read(Kind.TENANTS)).records["tls"].value == b"value"
        async with registry(address) as stranger:
            with pytest.raises(StoreUnavailableError) as refused:
                await stranger.read(Kind.TENANTS)
        assert PASSWORD not in str(refused.value)
