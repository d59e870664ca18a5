"""Limits of a server, as options that gRPC core really has. Pure data."""

from __future__ import annotations

from dataclasses import dataclass

Options = tuple[tuple[str, int | str], ...]

MESSAGE_BYTES = 6 * 1024 * 1024
METADATA_BYTES = 16 * 1024

# The library refuses a message over its limit without details and as RESOURCE_EXHAUSTED, which
# reads as "busy, come again". Its limit is therefore this much higher than ours, which answers
# INVALID_ARGUMENT with a reason.
MESSAGE_SLACK_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Limits of a server. Windows bound what a client may send unread, per stream.

    ``concurrent_streams`` is per connection. Pings are permitted every ``ping_min_s`` seconds,
    with or without calls; faster ones end the connection after ``ping_strikes_max``."""

    message_bytes: int = MESSAGE_BYTES
    metadata_bytes: int = METADATA_BYTES
    concurrent_streams: int = 8192
    stream_window_bytes: int = 256 * 1024
    keepalive_time_s: float = 30.0
    keepalive_timeout_s: float = 10.0
    ping_min_s: float = 5.0
    ping_strikes_max: int = 3
    handshake_timeout_s: float = 10.0


def server_options(limits: ServerLimits) -> Options:
    """The options, by the names that gRPC core reads. The minimum ping interval of a server is
    ``grpc.http2.min_ping_interval_without_data_ms``; the name with ``recv`` in it, often seen, is
    the C macro's and is ignored."""
    return (
        ("grpc.max_receive_message_length", limits.message_bytes + MESSAGE_SLACK_BYTES),
        ("grpc.max_send_message_length", limits.message_bytes + MESSAGE_SLACK_BYTES),
        # Between a lower soft and the hard limit the library refuses at random: they are equal.
        ("grpc.max_metadata_size", limits.metadata_bytes),
        ("grpc.absolute_max_metadata_size", limits.metadata_bytes),
        ("grpc.max_concurrent_streams", limits.concurrent_streams),
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", limits.stream_window_bytes),
        ("grpc.keepalive_time_ms", round(limits.keepalive_time_s * 1000)),
        ("grpc.keepalive_timeout_ms", round(limits.keepalive_timeout_s * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", round(limits.ping_min_s * 1000)),
        ("grpc.http2.max_ping_strikes", limits.ping_strikes_max),
        ("grpc.server_handshake_timeout_ms", round(limits.handshake_timeout_s * 1000)),
        ("grpc.so_reuseport", 0),  # a second server on the port must fail, not share it
    )
