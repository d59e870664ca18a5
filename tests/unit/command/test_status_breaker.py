"""What `sluice status` says of an instance's breaker."""

from __future__ import annotations

import pytest

from sluice.command.status_view import _state
from sluice.scheduler.v1 import admin_pb2


@pytest.mark.parametrize(
    ("breaker", "reason", "shown"),
    [
        ("closed", "", "serving"),
        ("", "", "serving"),
        ("open", "", "serving (breaker open)"),
        ("half_open", "slow", "serving (slow; breaker half-open)"),
    ],
)
def test_a_breaker_is_shown_where_it_holds_requests_back(
    breaker: str, reason: str, shown: str
) -> None:
    one = admin_pb2.InstanceStatus(state="serving", breaker=breaker, reason=reason)
    assert _state(one) == shown
