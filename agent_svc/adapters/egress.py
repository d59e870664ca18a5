"""The one way out: HTTP connections of tools, made under the rules of `sluice/egress_rules.py`.

Owns name resolution and the transport. Every request's URL is checked, every new connection's name
is resolved here, all its addresses are checked, and the connection goes to a checked address, so
that a name which answers differently the second time reaches nothing else; SNI, the certificate's
check and the Host header keep the name. Redirects are handed back, not followed; no proxy, cookie
or password of the environment is used; HTTP/1.1 only.

What comes back is bounded: bytes on the wire and after decompression, time of the whole exchange,
media type; headers by h11 at 100 KiB. Answers are asked for without compression; gzip and deflate
are read all the same, in pieces of 64 KiB.

Runs on the event loop; only name resolution uses threads, `RESOLVERS` of them, of which one may
hang for as long as the system's resolver does while its caller has long gone.

Failures are httpx2.TransportError, with texts that name no host, address or header:
`EgressRefusedError`, `ResponseRefusedError`, and httpx2's own for networks and time.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from ipaddress import ip_address
from typing import Final, Protocol

import httpcore2
import httpx2

from sluice.egress_rules import DEFAULT_PORTS, EgressDeniedError, EgressRules, Rule

RESOLVERS: Final = 8  # threads
ADDRESSES_MAX: Final = 8  # tried for one connection
ATTEMPT_MIN_S: Final = 0.25  # what each address gets at least of the time to connect
CONNECTIONS_MAX: Final = 32  # of one transport
IDLE_MAX: Final = 4  # of them kept open
IDLE_S: Final = 15.0
CONNECT_S: Final = 5.0
PIECE_BYTES: Final = 64 << 10  # of decompressed data at a time
_GZIP_OR_ZLIB: Final = 47  # zlib's wbits: detect the header
_CODED: Final = frozenset({"gzip", "x-gzip", "deflate"})


class Cap(Enum):
    """What of an answer was too much; bounded, so fit for a metric's label."""

    SIZE = "size"
    TIME = "time"
    MEDIA_TYPE = "media_type"
    ENCODING = "encoding"


class EgressRefusedError(httpx2.TransportError):
    """A connection that may not be made; nothing was sent."""

    def __init__(self, rule: Rule) -> None:
        super().__init__(f"egress refused: {rule.value}")
        self.rule = rule


class ResponseRefusedError(httpx2.TransportError):
    """An answer beyond its caps; the request may have had its effect."""

    def __init__(self, cap: Cap) -> None:
        super().__init__(f"response refused: {cap.value}")
        self.cap = cap


class Resolver(Protocol):
    """Turns names into addresses."""

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        """All addresses of a name, as text; raises OSError where there are none."""


class SystemResolver:
    """The operating system's, in threads of its own. Callers that want the same name at the same
    time share a lookup: a name that hangs holds up one thread, however often it is asked for."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(RESOLVERS, "egress-resolver")
        self._under_way: dict[tuple[str, int], asyncio.Future[Sequence[str]]] = {}

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        """See Resolver."""
        key = host, port
        lookup = self._under_way.get(key)
        if lookup is None:
            lookup = asyncio.wrap_future(self._threads.submit(_lookup, host, port))
            self._under_way[key] = lookup
            lookup.add_done_callback(lambda done: self._done(key, done))
        return await asyncio.shield(lookup)

    def close(self) -> None:
        """Does not wait for lookups that hang."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _done(self, key: tuple[str, int], lookup: asyncio.Future[Sequence[str]]) -> None:
        del self._under_way[key]
        if not lookup.cancelled():
            lookup.exception()  # taken, should nobody wait any more


def _lookup(host: str, port: int) -> Sequence[str]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(one[4][0]) for one in found]


@dataclass(frozen=True, slots=True)
class Caps:
    """Bounds of one exchange. ``total_s``: from the start of the request to the end of the body.
    ``media_types``: of a body, without parameters; ``type/*`` for all of a type; empty: any."""

    body_bytes_max: int
    total_s: float
    connect_s: float = CONNECT_S
    read_s: float = 30.0
    media_types: tuple[str, ...] = ()


class EgressGuard:
    """Makes transports and clients; one per process. ``refusals`` counts by rule."""

    def __init__(self, resolver: Resolver | None = None, tls: ssl.SSLContext | None = None) -> None:
        self._system = SystemResolver() if resolver is None else None
        self._resolver = resolver or self._system
        self._tls = tls
        self.refusals: Counter[Rule] = Counter()

    def transport(self, rules: EgressRules, caps: Caps, *, reuse: bool = True) -> EgressTransport:
        """A transport for one declaration; the caller closes it. ``reuse``: whether a connection
        serves several requests. One that its server closes at that moment leaves the second in
        doubt, which what must happen once cannot afford."""
        if self._tls is None:
            self._tls = httpcore2.default_ssl_context()
        return EgressTransport(self, rules, caps, self._tls, reuse)

    def client(
        self,
        rules: EgressRules,
        caps: Caps,
        *,
        headers: Mapping[str, str] | None = None,
        timeout: httpx2.Timeout | None = None,
        auth: httpx2.Auth | None = None,
    ) -> httpx2.AsyncClient:
        """A client on a transport of its own, for libraries that want one: no redirects, nothing
        from the environment. Closing it closes the transport."""
        return httpx2.AsyncClient(
            transport=self.transport(rules, caps),
            headers=dict(headers or {}),
            timeout=timeout or httpx2.Timeout(caps.read_s, connect=caps.connect_s),
            auth=auth,
            follow_redirects=False,
            trust_env=False,
        )

    async def addresses(self, rules: EgressRules, host: str, port: int) -> tuple[str, ...]:
        """The checked addresses of a canonical host. Raises EgressRefusedError or OSError."""
        try:
            texts = [str(ip_address(host))]
        except ValueError:
            assert self._resolver is not None
            texts = list(await self._resolver.resolve(host, port))
        try:
            return rules.check_addresses(host, port, texts)
        except EgressDeniedError as error:
            raise self.refused(error) from None

    def refused(self, error: EgressDeniedError) -> EgressRefusedError:
        """Counts a refusal and gives it its form here."""
        self.refusals[error.rule] += 1
        return EgressRefusedError(error.rule)

    def close(self) -> None:
        """Ends the resolver's threads."""
        if self._system is not None:
            self._system.close()


class _Backend(httpcore2.AsyncNetworkBackend):
    """Connects to checked addresses only."""

    def __init__(self, guard: EgressGuard, rules: EgressRules) -> None:
        self._guard = guard
        self._rules = rules
        self._network = httpcore2.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        loop = asyncio.get_running_loop()
        end = loop.time() + (CONNECT_S if timeout is None else timeout)
        try:
            async with asyncio.timeout_at(end):
                addresses = await self._guard.addresses(self._rules, host, port)
        except TimeoutError:
            raise httpcore2.ConnectTimeout from None
        except OSError:  # the resolver's text may hold the name
            raise httpcore2.ConnectError from None
        failure: Exception = httpcore2.ConnectTimeout()
        tried = addresses[:ADDRESSES_MAX]
        for index, address in enumerate(tried):
            left = end - loop.time()
            if left <= 0:
                break
            share = max(ATTEMPT_MIN_S, left / (len(tried) - index))
            try:
                return await self._network.connect_tcp(
                    address, port, min(left, share), local_address, socket_options
                )
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout) as error:
                failure = error
        raise failure

    async def connect_unix_socket(
        self,
        path: str,
        timeout: float | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        raise self._guard.refused(EgressDeniedError(Rule.SCHEME))

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class EgressTransport(httpx2.AsyncBaseTransport):
    """One declaration's connections. Safe for concurrent requests."""

    def __init__(
        self,
        guard: EgressGuard,
        rules: EgressRules,
        caps: Caps,
        tls: ssl.SSLContext,
        reuse: bool,
    ) -> None:
        self._guard = guard
        self._rules = rules
        self._caps = caps
        self._pool = httpcore2.AsyncConnectionPool(
            ssl_context=tls,
            max_connections=CONNECTIONS_MAX,
            max_keepalive_connections=IDLE_MAX if reuse else 0,
            keepalive_expiry=IDLE_S,
            http1=True,
            http2=False,
            retries=0,
            network_backend=_Backend(guard, rules),
        )

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Sends one request. Raises httpx2.TransportError; a cancel closes the connection."""
        deadline = asyncio.get_running_loop().time() + self._caps.total_s
        sent = self._checked(request)
        try:
            with _mapped():
                async with asyncio.timeout_at(deadline):
                    answer = await self._pool.handle_async_request(sent)
        except TimeoutError:
            raise ResponseRefusedError(Cap.TIME) from None
        headers = httpx2.Headers(answer.headers)
        assert not isinstance(answer.stream, Iterator)
        stream = _Body(answer, self._caps, deadline)
        try:
            stream.decode(_encoding(headers))
            self._check_media_type(answer.status, headers)
        except ResponseRefusedError:
            await stream.aclose()
            raise
        return httpx2.Response(
            answer.status,
            headers=_without(headers, stream.decodes),
            stream=stream,
            extensions=answer.extensions,
            request=request,
        )

    async def aclose(self) -> None:
        """Closes all connections."""
        with _mapped():
            await self._pool.aclose()

    def _checked(self, request: httpx2.Request) -> httpcore2.Request:
        url = request.url
        port = url.port or DEFAULT_PORTS.get(url.scheme, 0)
        try:
            host = self._rules.check_target(
                url.scheme, url.raw_host.decode("ascii"), port, bool(url.userinfo)
            )
        except EgressDeniedError as error:
            raise self._guard.refused(error) from None
        own = (b"host", b"accept-encoding", b"proxy-authorization")
        headers = [
            (b"Host", url.netloc),
            (b"Accept-Encoding", b"identity"),
            *((name, value) for name, value in request.headers.raw if name.lower() not in own),
        ]
        timeout = {"connect": self._caps.connect_s, "pool": self._caps.connect_s}
        timeout |= {"read": self._caps.read_s, "write": self._caps.read_s}
        timeout |= _set_ones(request.extensions.get("timeout"))
        return httpcore2.Request(
            method=request.method,
            url=httpcore2.URL(
                scheme=url.raw_scheme, host=host.encode("ascii"), port=port, target=url.raw_path
            ),
            headers=headers,
            content=request.stream,
            extensions={"timeout": timeout},
        )

    def _check_media_type(self, status: int, headers: httpx2.Headers) -> None:
        wanted = self._caps.media_types
        if not wanted or status in (204, 304) or headers.get("content-length") == "0":
            return
        told = headers.get("content-type", "").partition(";")[0].strip().lower()
        kind = told.partition("/")[0]
        if told not in wanted and f"{kind}/*" not in wanted:
            raise ResponseRefusedError(Cap.MEDIA_TYPE)


class _Body(httpx2.AsyncByteStream):
    """The body within its caps, decompressed."""

    def __init__(self, answer: httpcore2.Response, caps: Caps, deadline: float) -> None:
        self._answer = answer
        self._caps = caps
        self._deadline = deadline
        self._decoder: zlib._Decompress | None = None

    @property
    def decodes(self) -> bool:
        """Whether what is read here is not what was on the wire."""
        return self._decoder is not None

    def decode(self, encoding: str) -> None:
        """Sets the content encoding. Raises ResponseRefusedError for one that is not read."""
        if encoding in _CODED:
            self._decoder = zlib.decompressobj(_GZIP_OR_ZLIB)
        elif encoding not in ("", "identity"):
            raise ResponseRefusedError(Cap.ENCODING)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        wire = size = 0
        chunks = aiter(self._answer.stream)  # type: ignore[arg-type]
        while (chunk := await self._next(chunks)) is not None:
            wire += len(chunk)
            if wire > self._caps.body_bytes_max:
                raise ResponseRefusedError(Cap.SIZE)
            for piece in self._decoded(chunk):
                size += len(piece)
                if size > self._caps.body_bytes_max:
                    raise ResponseRefusedError(Cap.SIZE)
                yield piece
        if wire and self._decoder is not None and not self._decoder.eof:  # a part of an answer
            raise ResponseRefusedError(Cap.ENCODING)

    async def _next(self, chunks: AsyncIterator[bytes]) -> bytes | None:
        try:
            with _mapped():
                async with asyncio.timeout_at(self._deadline):
                    return await anext(chunks, None)
        except TimeoutError:
            raise ResponseRefusedError(Cap.TIME) from None

    def _decoded(self, chunk: bytes) -> Iterator[bytes]:
        decoder = self._decoder
        if decoder is None:
            yield chunk
            return
        rest = chunk
        while rest:
            try:
                piece = decoder.decompress(rest, PIECE_BYTES)
            except zlib.error:
                raise ResponseRefusedError(Cap.ENCODING) from None
            if decoder.unused_data:  # more after the end of the stream
                raise ResponseRefusedError(Cap.ENCODING)
            rest = decoder.unconsumed_tail
            if piece:
                yield piece

    async def aclose(self) -> None:
        with _mapped():
            await self._answer.aclose()


def _encoding(headers: httpx2.Headers) -> str:
    encoding: str = headers.get("content-encoding", "").strip().lower()
    return encoding


def _without(headers: httpx2.Headers, decoded: bool) -> list[tuple[bytes, bytes]]:
    """The headers as they fit the body that is read here."""
    gone = (b"content-encoding", b"content-length") if decoded else (b"content-encoding",)
    return [(name, value) for name, value in headers.raw if name.lower() not in gone]


def _set_ones(timeout: object) -> dict[str, float]:
    if not isinstance(timeout, Mapping):
        return {}
    return {str(name): float(value) for name, value in timeout.items() if value is not None}


@contextmanager
def _mapped() -> Iterator[None]:
    """httpcore2's errors as httpx2's of the same name, without their texts."""
    try:
        yield
    except (EgressRefusedError, ResponseRefusedError):
        raise
    except (
        httpcore2.TimeoutException,
        httpcore2.NetworkError,
        httpcore2.ProtocolError,
        httpcore2.UnsupportedProtocol,
        httpcore2.ProxyError,
    ) as error:
        name = type(error).__name__
        raise getattr(httpx2, name, httpx2.TransportError)(name) from None
