"""This holder's account of one tenant's quotas.

Pure: times are seconds of one monotonic clock that also counts while the process is stopped. The
caller sends what :meth:`QuotaAccount.compose` makes and hands the answer to
:meth:`QuotaAccount.apply`; there is at most one exchange under way, and one without an answer is
sent again unchanged, so that a lost reply strands nothing.

What keeps the limit over all holders:

* A lease is spent only until ``margin`` before its end, counted from before it was asked for, so
  that the service's clock, which began later, is never overtaken.
* A reservation may start work only while this holder's registration surely lives (``may_start``);
  afterwards the service may have given it to others. The grant of a start must not outlive that.
* When the service answers with another epoch, the earlier registration was given to others: leases
  are void, what has not started must be reserved anew, what runs is reported as running.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Final

from scheduler_svc.domain.quota_errors import never, refused, too_many_waiting, unreachable
from scheduler_svc.domain.quota_ledger import Settlements
from sluice.errors import SluiceError
from sluice.quota.exchange import (
    LEASE_MS_MAX,
    NEEDS_MAX,
    NOTHING,
    Amounts,
    Answer,
    Decision,
    Exchange,
    Limits,
    Need,
    QuotaKind,
    Verdict,
)


@dataclass(frozen=True, slots=True)
class QuotaTimes:
    """Times of a holder, in seconds."""

    wait_s: float = 0.25  # for the service, before a tenant's fail policy decides
    recall_s: float = 1.25  # for unspent leases of others; a lease's longest life and a slack
    lease_s: float = 0.5
    margin_s: float = 0.05  # covers clocks that run apart by 5 % over a lease of 1 s
    holder_ttl_s: float = 3.0
    heartbeat_s: float = 1.0
    flush_s: float = 0.1  # how long settlements gather
    full_s: float = 0.1  # for so long a refusal of the service answers other requests too
    retry_s: float = 0.25  # pause after an exchange that failed
    slot_grace_s: float = 0.1  # for a slot that is being given back through another scheduler

    def __post_init__(self) -> None:
        assert self.margin_s < self.lease_s <= LEASE_MS_MAX / 1000
        assert 2 * self.heartbeat_s < self.holder_ttl_s


WAITING_MAX: Final = 1024  # requests of one tenant that wait for an answer
LEASE_REQUESTS_MIN: Final = 4  # a tenant with fewer requests in a lease's life takes no leases
LEASE_HEADROOM: Final = 1.5  # a lease holds this many times the expected demand
SILENT_REQUESTS: Final = 4.0  # so many expected and none seen: the tenant has fallen silent
DELAY_SPREAD: Final = 0.1
SLOTS_SCARCE: Final = 4  # slots are scarce when this times what runs here is over the limit
RENEW_PART: Final = 0.3  # of a lease's life and of its amounts; with less it is renewed


@dataclass(eq=False, slots=True)
class Reservation:
    """What a request holds of its tenant's quotas: one request, one slot, and tokens.

    Not counted: the tenant has no limits, or went on while the service was unreachable."""

    tenant: str
    tokens: int
    epoch: int = 0
    bucket: int = 0
    day: int = 0
    slot_epoch: int = 0
    counted: bool = False
    started: bool = False
    settled_tokens: int = 0  # of ``tokens``, already reported as used
    open: bool = True


@dataclass(eq=False, slots=True)
class Waiter:
    """A request that waits for the service."""

    tokens: int
    wait_until: float  # unspent leases are waited for until then
    answer_by: float  # without an answer by then the fail policy decides
    ask_at: float
    done: bool = False
    asked_again: bool = False  # for a slot


@dataclass(frozen=True, slots=True)
class _Full:
    """What the service said last when it had no room."""

    verdict: Verdict
    tokens: int  # that were asked for
    at: float
    until: float


Outcome = tuple[Waiter, Reservation | SluiceError]


@dataclass(slots=True)
class _Lease:
    epoch: int
    bucket: int
    day: int
    left: Amounts
    usable_until: float
    renew_at: float
    low: Amounts  # with less left it is renewed early
    renewed: bool = False


def _part(amounts: Amounts, part: float) -> Amounts:
    return Amounts(*(round(part * n) for n in (amounts.requests, amounts.tokens, amounts.slots)))


def _less(left: Amounts, low: Amounts) -> bool:
    """Whether any of the three is below its mark."""
    return left.requests < low.requests or left.tokens < low.tokens or left.slots < low.slots


@dataclass(slots=True)
class _UnderWay:
    exchange: Exchange
    waiters: list[Waiter]
    running: frozenset[Reservation]
    first_sent_at: float
    sent_at: float
    in_flight: bool = True
    retry_at: float = 0.0


@dataclass(slots=True)
class AccountCounts:
    """What happened, for metrics; of all accounts of a client."""

    local: int = 0  # reserved from a lease
    asked: int = 0  # reserved by asking
    refused: Counter[QuotaKind] = field(default_factory=Counter)
    failed_open: int = 0
    failed_closed: int = 0
    lapsed: int = 0  # registrations that were given to others


@dataclass(slots=True)
class _Demand:
    """Requests and tokens per second, smoothed over exchanges."""

    since: float
    requests: int = 0
    tokens: int = 0
    requests_per_s: float = 0.0
    tokens_per_s: float = 0.0

    def note(self, tokens: int) -> None:
        self.requests += 1
        self.tokens += tokens

    def fold(self, now: float) -> None:
        """Takes what was noted into the rates; too short a time says nothing."""
        elapsed = now - self.since
        if elapsed < 0.05:
            return
        if not self.requests and self.requests_per_s * elapsed > SILENT_REQUESTS:
            self.requests_per_s = self.tokens_per_s = 0.0
        weight = min(1.0, elapsed)
        self.requests_per_s += weight * (self.requests / elapsed - self.requests_per_s)
        self.tokens_per_s += weight * (self.tokens / elapsed - self.tokens_per_s)
        self.since, self.requests, self.tokens = now, 0, 0

    def lease(self, seconds: float) -> Amounts:
        """What a lease for ``seconds`` should hold; nothing when it would hardly be used."""
        requests = self.requests_per_s * seconds * LEASE_HEADROOM
        if requests < LEASE_REQUESTS_MIN:
            return NOTHING
        tokens = max(1, round(self.tokens_per_s * seconds * LEASE_HEADROOM))
        return Amounts(round(requests), tokens, round(requests))


@dataclass(slots=True)
class QuotaAccount:
    """The account. ``now`` never falls."""

    tenant: str
    holder: str
    times: QuotaTimes
    limits: Limits
    fail_open: bool
    created_at: float
    counts: AccountCounts = field(default_factory=AccountCounts)
    epoch: int = 0
    valid_until: float = 0.0  # the registration surely lives until then
    reachable: bool = True  # the last exchange was answered
    lease_low: bool = False  # the last reservation left a lease that is to be renewed now
    draining: bool = False  # leases go back at once, and none is taken
    _contended: bool = False
    _full: _Full | None = None
    _leases: list[_Lease] = field(default_factory=list)
    _waiters: deque[Waiter] = field(default_factory=deque)
    _live: set[Reservation] = field(default_factory=set)
    _settlements: Settlements = field(default_factory=Settlements)
    _under_way: _UnderWay | None = None
    _ended_under_way: int = 0  # of those reported as running by the exchange under way
    _sent_at: float = 0.0
    _demand: _Demand = field(init=False)

    def __post_init__(self) -> None:
        self._demand = _Demand(self.created_at)

    # --- reserving -----------------------------------------------------------------------------

    def reserve(self, tokens: int, now: float) -> Reservation | None:
        """A reservation without asking: from a lease, or where nothing limits. ``None``: ask."""
        if self.limits.unlimited:
            return Reservation(self.tenant, tokens)
        for lease in self._leases:
            left = lease.left
            if now < lease.usable_until and left.requests and left.slots and left.tokens >= tokens:
                lease.left = Amounts(left.requests - 1, left.tokens - tokens, left.slots - 1)
                self.lease_low = not lease.renewed and _less(lease.left, lease.low)
                if self.lease_low:
                    lease.renew_at = min(lease.renew_at, now)
                self._demand.note(tokens)
                self.counts.local += 1
                return self._reserved(tokens, lease.epoch, lease.bucket, lease.day)
        return None

    def set_limits(self, limits: Limits, *, fail_open: bool) -> None:
        """Takes effect for the next reservation."""
        self.limits, self.fail_open = limits, fail_open
        self._full = None

    def ask(self, tokens: int, now: float) -> Waiter | Reservation | SluiceError:
        """Queues a request for the next exchange. While the service is known to be unreachable the
        fail policy answers at once, so that an outage costs no waiting."""
        if not self.reachable:
            return self._fail(tokens)
        full = self._full
        if full is not None and now < full.until and tokens >= full.tokens:
            return self._refuse(full.verdict, now - full.at)
        if len(self._waiters) >= WAITING_MAX:
            return too_many_waiting()
        waiter = Waiter(tokens, now + self.times.recall_s, now + self.times.wait_s, now)
        self._waiters.append(waiter)
        return waiter

    def give_up(self, waiter: Waiter) -> None:
        """The request went away. What it is granted nevertheless is given back."""
        waiter.done = True
        if waiter in self._waiters:
            self._waiters.remove(waiter)

    def _reserved(self, tokens: int, epoch: int, bucket: int, day: int) -> Reservation:
        made = Reservation(self.tenant, tokens, epoch, bucket, day, epoch, counted=True)
        self._live.add(made)
        return made

    def _fail(self, tokens: int) -> Reservation | SluiceError:
        if self.fail_open:
            self.counts.failed_open += 1
            return Reservation(self.tenant, tokens)
        self.counts.failed_closed += 1
        return unreachable(self.times.retry_s)

    # --- starting and ending -------------------------------------------------------------------

    def may_start(self, reservation: Reservation, now: float) -> float:
        """Seconds for which a grant of this reservation may be valid; 0 or less: it may not start
        and has to be released and reserved anew. Infinite when nothing is counted."""
        if not reservation.counted:
            return float("inf")
        if reservation.epoch != self.epoch:
            return 0.0
        return self.valid_until - now

    def started(self, reservation: Reservation) -> None:
        """Work under it was sent out."""
        reservation.started = True

    def progressed(self, reservation: Reservation, used_tokens: int, now: float) -> None:
        """Reports what it has used so far: what a killed holder's tenant pays for."""
        used = min(used_tokens, reservation.tokens)
        more = used - reservation.settled_tokens
        if reservation.open and reservation.counted and more > 0:
            reservation.settled_tokens = used
            self._settlements.close(
                reservation.epoch, reservation.bucket, reservation.day, now, tokens=more
            )

    def settle(self, reservation: Reservation, used_tokens: int, now: float) -> None:
        """Ends it with what was used: the rest comes back, more is debt. Idempotent."""
        self._end(reservation, used_tokens, 0, now)

    def release(self, reservation: Reservation, now: float) -> None:
        """Ends one that never ran: nothing is charged, not the request either. Idempotent."""
        self._end(reservation, 0, 1, now)

    def _end(self, one: Reservation, used_tokens: int, requests_refund: int, now: float) -> None:
        if not one.open:
            return
        one.open = False
        if not one.counted:
            return
        self._live.discard(one)
        if self._under_way is not None and one in self._under_way.running:
            self._ended_under_way += 1
        used = max(used_tokens, one.settled_tokens)
        self._settlements.close(
            one.epoch,
            one.bucket,
            one.day,
            now,
            requests=1,
            tokens=one.tokens - one.settled_tokens,
            slots=1 if one.slot_epoch == one.epoch else 0,
            requests_refund=requests_refund,
            tokens_refund=max(one.tokens - used, 0),
        )
        if one.slot_epoch != one.epoch:
            self._settlements.close(one.slot_epoch, 0, 0, now, slots=1)
        self._settlements.overuse_tokens += max(used - one.tokens, 0)
        if requests_refund or used < one.tokens:
            self._full = None  # there is room again

    # --- exchanges -----------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether nothing is held, waits or is under way: the account may be forgotten."""
        return not (
            self._leases or self._waiters or self._live or self._settlements or self._under_way
        )

    @property
    def _slots_scarce(self) -> bool:
        """Whether a slot that is free again may be waited for: it is given back at once then."""
        limit = self.limits.concurrent_requests
        return limit is not None and (len(self._live) + 1) * SLOTS_SCARCE > limit

    @property
    def leased(self) -> Amounts:
        """What is left of its leases."""
        left = [lease.left for lease in self._leases]
        return Amounts(
            sum(one.requests for one in left),
            sum(one.tokens for one in left),
            sum(one.slots for one in left),
        )

    def due_at(self) -> float | None:
        """When the next exchange is due; ``None``: not before something happens. No exchange is
        due while one is in flight."""
        if self._under_way is not None:
            return None if self._under_way.in_flight else self._under_way.retry_at
        times = [waiter.ask_at for waiter in self._waiters]
        if self._settlements:
            times.append(
                self._settlements.since + (0.0 if self._slots_scarce else self.times.flush_s)
            )
        if self._leases and (self._contended or self.draining):
            times.append(self._sent_at)  # at once: somebody waits for them
        times += [lease.renew_at for lease in self._leases]
        if self._live:
            times.append(self._sent_at + self.times.heartbeat_s)
        return min(times) if times else None

    def expire(self, now: float) -> list[Outcome]:
        """Waiters that had no answer in time: the fail policy decides."""
        late = [w for w in self._waiters if w.answer_by <= now]
        if self._under_way is not None:
            late += [w for w in self._under_way.waiters if not w.done and w.answer_by <= now]
        outcomes: list[Outcome] = []
        for waiter in late:
            self.give_up(waiter)
            outcomes.append((waiter, self._fail(waiter.tokens)))
        return outcomes

    def stood_still(self, seconds: float) -> None:
        """This process did not run for a while: answers may have come that it has not read yet,
        so whoever waits is given that time again."""
        waiting = list(self._waiters)
        if self._under_way is not None:
            waiting += self._under_way.waiters
        for waiter in waiting:
            waiter.answer_by += seconds

    def expires_at(self) -> float | None:
        """When :meth:`expire` has something to do."""
        waiting = [w.answer_by for w in self._waiters]
        if self._under_way is not None:
            waiting += [w.answer_by for w in self._under_way.waiters if not w.done]
        return min(waiting) if waiting else None

    def compose(self, sequence: int, now: float) -> Exchange | None:
        """What to send now; ``None``: nothing is due. ``sequence`` is used only for a new exchange
        and must be larger than any before."""
        due = self.due_at()
        if due is None or due > now:
            return None
        self._sent_at = now
        again = self._under_way
        if again is not None:
            again.in_flight, again.sent_at = True, now
            return again.exchange
        asking = [w for w in self._waiters if w.ask_at <= now][:NEEDS_MAX]
        for waiter in asking:
            self._waiters.remove(waiter)
        self._demand.fold(now)
        self._give_leases_back(bool(asking), now)
        wanted = self._wanted()
        running = frozenset(one for one in self._live if one.started)
        settlements, overuse_tokens = self._settlements.take(now)
        exchange = Exchange(
            holder=self.holder,
            sequence=sequence,
            limits=self.limits,
            running=len(running),
            settlements=settlements,
            overuse_tokens=overuse_tokens,
            needs=tuple(Need(w.tokens, now >= w.wait_until) for w in asking),
            lease=wanted,
            lease_ms=round(self.times.lease_s * 1000) if wanted is not NOTHING else 0,
            holder_ttl_ms=round(self.times.holder_ttl_s * 1000),
        )
        self._under_way = _UnderWay(exchange, asking, running, now, now)
        self._ended_under_way = 0
        return exchange

    def _give_leases_back(self, asking: bool, now: float) -> None:
        """Leases that have ended, and all of them when somebody lacks room: here (a request did
        not fit into them) or elsewhere."""
        kept = []
        back = asking or self._contended or self.draining
        for lease in self._leases:
            if not (back or now >= lease.usable_until):
                if now >= lease.renew_at:
                    # It goes on to its end beside the one that is asked for now.
                    lease.renew_at, lease.renewed = lease.usable_until, True
                kept.append(lease)
                continue
            left = lease.left
            self._full = None  # what is given back is room
            self._settlements.close(
                lease.epoch,
                lease.bucket,
                lease.day,
                now,
                requests=left.requests,
                tokens=left.tokens,
                slots=left.slots,
                requests_refund=left.requests,
                tokens_refund=left.tokens,
            )
        self._leases = kept

    def _wanted(self) -> Amounts:
        """The lease to ask for: the demand, unless most of it is there already."""
        unwanted = self._contended or self.draining
        wanted = NOTHING if unwanted else self._demand.lease(self.times.lease_s)
        fresh = [lease for lease in self._leases if not lease.renewed]
        if any(not _less(lease.left, lease.low) for lease in fresh):
            return NOTHING
        return wanted

    def again(self, now: float) -> None:
        """The answer was lost by this process's own fault: the exchange is sent again at once."""
        sent = self._under_way
        assert sent is not None and sent.in_flight
        sent.in_flight, sent.retry_at = False, now

    def failed(self, now: float) -> list[Outcome]:
        """The exchange failed, or its answer did not come: it is sent again after a pause."""
        sent = self._under_way
        assert sent is not None and sent.in_flight
        sent.in_flight, sent.retry_at = False, now + self.times.retry_s
        self.reachable = False
        waiting = [*self._waiters, *(w for w in sent.waiters if not w.done)]
        outcomes: list[Outcome] = []
        for waiter in waiting:
            self.give_up(waiter)
            outcomes.append((waiter, self._fail(waiter.tokens)))
        return outcomes

    def apply(self, answer: Answer, now: float) -> list[Outcome]:
        """The exchange was answered."""
        sent = self._under_way
        assert sent is not None and sent.in_flight
        self._under_way = None
        self.reachable = True
        self._contended = answer.contended
        # A repeated exchange renews the registration too, but a lease began with the first.
        self.valid_until = sent.sent_at + self.times.holder_ttl_s - self.times.margin_s
        if answer.epoch != self.epoch:
            self._register(answer.epoch, sent, now)
        outcomes: list[Outcome] = []
        for waiter, verdict in zip(sent.waiters, answer.verdicts, strict=True):
            outcomes += self._answered(waiter, verdict, answer, now)
        if answer.lease.requests:
            life_s = answer.lease_ms / 1000 - self.times.margin_s
            end = sent.first_sent_at + life_s
            self._leases.append(
                _Lease(
                    answer.epoch,
                    answer.bucket,
                    answer.day,
                    answer.lease,
                    end,
                    end - RENEW_PART * max(life_s, 0.0),
                    low=_part(answer.lease, RENEW_PART),
                )
            )
        return outcomes

    def _register(self, epoch: int, sent: _UnderWay, now: float) -> None:
        if self.epoch:
            self.counts.lapsed += 1
            self._leases = []
            for one in sent.running:
                one.slot_epoch = epoch
            if self._ended_under_way:
                self._settlements.close(epoch, 0, 0, now, slots=self._ended_under_way)
        self.epoch = epoch

    def _refuse(self, verdict: Verdict, since_s: float) -> SluiceError:
        """The refusal, ``since_s`` after the service gave it. Its delay is what the service said,
        lengthened by up to a tenth: who was refused together does not come back together."""
        number = self.counts.refused.total()
        self.counts.refused[verdict.quota] += 1
        spread = number * 2_654_435_761 % 2**32 / 2**32  # Knuth's hash, 0 to 1
        delay_s = verdict.delay_ms / 1000
        delay_s = delay_s * (1.0 + DELAY_SPREAD * spread) - since_s
        return refused(verdict.quota, delay_s, self.tenant, self.limits)

    def _note_full(self, tokens: int, verdict: Verdict, now: float) -> None:
        """Whoever asks for as much within the next moment would hear the same: a tenant far over
        its limit must not cost an exchange for each of its requests. Slots come and go too fast."""
        if verdict.quota is QuotaKind.CONCURRENT_REQUESTS:
            return
        least = 0 if verdict.quota is QuotaKind.REQUESTS_PER_MIN else tokens
        until = now + min(self.times.full_s, verdict.delay_ms / 1000)
        self._full = _Full(verdict, least, now, until)

    def _ask_later(self, waiter: Waiter, at: float) -> None:
        waiter.ask_at = at
        waiter.answer_by = at + self.times.wait_s
        self._waiters.append(waiter)

    def _answered(
        self, waiter: Waiter, verdict: Verdict, answer: Answer, now: float
    ) -> list[Outcome]:
        if verdict.decision is Decision.GRANTED:
            made = self._reserved(waiter.tokens, answer.epoch, answer.bucket, answer.day)
            if waiter.done:
                self.release(made, now)
                return []
            self._demand.note(waiter.tokens)
            self.counts.asked += 1
            waiter.done = True
            return [(waiter, made)]
        if waiter.done:
            return []
        if verdict.decision is Decision.WAIT and now < waiter.wait_until:
            self._ask_later(waiter, min(now + verdict.delay_ms / 1000, waiter.wait_until))
            return []
        if (
            verdict.decision is Decision.REFUSED
            and verdict.quota is QuotaKind.CONCURRENT_REQUESTS
            and not waiter.asked_again
        ):
            # Its client's last request may have just ended at another scheduler, whose word is
            # still on its way: else one after the other would be too many at once.
            waiter.asked_again = True
            self._ask_later(waiter, now + self.times.slot_grace_s)
            return []
        waiter.done = True
        if verdict.decision is Decision.REFUSED:
            self._note_full(waiter.tokens, verdict, now)
        if verdict.decision is Decision.NEVER:
            self.counts.refused[verdict.quota] += 1
            return [(waiter, never(verdict.quota, self.tenant, self.limits))]
        return [(waiter, self._refuse(verdict, 0.0))]
