"""A client that leaves, and one whose deadline passes, are counted apart.

Seen to fail on the mutant: every call that the client's side ends is a cancelled one.
"""

from __future__ import annotations

import pytest

from scheduler_svc.adapters.serving import left_as
from scheduler_svc.domain.model import Outcome, PriorityClass, Ticket, TicketId


@pytest.mark.parametrize(
    ("limit_s", "after_s", "outcome"),
    [
        (10.0, 0.0, Outcome.CANCELLED),
        (10.0, 9.8, Outcome.CANCELLED),
        (10.0, 9.91, Outcome.DEADLINE_EXCEEDED),
        (10.0, 10.3, Outcome.DEADLINE_EXCEEDED),
        (0.3, 0.2, Outcome.CANCELLED),
        (0.3, 0.26, Outcome.DEADLINE_EXCEEDED),
        (3600.0, 3500.0, Outcome.CANCELLED),
        (3600.0, 3570.0, Outcome.DEADLINE_EXCEEDED),
    ],
)
def test_the_time_tells_a_deadline_from_a_cancel(
    limit_s: float, after_s: float, outcome: Outcome
) -> None:
    ticket = Ticket(
        id=TicketId(1),
        request_id="r",
        tenant="dev",
        model="m",
        priority_class=PriorityClass.STANDARD,
        arrival_s=100.0,
        deadline_s=100.0 + limit_s,
        first_token_limit_s=200.0,
        prompt_tokens=1,
        output_tokens=1,
        size_bytes=1,
    )
    assert left_as(ticket, 100.0 + after_s) is outcome
