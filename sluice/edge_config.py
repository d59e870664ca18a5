"""[envoy]: what the only ingress listens on and what it permits.

Owns names, units, defaults and ranges of the limits at the edge; `sluice/edge.py` renders them, and
`envoy/README.md` says what each one protects. Values only; read once when Envoy's file is rendered.
"""

from __future__ import annotations

from dataclasses import dataclass

from sluice.config import section, setting

_PORT = 65_535
_KIB = 1 << 10
_MIB = 1 << 20


@section("envoy")
@dataclass(frozen=True, slots=True)
class EnvoySettings:
    """The section [envoy]."""

    host: str = setting(
        "127.0.0.1", help="Clear-text listener (HTTP/1.1 and h2c); keys travel readable: loopback."
    )
    port: int = setting(8080, ge=1, le=_PORT, help="Port of that listener.")
    tls_host: str = setting(
        "0.0.0.0",  # noqa: S104 - the listener that is meant for others
        help="TLS listener; exists only with a certificate.",
    )
    tls_port: int = setting(8443, ge=1, le=_PORT, help="Port of that listener.")
    tls_certificate: str = setting("", help="PEM file with the chain, as Envoy finds it.")
    tls_private_key: str = setting("", help="PEM file with its key, as Envoy finds it.")
    admin_port: int = setting(9901, ge=1, le=_PORT, help="Admin API, loopback only.")
    admin_api: str = setting(
        "clear",
        choices=("off", "clear", "all"),
        help="Listeners that reach SchedulerAdminService: none, the clear-text one, all.",
    )
    trusted_hops: int = setting(
        0, unit="proxies", ge=0, le=8, help="Proxies in front whose x-forwarded-* is believed."
    )
    cors_origins: tuple[str, ...] = setting(
        (), le=64, help="Origins whose pages may call, as https://host[:port]. Empty: none."
    )

    schedulers: tuple[str, ...] = setting(
        ("127.0.0.1:50051",), ge=1, le=64, help="Public ports of the schedulers, host:port."
    )
    upstream_connections_max: int = setting(
        1_024, unit="connections", ge=1, le=65_536, help="Connections to schedulers."
    )
    requests_max: int = setting(
        16_384, unit="requests", ge=1, le=1_000_000, help="Open requests; more is 503."
    )
    retries_max: int = setting(64, unit="requests", ge=0, le=10_000, help="Retries at once.")
    retry_body_bytes: int = setting(
        256 * _KIB, unit="bytes", ge=0, le=4 * _MIB, help="Longest body kept for a retry."
    )
    health_interval_s: float = setting(
        0.4, unit="s", ge=0.1, le=60.0, help="Between health checks; two failed ones eject."
    )
    keepalive_s: float = setting(
        30.0, unit="s", ge=1.0, le=600.0, help="Pings to a scheduler; it must permit them."
    )
    keepalive_timeout_s: float = setting(
        10.0, unit="s", ge=1.0, le=60.0, help="Until an unanswered ping ends its connection."
    )

    body_bytes_max: int = setting(
        4 * _MIB, unit="bytes", ge=_KIB, le=64 * _MIB, help="JSON request body; more is 413."
    )
    response_bytes_max: int = setting(
        8 * _MIB, unit="bytes", ge=_KIB, le=64 * _MIB, help="Message that is written as JSON."
    )
    header_kib_max: int = setting(
        12, unit="KiB", ge=1, le=96, help="Request headers; below what a scheduler takes (16 KiB)."
    )
    headers_max: int = setting(64, unit="headers", ge=16, le=1_000, help="Request headers.")
    streams_per_connection_max: int = setting(
        1_024, unit="streams", ge=1, le=65_536, help="Open streams of a client connection."
    )
    early_resets_max: int = setting(
        900,
        unit="streams",
        ge=1,
        le=1_000_000,
        help="Streams that a connection may reset within a second of opening them; then it closes.",
    )
    connections_max: int = setting(
        4_096, unit="connections", ge=1, le=1_000_000, help="Client connections; more are closed."
    )
    stream_window_bytes: int = setting(
        65_536, unit="bytes", ge=65_535, le=16 * _MIB, help="HTTP/2 window of a stream, both sides."
    )
    connection_window_bytes: int = setting(
        _MIB, unit="bytes", ge=65_535, le=1 << 30, help="HTTP/2 window of a client connection."
    )
    upstream_connection_window_bytes: int = setting(
        256 * _MIB, unit="bytes", ge=_MIB, le=1 << 30, help="Holds 4,096 stalled streams at 64 KiB."
    )
    buffer_bytes: int = setting(
        32 * _KIB,
        unit="bytes",
        ge=4 * _KIB,
        le=16 * _MIB,
        help="Buffer of a connection, both sides; beyond it reading pauses.",
    )
    heap_bytes_max: int = setting(
        512 * _MIB, unit="bytes", ge=64 * _MIB, le=1 << 40, help="Heap at which load is shed."
    )

    grpc_timeout_max_s: int = setting(
        3_600, unit="s", ge=1, le=86_400, help="Longest deadline that a client may ask for."
    )
    silence_limit_s: float = setting(
        900.0, unit="s", ge=1.0, le=86_400.0, help="A stream without a byte for this long ends."
    )
    headers_timeout_s: float = setting(
        10.0, unit="s", ge=1.0, le=300.0, help="Until the headers of a request have arrived."
    )
    request_timeout_s: float = setting(
        120.0, unit="s", ge=1.0, le=3_600.0, help="Until a request has arrived in full."
    )
    flush_timeout_s: float = setting(
        30.0, unit="s", ge=1.0, le=600.0, help="Until a client has taken the rest of an answer."
    )
    connection_idle_s: float = setting(
        3_600.0, unit="s", ge=1.0, le=86_400.0, help="A connection without a stream is closed."
    )
    client_keepalive_s: float = setting(
        60.0, unit="s", ge=1.0, le=3_600.0, help="Pings to clients on HTTP/2."
    )

    access_log: str = setting("", help="File of the access log. Empty: standard output.")
    concurrency: int = setting(1, unit="threads", ge=1, le=256, help="Worker threads.")
    drain_s: int = setting(5, unit="s", ge=0, le=3_600, help="Graceful drain of listeners.")
