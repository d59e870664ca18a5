"""What may be dialled on a peer's word."""

from __future__ import annotations

import pytest

from sluice.channels import TARGET_CHARS_MAX, is_target


@pytest.mark.parametrize(
    "text", ["127.0.0.1:50081", "chat-0:50081", "a.b-c.example:1", "[::1]:65535", "localhost:80"]
)
def test_a_host_and_a_port_may_be_dialled(text: str) -> None:
    assert is_target(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "localhost",
        ":1",
        "localhost:",
        "localhost:http",
        "unix:/run/x:1",
        "unix:x:1",
        "dns:///host:1",
        "xds:///service:1",
        "ipv4:127.0.0.1:1",
        "::1:80",
        "user@host:1",
        "host:1/path",
        "host:123456",
        "hos t:1",
        "höst:1",
        "host:1\n",
        "h" * TARGET_CHARS_MAX + ":1",
    ],
)
def test_anything_else_is_refused(text: str) -> None:
    assert not is_target(text)
