"""A request's way through its tenant's quotas, for the handlers and the gate.

Before a request is queued :meth:`QuotaKeeper.try_reserve`; at each dispatch :meth:`permit`, and
where the registration lapsed meanwhile :meth:`renew`; while it runs :meth:`progressed`; at its end,
on every path, :meth:`close`, which settles or releases exactly once, whatever happened.

What a tenant pays for (:func:`consumption`): the prompt once and all output that was delivered,
over all attempts. Nothing at all when the engine did not take the request, or when the mesh failed
it before its first token.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Final

from scheduler_svc.adapters.live_request import LiveRequest
from scheduler_svc.domain.model import Outcome, Ticket
from scheduler_svc.domain.quota import Reservation
from scheduler_svc.quota_ports import QuotaPort

PROGRESS_S: Final = 0.5
"""How often a running request's use is reported: what a killed scheduler's tenant pays for."""

_CLIENTS_ENDS: Final = frozenset(
    (Outcome.FINISHED, Outcome.CANCELLED, Outcome.DEADLINE_EXCEEDED, Outcome.SLOW_CONSUMER)
)
"""Ends after which even a prompt without any output is paid: it was read for the client."""


@dataclass(frozen=True, slots=True)
class Consumption:
    """What a request used, in tokens; ``charged``: whether it counts as a request."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    charged: bool = False

    @property
    def tokens(self) -> int:
        """All of them."""
        return self.prompt_tokens + self.output_tokens


NOTHING_USED: Final = Consumption()


def consumption(live: LiveRequest, outcome: Outcome) -> Consumption:
    """What a request that ended so is charged with."""
    usage = live.ended.usage if live.ended is not None else None
    if live.unary:
        # Its call has no events: it ran when it ended, or was under way when its client left.
        ran = usage is not None or (live.attempt > 0 and outcome in _CLIENTS_ENDS)
        output_tokens = 0
    else:
        output_tokens = live.tokens
        ran = live.accepted is not None and (output_tokens > 0 or outcome in _CLIENTS_ENDS)
    if not ran:
        return NOTHING_USED
    if usage is None:
        prompt_tokens = live.prompt_tokens or live.ticket.prompt_tokens
        return Consumption(prompt_tokens, 0, output_tokens, True)
    prompt_tokens = live.prompt_tokens or usage.prompt_tokens
    output_tokens = max(output_tokens, live.attempt_base + usage.completion_tokens)
    return Consumption(prompt_tokens, usage.cached_tokens, output_tokens, True)


class QuotaKeeper:
    """See the module's docstring. Without a port (no state service) nothing is counted."""

    def __init__(self, port: QuotaPort | None = None) -> None:
        self._port = port

    def try_reserve(self, ticket: Ticket) -> Reservation | None:
        """Reserves the prompt and the expected output without waiting. ``None``: call
        :meth:`reserve`."""
        tokens = ticket.prompt_tokens + ticket.output_tokens
        if self._port is None:
            return Reservation(ticket.tenant, tokens)
        return self._port.try_reserve(ticket.tenant, tokens)

    async def reserve(self, ticket: Ticket) -> Reservation:
        """The same, waiting as :meth:`QuotaPort.reserve` does; raises its refusals."""
        assert self._port is not None
        return await self._port.reserve(ticket.tenant, ticket.prompt_tokens + ticket.output_tokens)

    def release(self, held: Reservation) -> None:
        """For a request that came no further than its reservation."""
        if self._port is not None:
            self._port.release(held)

    def permit(self, live: LiveRequest) -> float | None:
        """The Unix time by which an instance must have started it; infinite when uncounted.
        ``None``: the registration lapsed, :meth:`renew` first."""
        if self._port is None or live.quota is None or not live.quota.counted:
            return math.inf
        # The wall clock first: if this process is stopped in between, the permit is shorter.
        now_unix_s = time.time()
        seconds = self._port.may_start(live.quota)
        return now_unix_s + seconds if seconds > 0 else None

    def started(self, live: LiveRequest) -> None:
        """It was sent to an instance."""
        if self._port is not None and live.quota is not None:
            self._port.started(live.quota)

    async def renew(self, live: LiveRequest) -> None:
        """Reserves what is left of it anew; what it has used so far stays paid. Raises as
        :meth:`reserve`. When the request is over meanwhile nothing is held afterwards."""
        assert self._port is not None
        self._end(live, live.prompt_tokens + live.tokens, charged=live.tokens > 0)
        ticket = live.ticket
        rest = max(0, ticket.prompt_tokens + ticket.output_tokens - live.paid_tokens)
        made = await self._port.reserve(ticket.tenant, rest)
        if live.quota_closed:
            self._port.release(made)
        else:
            live.quota = made

    def progressed(self, live: LiveRequest, now: float) -> None:
        """Reports what it has used so far, at most twice a second. For requests with output:
        without any the mesh may still fail them, and then nothing is paid."""
        made = live.quota
        if made is None or not made.counted or now - live.progress_told_s < PROGRESS_S:
            return
        assert self._port is not None
        live.progress_told_s = now
        self._port.progressed(made, live.prompt_tokens + live.tokens - live.paid_tokens)

    def close(self, live: LiveRequest, used: Consumption) -> None:
        """It is over, having used so much. Idempotent."""
        live.quota_closed = True
        self._end(live, used.tokens, charged=used.charged)

    def _end(self, live: LiveRequest, used_tokens: int, *, charged: bool) -> None:
        """Settles or releases the reservation that is held now, if any. ``used_tokens``: over the
        request's whole life."""
        made, live.quota = live.quota, None
        if made is None or self._port is None:
            return
        if charged:
            self._port.settle(made, max(0, used_tokens - live.paid_tokens))
            live.paid_tokens = max(live.paid_tokens, used_tokens)
        else:
            self._port.release(made)
