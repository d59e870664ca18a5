"""Client channels with every option that matters stated.

Stateless. Each channel has its own connection: the library would otherwise share one between
channels of the same options, and ``WatchLoad`` and health must not wait behind frames. No proxy
from the environment, no retries by the library (the scheduler retries), no service config by DNS.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio

from sluice.server_limits import MESSAGE_BYTES, MESSAGE_SLACK_BYTES, METADATA_BYTES, Options

TARGET_CHARS_MAX = 256
_TARGET = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9][A-Za-z0-9._-]*):[0-9]{1,5}")


def is_target(text: str) -> bool:
    """Whether a peer's word for an address is ``host:port`` and nothing else that the library would
    dial: no scheme (``unix:``, ``dns:``, ``xds:``), no path. IPv6 addresses stand in brackets."""
    return len(text) <= TARGET_CHARS_MAX and _TARGET.fullmatch(text) is not None


@dataclass(frozen=True, slots=True)
class ChannelLimits:
    """Limits of a channel. Windows bound what the peer may send unread: per stream and direction.

    Keepalive pings are also sent without calls; servers of this mesh permit them at 10 s."""

    message_bytes: int = MESSAGE_BYTES
    metadata_bytes: int = METADATA_BYTES
    stream_window_bytes: int = 1024 * 1024
    keepalive_time_s: float = 20.0
    keepalive_timeout_s: float = 5.0
    reconnect_min_s: float = 0.1
    reconnect_max_s: float = 0.5  # one that comes back is found within 2 s, other pauses included


@dataclass(frozen=True, slots=True)
class ClientTls:
    """TLS of a channel: files in PEM form. Without a key pair the client shows no certificate."""

    ca_file: Path
    certificate_file: Path | None = None
    key_file: Path | None = None
    server_name: str = ""  # the name on the server's certificate; empty: the address's


def channel_options(limits: ChannelLimits) -> Options:
    """The options, by the names that gRPC core reads."""
    return (
        ("grpc.max_receive_message_length", limits.message_bytes + MESSAGE_SLACK_BYTES),
        ("grpc.max_send_message_length", limits.message_bytes + MESSAGE_SLACK_BYTES),
        ("grpc.max_metadata_size", limits.metadata_bytes),
        ("grpc.absolute_max_metadata_size", limits.metadata_bytes),
        # Fixed windows: the library's bandwidth probing would let them grow to megabytes.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", limits.stream_window_bytes),
        ("grpc.keepalive_time_ms", round(limits.keepalive_time_s * 1000)),
        ("grpc.keepalive_timeout_ms", round(limits.keepalive_timeout_s * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),  # 0: no bound
        ("grpc.initial_reconnect_backoff_ms", round(limits.reconnect_min_s * 1000)),
        ("grpc.min_reconnect_backoff_ms", round(limits.reconnect_min_s * 1000)),
        ("grpc.max_reconnect_backoff_ms", round(limits.reconnect_max_s * 1000)),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),
        ("grpc.enable_retries", 0),
        ("grpc.service_config_disable_resolution", 1),
    )


def open_channel(
    address: str, *, limits: ChannelLimits | None = None, tls: ClientTls | None = None
) -> grpc.aio.Channel:
    """A channel to ``address`` ("host:port" or a gRPC target). Connects on first use and again by
    itself; the caller closes it. Clear text unless ``tls`` is given."""
    options = channel_options(limits or ChannelLimits())
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    if tls.server_name:
        options = (*options, ("grpc.ssl_target_name_override", tls.server_name))
    credentials = grpc.ssl_channel_credentials(
        root_certificates=tls.ca_file.read_bytes(),
        private_key=tls.key_file.read_bytes() if tls.key_file else None,
        certificate_chain=tls.certificate_file.read_bytes() if tls.certificate_file else None,
    )
    return grpc.aio.secure_channel(address, credentials, options=options)


@contextmanager
def ending(call: grpc.aio.Call) -> Iterator[None]:
    """Ends a streaming call when the block does, however it does. Needed around every read of a
    response stream: a task that is cancelled in ``async for`` while the request is still on its
    way leaves the call open, and its server working, for ever."""
    try:
        yield
    finally:
        call.cancel()
