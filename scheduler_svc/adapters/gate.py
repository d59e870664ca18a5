"""The gate: the one owner of the scheduler's domain, and a request's way through it.

A client's handler calls :meth:`Gate.admit`; the owner task submits the ticket to the domain, and
each turn of the owner (a) applies what happened since the last turn, (b) lets the domain decide
synchronously, (c) hands the decisions to lanes and live requests. Nothing in a turn awaits, so no
invariant of the domain is ever seen broken. What happens outside comes in as commands (``post``):
of instances and links from ``lanes``, of attempts from ``attempts``. Output of engines does not
pass here: the execution link's reader appends it to the live request, and the client's handler
takes it from there.

Failure modes: an instance, its stream or the execution replica lost -> the domain places the
request elsewhere or ends it with a typed error; limits on time are enforced by :meth:`sweep`.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

from scheduler_svc.adapters.attempt_events import AttemptEvents, came_to
from scheduler_svc.adapters.input_hash import generation_hash
from scheduler_svc.adapters.lanes import Lanes
from scheduler_svc.adapters.live_request import LiveRequest
from scheduler_svc.adapters.prefixes import PrefixReader
from scheduler_svc.adapters.quota_keeper import QuotaKeeper
from scheduler_svc.domain.flush import FlushBudget
from scheduler_svc.domain.model import (
    Abort,
    Dispatch,
    FaultKind,
    Outcome,
    PriorityClass,
    Refuse,
    RejectKind,
    Ticket,
    TicketState,
    WorkKind,
    Yield,
)
from scheduler_svc.domain.refusals import spread
from scheduler_svc.domain.scheduler import Scheduler
from sluice.common.v1 import grant_pb2, policy_pb2, result_pb2
from sluice.errors import (
    Code,
    SluiceError,
    deadline_exceeded,
    exhausted,
    permission_denied,
)
from sluice.execution.v1 import execution_pb2
from sluice.grants import GRANT_LAPSED, GrantSigner
from sluice.inference.v1 import inference_pb2

SWEEP_INTERVAL_S: Final = 0.1
"""Limits on time are enforced this exactly; the engine enforces the total deadline itself."""

DEMAND_INTERVAL_S: Final = 0.02
"""Instances hear of changed demand this often at most."""

NO_CAPACITY_S: Final = 1.0
NO_CAPACITY_SPREAD: Final = 0.2
"""When a request beyond the write capacity may ask again: flushes last a second at most."""

GRANT_TTL_S: Final = 30.0

# It goes on later: no instance is at work on it.
_PAUSED: Final = (TicketState.WAITING, TicketState.RETURNING)

_FINISH_REASONS: Final = {
    Outcome.DEADLINE_EXCEEDED: result_pb2.FINISH_REASON_DEADLINE,
    Outcome.FIRST_TOKEN_TIMEOUT: result_pb2.FINISH_REASON_DEADLINE,
    Outcome.INTER_TOKEN_TIMEOUT: result_pb2.FINISH_REASON_DEADLINE,
}

_CLASSES: Final = {
    PriorityClass.CRITICAL: policy_pb2.PRIORITY_CLASS_CRITICAL,
    PriorityClass.INTERACTIVE: policy_pb2.PRIORITY_CLASS_INTERACTIVE,
    PriorityClass.STANDARD: policy_pb2.PRIORITY_CLASS_STANDARD,
    PriorityClass.BATCH: policy_pb2.PRIORITY_CLASS_BATCH,
}


class Gate:
    """See the module's docstring. One per process."""

    def __init__(
        self,
        domain: Scheduler,
        signer: GrantSigner,
        flush: FlushBudget,
        write_limit_s: float = 30.0,
        quota: QuotaKeeper | None = None,
    ) -> None:
        """``write_limit_s``: a client's write that takes longer ends the request as
        slow_consumer. ``quota``: what admits, and here permits to start; without, nothing is
        counted."""
        self.domain = domain
        self.quota = quota or QuotaKeeper()
        self._prefixes = PrefixReader()
        self._write_limit_s = write_limit_s
        self.flush = flush
        self.draining = False
        self.outcomes: Counter[Outcome] = Counter()
        self.lives: dict[int, LiveRequest] = {}
        self._signer = signer
        self._inbox: list[Callable[[float], object]] = []
        self._bell = asyncio.Event()
        self._left = asyncio.Event()
        self._demand_at_s = 0.0
        self._renewals = asyncio.TaskGroup()
        self._loop = asyncio.get_running_loop()
        self.attempts = AttemptEvents(domain, self.post)
        self.lanes = Lanes(domain, self.attempts, self.post)

    # A request's way through the gate.

    def check(self, ticket: Ticket) -> None:
        """Raises when the request would be refused now: a handler asks before it does any work
        for it. :meth:`admit` asks the domain again, in the owner's turn."""
        refusal = self.domain.refuse(ticket, self._loop.time())
        if refusal is not None:
            raise refusal
        if ticket.kind is WorkKind.GENERATE and not self.flush.can_open(ticket.priority_class):
            raise no_capacity(NO_CAPACITY_S * spread(ticket.id, NO_CAPACITY_SPREAD))

    def admit(self, live: LiveRequest) -> None:
        """Queues a request. Its end, whatever it is, arrives at ``live``; :meth:`leave` follows."""
        ticket = live.ticket
        ticket.prefix = self._prefixes.read(live.work, self.domain.prefix_block(ticket.model))
        if ticket.input_hash is None:
            ticket.input_hash = partial(generation_hash, ticket.tenant, live.work)
        self.flush.open(ticket.priority_class)

        def submit(now: float) -> None:
            self.lives[ticket.id] = live
            if live.over:
                return  # cancelled before the owner saw it
            refusal = self.domain.submit(ticket, now)
            if refusal is not None:
                live.fail(refusal, refusal.outcome)

        self.post(submit)

    def leave(self, live: LiveRequest, outcome: Outcome) -> None:
        """The handler is done: counts the outcome, and stops what may still be running."""
        self.outcomes[outcome] += 1
        self.flush.close(live.ticket.priority_class)
        self._left.set()
        live.close()
        if not live.over:
            error = SluiceError(Code.CANCELLED, "CANCELLED", "the client cancelled the request")
            live.fail(error, Outcome.CANCELLED)

        def forget(now: float) -> None:
            self.lives.pop(live.ticket.id, None)
            if live.ended is None:
                self._stop(live, now, outcome)

        self.post(forget)

    def _abort(self, abort: Abort, now: float) -> None:
        """Stops an attempt on its instance; the client, if it still waits, hears why."""
        live = self.lives.get(abort.ticket.id)
        if live is not None and abort.error is not None:
            live.fail(abort.error, abort.reason)
        if live is not None and live.unary:
            return  # its handler cancels the call and reports the end
        reason = _FINISH_REASONS.get(abort.reason, result_pb2.FINISH_REASON_CANCELLED)
        for link in self.lanes.links:
            lane = link.lanes.get(abort.instance)
            if lane is not None and lane.cancel(abort.ticket.id, abort.attempt, reason):
                return  # its `ended` frees the room
        self.domain.attempts.ended(abort.ticket.id, abort.attempt, now, abort.reason)

    def _yield(self, effect: Yield, now: float) -> None:
        """Stops an attempt that goes on later; what it makes until its end still counts."""
        ticket = effect.ticket
        for link in self.lanes.links:
            lane = link.lanes.get(effect.instance)
            if lane is not None and lane.stop(ticket.id, effect.attempt):
                return  # its `ended` says how far it came
        live = self.lives.get(ticket.id)
        delivered = live.tokens if live is not None else 0
        self.domain.attempts.yielded(ticket.id, effect.attempt, now, delivered)

    def _dispatch(self, effect: Dispatch, now: float) -> None:
        ticket = effect.ticket
        live = self.lives.get(ticket.id)
        if live is None or live.over:
            outcome = live.outcome if live is not None else None
            self.domain.attempts.ended(ticket.id, effect.attempt, now, outcome or Outcome.CANCELLED)
            return
        if live.renewing is not None:
            live.renewing = effect  # the earlier attempt is over; this one waits in its place
            return
        start_by_unix_s = self.quota.permit(live)
        if start_by_unix_s is None:
            live.renewing = effect
            self._renewals.create_task(self._renew(live))
            return
        live.dispatched(effect.instance, effect.attempt, now, self.attempts.first_token)
        if live.unary:
            return  # its handler makes the call; see unary_ended and unary_failed
        lane = self.lanes.by_name.get(effect.instance)
        if lane is None or not lane.can_start():
            self.domain.attempts.rejected(ticket.id, effect.attempt, RejectKind.NO_ROOM, now)
            return
        start = inference_pb2.Start(
            work=live.to_start(),
            grant=self._grant(live, start_by_unix_s),
            traceparent=live.traceparent,
            tracestate=live.tracestate,
            priority_class=_CLASSES[ticket.priority_class],
        )
        lane.start(live, effect.attempt, start)
        self.quota.started(live)

    def _grant(self, live: LiveRequest, start_by_unix_s: float) -> grant_pb2.SignedGrant:
        return self._signer.sign(
            live.ticket.request_id,
            live.instance,
            now_unix_s=time.time(),
            ttl_s=GRANT_TTL_S,
            start_by_unix_s=start_by_unix_s,
        )

    async def _renew(self, live: LiveRequest) -> None:
        """What it had reserved may have been given to others while it waited (this process stood
        still, or the state service was unreachable): reserves anew, off the owner task. The ticket
        keeps its room meanwhile, 1.3 s at most."""
        try:
            await self.quota.renew(live)
        except SluiceError as refusal:
            live.fail(refusal, Outcome.QUOTA_EXCEEDED)

        def go_on(now: float) -> None:
            effect, live.renewing = live.renewing, None
            assert effect is not None
            ticket = effect.ticket
            if ticket.attempt != effect.attempt:
                return
            if ticket.state is TicketState.LOST and not live.over:
                # Its instance went meanwhile; no slot was there to report it.
                self.attempts.attempt_failed(
                    live, effect.attempt, FaultKind.LOST_CONNECTION, now, None
                )
            elif ticket.state is TicketState.RUNNING:
                self._dispatch(effect, now)

        self.post(go_on)

    async def idle(self) -> None:
        """Returns when no request is open any more."""
        while self.flush.open_streams:
            self._left.clear()
            await self._left.wait()

    # Requests that are no streams (embeddings): their handler makes the call itself.

    def embed_request(
        self, live: LiveRequest, texts: Iterable[str]
    ) -> execution_pb2.ExecuteEmbedRequest:
        """The call for an embedding that was placed, with its grant. Raises GRANT_LAPSED, as the
        instance does, when it may not start any more."""
        message = execution_pb2.ExecuteEmbedRequest()
        message.instance.name = live.instance
        message.instance.address = self.lanes.addresses.get(live.instance, "")
        message.request.request_id = live.ticket.request_id
        message.request.model = live.ticket.model
        for text in texts:
            message.request.inputs.add(text=text)
        start_by_unix_s = self.quota.permit(live)
        if start_by_unix_s is None:
            raise permission_denied(GRANT_LAPSED, "The quota of the request lapsed.")
        message.request.grant.CopyFrom(self._grant(live, start_by_unix_s))
        self.quota.started(live)
        return message

    # The owner task.

    def post(self, command: Callable[[float], object]) -> None:
        """Queues a command for the owner's next turn."""
        self._inbox.append(command)
        self._bell.set()

    async def run(self) -> None:
        """Runs the owner task, and what it leaves to wait elsewhere, until cancelled."""
        async with self._renewals:
            await self._own()

    async def _own(self) -> None:
        """The owner task: a turn per bell or per time at which something would expire."""
        sweep_at = self._loop.time() + SWEEP_INTERVAL_S
        while True:
            now = self._loop.time()
            wake_at = min(self.domain.next_wakeup(now) or sweep_at, sweep_at)
            if not self._inbox and wake_at > now:
                await self._sleep_until(wake_at)
                now = self._loop.time()
            self._bell.clear()
            self.turn(now)
            if now >= sweep_at:
                self.sweep(now)
                sweep_at = now + SWEEP_INTERVAL_S

    def turn(self, now: float) -> None:
        """Applies what happened, lets the domain decide, carries the decisions out."""
        inbox, self._inbox = self._inbox, []
        for command in inbox:
            command(now)
        for effect in self.domain.turn(now):
            if isinstance(effect, Dispatch):
                self._dispatch(effect, now)
            elif isinstance(effect, Refuse):
                live = self.lives.get(effect.ticket.id)
                if live is not None:
                    live.fail(came_to(effect.error, live), effect.outcome)
            elif isinstance(effect, Yield):
                self._yield(effect, now)
            else:
                self._abort(effect, now)
        if now >= self._demand_at_s:
            self._demand_at_s = now + DEMAND_INTERVAL_S
            self.lanes.send_demand()

    async def _sleep_until(self, when: float) -> None:
        timer = self._loop.call_at(when, self._bell.set)
        try:
            await self._bell.wait()
        finally:
            timer.cancel()

    def sweep(self, now: float) -> None:
        """Ends what is past a limit that the domain does not keep, and tells the domain how far
        the rest has come."""
        for live in list(self.lives.values()):
            if live.write_began_s and now - live.write_began_s > self._write_limit_s:
                self._end_slow_writer(live)
            if live.error is not None:
                # Its handler may be held up by a client that does not read: the engine is not.
                if not live.unary:
                    self._stop(live, now, live.outcome or Outcome.CANCELLED)
            elif live.over or not live.first_token_s:
                continue
            elif live.ticket.state in _PAUSED:
                continue  # it goes on later: a pause, which the total deadline alone ends
            elif now - max(live.last_token_s, live.dispatch_s) > live.inter_token_limit_s:
                error = deadline_exceeded(
                    "INTER_TOKEN_TIMEOUT", "no further token came within the inter-token limit"
                )
                live.fail(error, Outcome.INTER_TOKEN_TIMEOUT)
            else:
                made = live.tokens - live.attempt_base
                self.domain.attempts.progressed(live.ticket.id, live.attempt, made)
                self.quota.progressed(live, now)

    def _stop(self, live: LiveRequest, now: float, outcome: Outcome) -> None:
        """Takes a request out of the queue or off its instance, if it is still there."""
        abort = self.domain.cancel(live.ticket.id, now, outcome)
        if abort is not None:
            self._abort(abort, now)

    def _end_slow_writer(self, live: LiveRequest) -> None:
        error = SluiceError(
            Code.RESOURCE_EXHAUSTED,
            "SLOW_CONSUMER",
            f"the client did not read for {self._write_limit_s:.0f} s",
        )
        live.fail(error, Outcome.SLOW_CONSUMER)
        if live.abandon is not None:
            live.abandon()


def no_capacity(retry_after_s: float) -> SluiceError:
    """More open streams than this process can write to in time."""
    return exhausted(
        "TOO_MANY_STREAMS",
        "this scheduler has as many open streams as it can write to in time",
        retry_after_s,
    )
