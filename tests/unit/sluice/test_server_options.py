"""Channel and server options: explicit, and by names that gRPC core reads.

Goal: no option is silently ignored. Oracle: every key is a string in the compiled
library. Mutant: ``grpc.http2.min_recv_ping_interval_without_data_ms``, the name often copied, which
is not in the library.
"""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from sluice.channels import ChannelLimits, channel_options
from sluice.server_limits import MESSAGE_SLACK_BYTES, ServerLimits, server_options


@pytest.fixture(scope="module")
def library() -> bytes:
    (core,) = (Path(grpc.__file__).parent / "_cython").glob("cygrpc*.so")
    return core.read_bytes()


def test_every_option_exists_in_the_library(library: bytes) -> None:
    options = (*server_options(ServerLimits()), *channel_options(ChannelLimits()))
    missing = [key for key, _ in options if key.encode() + b"\0" not in library]
    assert missing == []
    assert b"min_recv_ping_interval_without_data_ms\0" not in library


def test_sizes_are_explicit_and_alike_on_both_ends() -> None:
    server, client = dict(server_options(ServerLimits())), dict(channel_options(ChannelLimits()))
    for key in (
        "grpc.max_receive_message_length",
        "grpc.max_send_message_length",
        "grpc.max_metadata_size",
        "grpc.absolute_max_metadata_size",
    ):
        assert server[key] == client[key]
    assert server["grpc.max_receive_message_length"] == 6 * 1024 * 1024 + MESSAGE_SLACK_BYTES


def test_a_channels_pings_are_slower_than_a_server_permits() -> None:
    server, client = ServerLimits(), ChannelLimits()
    assert client.keepalive_time_s >= 2 * server.ping_min_s
    assert server.ping_min_s <= 10.0  # Envoy's interval is 30 s


def test_the_library_neither_retries_nor_uses_a_proxy() -> None:
    client = dict(channel_options(ChannelLimits()))
    assert client["grpc.enable_retries"] == 0
    assert client["grpc.enable_http_proxy"] == 0
    assert client["grpc.use_local_subchannel_pool"] == 1
