"""The egress guard on real sockets.

Goal: no connection of a tool reaches what its declaration does not allow, and no answer takes more
than its caps. Method: servers and canaries on loopback, resolvers that lie. Oracle: connections
that the canaries saw (none), and the typed refusal. Deterministic, no seed.

Mutants: egress_address_not_checked, egress_name_resolved_twice, egress_url_not_checked,
egress_size_of_wire_only, egress_no_size, egress_no_total_time, egress_any_media_type,
lookups_not_shared, egress_part_taken_for_whole.
"""

from __future__ import annotations

import asyncio
import datetime
import gzip
import ssl
import threading
import time
import tracemalloc
import zlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from agent_svc.adapters.egress import (
    Cap,
    Caps,
    EgressGuard,
    EgressRefusedError,
    EgressTransport,
    ResponseRefusedError,
    SystemResolver,
)
from sluice.egress_rules import EgressRules, Rule, parse_host, parse_private
from tests.security.http_server import Answer, HttpServer, canaries, endless, fixed, serving, silent

NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # reading the system's certificates takes 20 ms
CAPS = Caps(body_bytes_max=64 << 10, total_s=5.0, media_types=("application/json", "text/*"))


class Names:
    """A resolver by script: each name's answers in turn, the last one for ever."""

    def __init__(self, **answers: Sequence[Sequence[str]]) -> None:
        self._answers = {name.replace("_", "."): list(a) for name, a in answers.items()}
        self.asked: list[str] = []

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        self.asked.append(host)
        answers = self._answers.get(host)
        if not answers:
            raise OSError("no such name: " + host)
        return answers.pop(0) if len(answers) > 1 else answers[0]


def rules(*hosts: str, private: Sequence[str] = ()) -> EgressRules:
    return EgressRules(
        tuple(parse_host(host) for host in hosts), tuple(parse_private(one) for one in private)
    )


@asynccontextmanager
async def transport(
    allowed: EgressRules, caps: Caps = CAPS, names: Names | None = None
) -> AsyncIterator[EgressTransport]:
    guard = EgressGuard(names, NO_TLS)
    async with guard.transport(allowed, caps) as one:
        yield one
    guard.close()


@asynccontextmanager
async def to(
    answers: dict[str, Answer], caps: Caps = CAPS
) -> AsyncIterator[tuple[EgressTransport, HttpServer, str]]:
    """A transport that may reach one server on loopback."""
    async with serving(answers) as server:
        place = f"127.0.0.1:{server.port}"
        async with transport(rules(place, private=[place]), caps) as one:
            yield one, server, f"http://{place}"


async def get(one: EgressTransport, url: str, **headers: str) -> httpx2.Response:
    response = await one.handle_async_request(httpx2.Request("GET", url, headers=headers))
    try:
        await response.aread()
    finally:
        await response.aclose()
    return response


def forms(port: int) -> list[str]:
    """URLs that mean loopback, or that some library takes for it."""
    return [
        f"http://{host}:{port}/"
        for host in (
            *("127.0.0.1", "localhost", "LOCALHOST", "LocalHost.", "127.0.0.1.", "127.1"),
            *("2130706433", "0x7f000001", "0x7f.0.0.1", "0177.0.0.1", "017700000001", "0"),
            *("0.0.0.0", "[::1]", "[::]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]"),
            *("[64:ff9b::7f00:1]", "[2002:7f00:1::]", "[0:0:0:0:0:0:0:1]", "[fe80::1%25lo]"),
            *("api.example.org@127.0.0.1", "127.0.0.1#@api.example.org", "user:pw@localhost"),
            *("api.example.org.nip.io", "internal.corp", "127.0.0.1.nip.io", "①②⑦.0.0.1"),
            "api.example.org%2f@127.0.0.1",
        )
    ] + [
        f"ftp://127.0.0.1:{port}/",
        f"gopher://127.0.0.1:{port}/_GET",
        "file:///etc/passwd",
        f"http://api.example.org:{port}/",
        f"http:\\\\127.0.0.1:{port}/",
        f"//127.0.0.1:{port}/",
    ]


async def test_no_form_of_a_loopback_address_is_connected_to() -> None:
    """Also where a declaration names such a host: names alone open no address."""
    async with canaries("127.0.0.1", "::1") as listeners:
        for listener in listeners:
            for url in forms(listener.port):
                refused = 0
                for hosts in (["api.example.org"], [f"localhost:{listener.port}"], ["localhost"]):
                    names = Names(api_example_org=[["127.0.0.1"]], localhost=[["127.0.0.1"]])
                    async with transport(rules(*hosts), names=names) as one:
                        with pytest.raises((httpx2.TransportError, httpx2.InvalidURL)):
                            await get(one, url)
                        refused += 1
                assert refused == 3
        assert [listener.connections for listener in listeners] == [0, 0]


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "::1", "0.0.0.0", "::", "169.254.169.254", "10.0.0.1", "192.168.0.1"),
        *("100.64.0.1", "::ffff:127.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::", "fe80::1%lo"),
        *("fd00:ec2::254", "224.0.0.1"),
    ],
)
async def test_a_name_that_stands_for_such_an_address_is_refused(address: str) -> None:
    names = Names(api_example_org=[["93.184.216.34", address]])
    async with transport(rules("api.example.org"), names=names) as one:
        with pytest.raises(EgressRefusedError) as refused:
            await get(one, "http://api.example.org/")
    assert refused.value.rule is Rule.ADDRESS
    assert "example" not in str(refused.value) and address not in str(refused.value)


async def test_a_name_that_answers_differently_the_second_time_reaches_nothing_else() -> None:
    """DNS rebinding: the first answer is an allowed address with a server, the next the canary's.
    The connection goes to the address that was checked, and each connection asks anew."""
    real_answer = {"/": fixed(b'{"who": "real"}')}
    async with serving(real_answer) as real, serving(host="127.0.0.2") as canary:
        place = f"api.example.org:{real.port}"
        names = Names(api_example_org=[["127.0.0.1"], ["127.0.0.2"]])
        allowed = rules(place, private=["127.0.0.1/32"])
        async with transport(allowed, names=names) as one:
            assert (await get(one, f"http://{place}/")).json() == {"who": "real"}
        assert names.asked == ["api.example.org"]
        assert real.asked[0].headers["host"] == place
        async with transport(allowed, names=names) as one:
            with pytest.raises(EgressRefusedError):
                await get(one, f"http://{place}/")
        assert canary.connections == 0
        assert real.connections == 1


async def test_a_redirect_is_handed_back_and_not_followed() -> None:
    async with canaries("127.0.0.1") as (canary,):
        location = f"http://127.0.0.1:{canary.port}/secret"
        answers = {"/": fixed(b"", "302 Found", location=location)}
        async with to(answers) as (one, _, url):
            response = await get(one, url + "/")
            assert response.status_code == 302
        async with serving(answers) as server:
            place = f"127.0.0.1:{server.port}"
            client = EgressGuard().client(rules(place, private=["127.0.0.0/8"]), CAPS)
            async with client:
                assert (await client.get(f"http://{place}/")).status_code == 302
                with pytest.raises(EgressRefusedError):  # also where a library insists
                    await client.get(f"http://{place}/", follow_redirects=True)
        assert canary.connections == 0


async def test_a_body_without_end_is_cut_at_the_cap() -> None:
    """1 GiB: read are the cap and what was under way, and memory stays small."""
    async with to({"/": endless(b"x" * (64 << 10), 1 << 30)}) as (one, _, url):
        tracemalloc.start()
        with pytest.raises(ResponseRefusedError) as refused:
            await get(one, url + "/")
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert refused.value.cap is Cap.SIZE
    assert peak < 4 << 20


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_a_decompression_bomb_is_cut_at_the_cap(encoding: str) -> None:
    pack = gzip.compress if encoding == "gzip" else zlib.compress
    bomb = pack(b"\0" * (64 << 20))
    assert len(bomb) < CAPS.body_bytes_max * 2
    answers = {"/": fixed(bomb[: CAPS.body_bytes_max - 1], content_encoding=encoding)}
    async with to(answers) as (one, _, url):
        tracemalloc.start()
        with pytest.raises(ResponseRefusedError) as refused:
            await get(one, url + "/")
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert refused.value.cap is Cap.SIZE
    assert peak < 4 << 20


async def test_a_compressed_answer_is_read_within_its_caps() -> None:
    body = b'{"a": "' + b"b" * 1000 + b'"}'
    answers = {
        "/gzip": fixed(gzip.compress(body), content_encoding="gzip"),
        "/deflate": fixed(zlib.compress(body), content_encoding="Deflate"),
        "/br": fixed(b"abc", content_encoding="br"),
        "/twice": fixed(gzip.compress(gzip.compress(body)), content_encoding="gzip, gzip"),
        "/broken": fixed(b"not gzip", content_encoding="gzip"),
        "/more": fixed(gzip.compress(body) + b"more", content_encoding="gzip"),
        "/less": fixed(gzip.compress(body)[:-9], content_encoding="gzip"),
        "/empty": fixed(b"", content_encoding="gzip"),
    }
    async with to(answers) as (one, server, url):
        for path in ("/gzip", "/deflate"):
            assert (await get(one, url + path)).content == body
        assert (await get(one, url + "/empty")).content == b""
        for path in ("/br", "/twice", "/broken", "/more", "/less"):
            with pytest.raises(ResponseRefusedError) as refused:
                await get(one, url + path)
            assert refused.value.cap is Cap.ENCODING
        assert {asked.headers["accept-encoding"] for asked in server.asked} == {"identity"}


async def test_a_slow_body_ends_at_the_total_time() -> None:
    caps = Caps(body_bytes_max=1 << 20, total_s=0.4, read_s=5.0)
    answers = {"/slow": endless(b"x", 100, pause_s=0.05), "/never": silent}
    async with to(answers, caps) as (one, _, url):
        for path in ("/slow", "/never"):
            begin = time.monotonic()
            with pytest.raises(ResponseRefusedError) as refused:
                await get(one, url + path)
            assert refused.value.cap is Cap.TIME
            assert time.monotonic() - begin < 4.0


async def test_a_wrong_media_type_is_refused_before_the_body_is_read() -> None:
    answers = {
        "/page": fixed(b"x" * 100, media_type="application/octet-stream"),
        "/json": fixed(b"{}", media_type="application/JSON; charset=utf-8"),
        "/text": fixed(b"a", media_type="text/csv"),
        "/none": fixed(b"", "204 No Content", media_type="image/png"),
    }
    async with to(answers) as (one, _, url):
        with pytest.raises(ResponseRefusedError) as refused:
            await get(one, url + "/page")
        assert refused.value.cap is Cap.MEDIA_TYPE
        for path in ("/json", "/text", "/none"):
            await get(one, url + path)


async def test_headers_beyond_their_bound_end_the_answer() -> None:
    answers = {"/": fixed(b"{}", x_long="x" * (128 << 10))}
    async with to(answers) as (one, _, url):
        with pytest.raises(httpx2.RemoteProtocolError):
            await get(one, url + "/")


async def test_no_proxy_of_the_environment_and_no_host_header_of_the_caller_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with canaries("127.0.0.1") as (proxy,):
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "HTTPS_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
        async with to({"/": fixed()}) as (one, server, url):
            await get(one, url + "/", host="evil.example.org")
            place = url.removeprefix("http://")
            async with EgressGuard().client(rules(place, private=[place]), CAPS) as client:
                await client.get(url + "/")
            assert {asked.headers["host"] for asked in server.asked} == {place}
        assert proxy.connections == 0


async def test_a_cancel_ends_the_exchange_at_once() -> None:
    async with to({"/": silent}) as (one, server, url):
        task = asyncio.create_task(get(one, url + "/"))
        while not server.asked:
            await asyncio.sleep(0.01)
        begin = time.monotonic()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert time.monotonic() - begin < 2.0


async def test_names_that_are_not_there_are_told_without_the_name() -> None:
    async with transport(rules("gone.example.org"), names=Names()) as one:
        with pytest.raises(httpx2.ConnectError) as failed:
            await get(one, "http://gone.example.org/")
    assert "gone" not in str(failed.value)


async def test_a_resolver_that_hangs_costs_the_time_to_connect() -> None:
    class Hangs:
        async def resolve(self, host: str, port: int) -> Sequence[str]:
            await asyncio.sleep(3600)
            raise AssertionError

    caps = Caps(body_bytes_max=1, total_s=5.0, connect_s=0.2)
    async with EgressGuard(Hangs()).transport(rules("a.example.org"), caps) as one:
        with pytest.raises(httpx2.ConnectTimeout):
            await get(one, "http://a.example.org/")


def certificate(folder: Path, name: str) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Contexts of a server named ``name`` and of a client that trusts it."""
    key = ec.generate_private_key(ec.SECP256R1())
    who = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(who)
        .issuer_name(who)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    file = folder / f"{name}.pem"
    pem = serialization.Encoding.PEM
    own = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    file.write_bytes(made.public_bytes(pem) + own)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(file)
    return server, ssl.create_default_context(cafile=str(file))


async def test_tls_checks_the_name_and_not_the_address(tmp_path: Path) -> None:
    for name, good in (("api.example.org", True), ("other.example.org", False)):
        server_tls, client_tls = certificate(tmp_path, name)
        seen: list[str | None] = []
        server_tls.sni_callback = lambda _, sni, __, seen=seen: seen.append(sni)
        async with serving({"/": fixed()}, tls=server_tls) as server:
            place = f"api.example.org:{server.port}"
            guard = EgressGuard(Names(api_example_org=[["127.0.0.1"]]), client_tls)
            async with guard.transport(rules(place, private=["127.0.0.1/32"]), CAPS) as one:
                if good:
                    assert (await get(one, f"https://{place}/")).status_code == 200
                else:
                    with pytest.raises(httpx2.ConnectError):
                        await get(one, f"https://{place}/")
            assert seen == ["api.example.org"]
            assert len(server.asked) == (1 if good else 0)


async def test_lookups_of_one_name_share_a_thread_and_a_failure_is_told_to_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, goes_on = threading.Event(), threading.Event()
    lookups: list[str] = []

    def hanging(host: str, port: int, **_: object) -> list[object]:
        lookups.append(host)
        begun.set()
        assert goes_on.wait(10.0)
        raise OSError("no such name: " + host)

    monkeypatch.setattr("agent_svc.adapters.egress.socket.getaddrinfo", hanging)
    resolver = SystemResolver()
    tasks = [asyncio.create_task(resolver.resolve("hangs.example.org", 80)) for _ in range(50)]
    await asyncio.to_thread(begun.wait, 10.0)
    tasks[0].cancel()  # the first to ask; the others go on
    goes_on.set()
    done = await asyncio.gather(*tasks, return_exceptions=True)
    assert lookups == ["hangs.example.org"]
    assert isinstance(done[0], asyncio.CancelledError)
    assert {type(one) for one in done[1:]} == {OSError}
    assert resolver._under_way == {}
    resolver.close()
