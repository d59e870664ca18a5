"""A tenant's quotas: what is reserved, by whom, and until when. The rules of ``quota.lua``.

Pure: the store's time comes in as milliseconds. This is the specification of the script that runs
inside the store, and the memory store's own implementation; a test holds both to equal answers.

Rules:

* Requests and tokens count for 60 s from the bucket (250 ms) of their reservation. What is added
  as a lease counts from the lease's end, so that however it is spent, no 60 s hold more than the
  limit.
* What a holder has reserved stays open under its registration (epoch) until it settles. Refunds
  go back into the bucket and day they came from; use beyond a reservation is debt, charged now.
* A holder that was silent for its time to live may be reaped: its slots and everything open come
  back. That happens only before a refusal or a registration, so that an outage of the store, which
  silences all holders alike, takes nothing from anybody. A reaped holder registers anew; what
  it settles for the old epoch is debt.
* Before a refusal, unspent leases of others are waited for, and nobody is given a lease for a
  while (``contended``).
* Time never runs backwards: when the store's clock steps back, an offset takes the step out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from sluice.quota.exchange import (
    BUCKET_MS,
    NOTHING,
    WINDOW_MS,
    Amounts,
    Answer,
    Decision,
    Exchange,
    Limits,
    Need,
    QuotaKind,
    QuotaUse,
    Settlement,
    StaleExchangeError,
    Verdict,
)

LEASE_SHARE: Final = 8  # a lease takes at most this part of the room that is left
CONTENDED_MS: Final = 1_000  # how long nobody is given a lease after a WAIT
WAIT_SLACK_MS: Final = 20  # from a lease's end to its return
SLOT_RETRY_MS: Final = 1_000  # when a slot frees is not known here
DAY_MS: Final = 86_400_000
HOLDERS_MAX: Final = 64
_UNBOUNDED: Final = 10**18


class TooManyHoldersError(Exception):
    """More holders than :data:`HOLDERS_MAX` are alive."""


@dataclass(slots=True)
class _Holder:
    name: str
    expires_ms: int = 0
    sequence: int = 0
    answer: Answer | None = None
    slots: int = 0
    lease_end_ms: int = 0
    leased: Amounts = NOTHING
    open: dict[tuple[int, int], list[int]] = field(default_factory=dict)  # [requests, tokens]


@dataclass(slots=True)
class _Short:
    """A quota without room, and by how much."""

    kind: QuotaKind
    missing: int


class QuotaBook:
    """The book of one tenant."""

    def __init__(self, window_ms: int = WINDOW_MS, bucket_ms: int = BUCKET_MS) -> None:
        self._window_ms, self._bucket_ms = window_ms, bucket_ms
        self._last_ms = self._offset_ms = 0
        self._first_bucket = 0
        self._charges: dict[int, list[int]] = {}  # bucket -> [requests, tokens]
        self._requests = self._tokens = self._slots = 0
        self._day = self._day_tokens = 0
        self._last_epoch = 0
        self._contended_until_ms = 0
        self._holders: dict[int, _Holder] = {}
        self._epochs: dict[str, int] = {}

    def exchange(self, exchange: Exchange, clock_ms: int) -> Answer:
        """Carries an exchange out. Raises StaleExchangeError, TooManyHoldersError."""
        now = max(clock_ms + self._offset_ms, self._last_ms)
        epoch = self._epochs.get(exchange.holder, 0)
        if epoch:
            known = self._holders[epoch]
            if known.sequence == exchange.sequence:
                assert known.answer is not None
                known.expires_ms = now + exchange.holder_ttl_ms
                return known.answer
            if known.sequence > exchange.sequence:
                raise StaleExchangeError
        self._offset_ms = now - clock_ms
        self._advance(now, clock_ms)
        epoch = epoch or self._register(exchange, now, clock_ms)
        holder = self._holders[epoch]
        self._settle(exchange, epoch, holder, now)
        verdicts, granted = self._decide(exchange, epoch, holder, now, clock_ms)
        answer = self._grant(exchange, epoch, verdicts, granted, now, clock_ms)
        holder.expires_ms = now + exchange.holder_ttl_ms
        holder.sequence, holder.answer = exchange.sequence, answer
        return answer

    def use(self, clock_ms: int) -> QuotaUse:
        """What is reserved now. Changes nothing."""
        now = max(clock_ms + self._offset_ms, self._last_ms)
        tail = (now - self._window_ms) // self._bucket_ms
        counted = [charge for bucket, charge in self._charges.items() if bucket >= tail]
        return QuotaUse(
            requests=sum(requests for requests, _ in counted),
            tokens=sum(tokens for _, tokens in counted),
            slots=self._slots,
            day_tokens=self._day_tokens if clock_ms // DAY_MS <= self._day else 0,
            holders=len(self._holders),
        )

    # --- time ----------------------------------------------------------------------------------

    def _advance(self, now: int, clock_ms: int) -> None:
        self._last_ms = now
        if clock_ms // DAY_MS > self._day:
            self._day, self._day_tokens = clock_ms // DAY_MS, 0
        tail = (now - self._window_ms) // self._bucket_ms
        if self._first_bucket >= tail:
            return
        for bucket in [bucket for bucket in self._charges if bucket < tail]:
            requests, tokens = self._charges.pop(bucket)
            self._requests -= requests
            self._tokens -= tokens
        self._first_bucket = tail

    # --- holders -------------------------------------------------------------------------------

    def _register(self, exchange: Exchange, now: int, clock_ms: int) -> int:
        self._reap(0, now)
        if len(self._holders) >= HOLDERS_MAX:
            raise TooManyHoldersError
        self._last_epoch = epoch = max(self._last_epoch + 1, clock_ms)
        self._holders[epoch] = _Holder(exchange.holder, slots=exchange.running)
        self._epochs[exchange.holder] = epoch
        self._slots += exchange.running
        return epoch

    def _reap(self, spared: int, now: int) -> None:
        dead = [e for e, h in self._holders.items() if e != spared and h.expires_ms <= now]
        for epoch in dead:
            holder = self._holders.pop(epoch)
            del self._epochs[holder.name]
            self._slots -= holder.slots
            for (bucket, day), (requests, tokens) in holder.open.items():
                self._refund(bucket, day, requests, tokens)

    # --- charges -------------------------------------------------------------------------------

    def _charge(self, bucket: int, requests: int, tokens: int) -> None:
        charge = self._charges.setdefault(bucket, [0, 0])
        charge[0] += requests
        charge[1] += tokens
        self._requests += requests
        self._tokens += tokens

    def _refund(self, bucket: int, day: int, requests: int, tokens: int) -> None:
        if bucket >= self._first_bucket:
            self._charge(bucket, -requests, -tokens)
        if day == self._day:
            self._day_tokens -= tokens

    def _settle(self, exchange: Exchange, epoch: int, holder: _Holder, now: int) -> None:
        overuse_requests, overuse_tokens = 0, exchange.overuse_tokens
        for one in exchange.settlements:
            if one.epoch == epoch:
                self._close(one, holder)
            else:
                overuse_tokens += max(one.reserved.tokens - one.tokens_refund, 0)
                overuse_requests += max(one.reserved.requests - one.requests_refund, 0)
        if overuse_requests or overuse_tokens:
            self._charge(now // self._bucket_ms, overuse_requests, overuse_tokens)
            self._day_tokens += overuse_tokens

    def _close(self, one: Settlement, holder: _Holder) -> None:
        place = (one.bucket, one.day)
        open_requests, open_tokens = holder.open.get(place, (0, 0))
        requests = min(one.reserved.requests, open_requests)
        tokens = min(one.reserved.tokens, open_tokens)
        if requests == open_requests and tokens == open_tokens:
            holder.open.pop(place, None)
        else:
            holder.open[place] = [open_requests - requests, open_tokens - tokens]
        self._refund(
            one.bucket, one.day, min(one.requests_refund, requests), min(one.tokens_refund, tokens)
        )
        slots = min(one.reserved.slots, holder.slots)
        holder.slots -= slots
        self._slots -= slots

    # --- decisions -----------------------------------------------------------------------------

    def _room(self, limits: Limits) -> tuple[int, int, int, int]:
        """Requests, tokens, slots and tokens of the day that are left; negative with debt."""
        pairs = (
            (limits.requests_per_min, self._requests),
            (limits.tokens_per_min, self._tokens),
            (limits.concurrent_requests, self._slots),
            (limits.tokens_per_day, self._day_tokens),
        )
        requests, tokens, slots, day = (
            _UNBOUNDED if limit is None else limit - used for limit, used in pairs
        )
        return requests, tokens, slots, day

    def _lacks(self, limits: Limits, tokens: int) -> list[_Short]:
        wanted = (1, tokens, 1, tokens)
        return [
            _Short(QuotaKind(number), want - room)
            for number, (want, room) in enumerate(zip(wanted, self._room(limits), strict=True), 1)
            if room < want
        ]

    def _decide(
        self, exchange: Exchange, epoch: int, holder: _Holder, now: int, clock_ms: int
    ) -> tuple[list[Verdict], Amounts]:
        verdicts: list[Verdict] = []
        requests = tokens = 0
        reaped = False
        for need in exchange.needs:
            short = self._lacks(exchange.limits, need.tokens)
            if short and not reaped:
                self._reap(epoch, now)
                reaped = True
                short = self._lacks(exchange.limits, need.tokens)
            if short:
                verdicts.append(self._deny(exchange.limits, need, short, epoch, now, clock_ms))
                continue
            # Buckets follow in one charge at the end; the sums have to be right for the next need.
            self._requests += 1
            self._tokens += need.tokens
            self._day_tokens += need.tokens
            self._slots += 1
            holder.slots += 1
            requests += 1
            tokens += need.tokens
            verdicts.append(Verdict(Decision.GRANTED))
        return verdicts, Amounts(requests, tokens)

    def _deny(
        self,
        limits: Limits,
        need: Need,
        short: list[_Short],
        epoch: int,
        now: int,
        clock_ms: int,
    ) -> Verdict:
        all_limits = {
            QuotaKind.REQUESTS_PER_MIN: (limits.requests_per_min, 1),
            QuotaKind.TOKENS_PER_MIN: (limits.tokens_per_min, need.tokens),
            QuotaKind.CONCURRENT_REQUESTS: (limits.concurrent_requests, 1),
            QuotaKind.TOKENS_PER_DAY: (limits.tokens_per_day, need.tokens),
        }
        for one in short:
            limit, least = all_limits[one.kind]
            if limit is not None and limit < least:
                return Verdict(Decision.NEVER, 0, one.kind)
        lent, lent_until = self._lent(epoch, now)
        if not need.final and all(lent[one.kind] >= one.missing for one in short):
            self._contended_until_ms = now + CONTENDED_MS
            return Verdict(Decision.WAIT, lent_until - now + WAIT_SLACK_MS, short[0].kind)
        delay, kind = -1, QuotaKind.NONE
        for one in short:
            wait = self._delay(one, now, clock_ms)
            if wait > delay:
                delay, kind = wait, one.kind
        return Verdict(Decision.REFUSED, delay, kind)

    def _delay(self, short: _Short, now: int, clock_ms: int) -> int:
        if short.kind is QuotaKind.CONCURRENT_REQUESTS:
            return SLOT_RETRY_MS
        if short.kind is QuotaKind.TOKENS_PER_DAY:
            return DAY_MS - clock_ms % DAY_MS
        part = 0 if short.kind is QuotaKind.REQUESTS_PER_MIN else 1
        missing = short.missing
        for bucket in sorted(self._charges):
            missing -= self._charges[bucket][part]
            if missing <= 0:
                return (bucket + 1) * self._bucket_ms + self._window_ms - now
        return self._window_ms

    def _lent(self, epoch: int, now: int) -> tuple[dict[QuotaKind, int], int]:
        """What others may still give back of leases, and until when: an upper bound."""
        until, requests, tokens, slots = now, 0, 0, 0
        for other, holder in self._holders.items():
            if other != epoch and holder.lease_end_ms > now:
                requests += holder.leased.requests
                tokens += holder.leased.tokens
                slots += holder.leased.slots
                until = max(until, holder.lease_end_ms)
        lent = {
            QuotaKind.REQUESTS_PER_MIN: requests,
            QuotaKind.TOKENS_PER_MIN: tokens,
            QuotaKind.CONCURRENT_REQUESTS: slots,
            QuotaKind.TOKENS_PER_DAY: tokens,
        }
        return lent, until

    def _grant(
        self,
        exchange: Exchange,
        epoch: int,
        verdicts: list[Verdict],
        granted: Amounts,
        now: int,
        clock_ms: int,
    ) -> Answer:
        holder = self._holders[epoch]
        lease, lease_ms = NOTHING, 0
        if all(v.decision is Decision.GRANTED for v in verdicts) and (
            now >= self._contended_until_ms
        ):
            lease = self._lease(exchange)
        if lease is not NOTHING:
            # A lease ends with the day, so that it is spent on the day it was charged to.
            lease_ms = min(exchange.lease_ms, DAY_MS - clock_ms % DAY_MS)
            before = holder.leased if holder.lease_end_ms > now else NOTHING
            holder.leased = Amounts(
                before.requests + lease.requests,
                before.tokens + lease.tokens,
                before.slots + lease.slots,
            )
            holder.lease_end_ms = now + lease_ms
            holder.slots += lease.slots
            self._slots += lease.slots
            self._day_tokens += lease.tokens
        bucket = (now + lease_ms) // self._bucket_ms
        requests, tokens = granted.requests + lease.requests, granted.tokens + lease.tokens
        if requests:
            # The sums already hold what was granted.
            self._requests -= granted.requests
            self._tokens -= granted.tokens
            self._charge(bucket, requests, tokens)
            opened = holder.open.setdefault((bucket, self._day), [0, 0])
            opened[0] += requests
            opened[1] += tokens
        contended = now < self._contended_until_ms
        return Answer(epoch, bucket, self._day, lease, lease_ms, contended, tuple(verdicts))

    def _lease(self, exchange: Exchange) -> Amounts:
        wanted = exchange.lease
        if exchange.lease_ms <= 0 or wanted.requests <= 0:
            return NOTHING
        requests, tokens, slots, day = (room // LEASE_SHARE for room in self._room(exchange.limits))
        lease = Amounts(
            min(wanted.requests, requests),
            min(wanted.tokens, tokens, day),
            min(wanted.slots, slots),
        )
        if lease.requests < 1 or lease.tokens < 1 or lease.slots < 1:
            return NOTHING
        return lease
