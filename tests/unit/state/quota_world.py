"""A world of holders, one quota book and a bad network, in event-driven virtual time.

Holders are the real accounts, the service is the real book; what lies between loses, delays and
repeats. Holders stop, go on, die and are born again; each has a clock of its own. A reference that
keeps a plain list of reservations judges at every grant.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from scheduler_svc.domain.quota import Outcome, QuotaAccount, QuotaTimes, Reservation, Waiter
from sluice.errors import SluiceError
from sluice.quota.exchange import Answer, Exchange, Limits, StaleExchangeError
from state_svc.domain.quota_book import QuotaBook

EPOCH_MS = 1_800_000_000_000
TENANT = "t"


@dataclass(eq=False)
class Held:
    """What the reference knows of one reservation."""

    holder: Holder
    reservation: Reservation
    at: float
    used: int | None = None  # once settled
    released: bool = False
    ended_at: float = 0.0

    def open_now(self, now: float) -> bool:
        """Whether it is held: not ended, and its holder's registration surely lives."""
        return self.used is None and not self.released and self._alive(now)

    def _alive(self, now: float) -> bool:
        account = self.holder.account
        same = self.reservation.epoch == account.epoch
        return same and account.valid_until > self.holder.clock(now)

    def counts(self, now: float) -> bool:
        """Whether its use counts: held, or settled by word of a holder that lived to give it."""
        if self.used is None:
            return self.open_now(now)
        return self._alive(now) or self.ended_at <= self.holder.reported_until

    def tokens(self) -> int:
        """What it holds or has used; more than was reserved is debt."""
        reserved = self.reservation.tokens
        return reserved if self.used is None else min(self.used, reserved)


@dataclass(eq=False)
class Holder:
    """One process: its account, its clock, whether it runs."""

    world: World
    name: str
    skew_s: float
    account: QuotaAccount = field(init=False)
    sequence: int = 0
    stopped_until: float = 0.0
    dead: bool = False
    reported_until: float = 0.0  # what ended by then is in the book
    waiting: set[Waiter] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.account = QuotaAccount(
            TENANT, self.name, self.world.times, self.world.limits, False, self.clock(0.0)
        )

    def clock(self, now: float) -> float:
        return now + self.skew_s


class World:
    """Everything. ``loss`` is the chance that a message is lost, each way."""

    def __init__(self, seed: int, limits: Limits, times: QuotaTimes, *, loss: float = 0.1) -> None:
        self.random = random.Random(seed)
        self.delays_s: tuple[float, ...] = (0.001, 0.002, 0.005, 0.02, 0.1)
        self.limits, self.times, self.loss = limits, times, loss
        self.book = QuotaBook()
        self.now = 0.0
        self.held: list[Held] = []
        self.holders: list[Holder] = []
        self.refusals: list[SluiceError] = []
        self.granted = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._names = count()
        self._composed: dict[tuple[str, int], float] = {}
        self._decided: dict[tuple[str, int], float] = {}  # exchange -> when it was carried out

    # --- time ----------------------------------------------------------------------------------

    def at(self, time: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), do))

    def run_until(self, end: float) -> None:
        while self._events and self._events[0][0] <= end:
            time, _, do = heapq.heappop(self._events)
            self.now = max(self.now, time)
            do()
        self.now = end

    def _for(self, holder: Holder, time: float, do: Callable[[], None]) -> None:
        """What a holder does at ``time``: not while it is stopped, never once it is dead."""

        def act() -> None:
            if holder.dead:
                return
            if holder.stopped_until > self.now:
                self.at(holder.stopped_until, act)
                return
            do()

        self.at(time, act)

    # --- holders -------------------------------------------------------------------------------

    def born(self) -> Holder:
        holder = Holder(self, f"h{next(self._names)}", self.random.uniform(0, 1000))
        self.holders.append(holder)
        self._for(holder, self.now, lambda: self._tick(holder))
        return holder

    def stop(self, holder: Holder, seconds: float) -> None:
        holder.stopped_until = self.now + seconds

    def kill(self, holder: Holder) -> None:
        holder.dead = True

    def _tick(self, holder: Holder) -> None:
        """A turn of the holder's loop; every 10 ms."""
        self._outcomes(holder, holder.account.expire(holder.clock(self.now)))
        self._send(holder)
        self._for(holder, self.now + 0.01, lambda: self._tick(holder))

    def reserve(self, holder: Holder, tokens: int) -> None:
        if holder.dead or holder.stopped_until > self.now:
            return
        now = holder.clock(self.now)
        made = holder.account.reserve(tokens, now)
        if made is not None:
            self._grant(holder, made, self.now)
            return
        asked = holder.account.ask(tokens, now)
        if isinstance(asked, Waiter):
            holder.waiting.add(asked)
        elif isinstance(asked, SluiceError):
            self.refusals.append(asked)

    def end(self, held: Held, used: int | None) -> None:
        """Settles with what was used, or releases (``None``)."""
        holder = held.holder
        if holder.dead or holder.stopped_until > self.now or not held.reservation.open:
            return
        now = holder.clock(self.now)
        if used is None:
            held.released = True
            holder.account.release(held.reservation, now)
        else:
            if held.open_now(self.now):
                held.used, held.ended_at = used, self.now
            else:
                held.released = True  # what a lapsed registration used is debt
            holder.account.settle(held.reservation, used, now)

    def _grant(self, holder: Holder, made: Reservation, at: float) -> None:
        self.granted += 1
        self.held.append(Held(holder, made, at))
        if holder.account.may_start(made, holder.clock(self.now)) > 0:
            holder.account.started(made)
        self.judge()

    def _outcomes(self, holder: Holder, outcomes: list[Outcome], decided_at: float = 0.0) -> None:
        for waiter, outcome in outcomes:
            holder.waiting.discard(waiter)
            if isinstance(outcome, Reservation):
                # It was reserved when the book decided, not when the answer was read.
                self._grant(holder, outcome, decided_at)
            else:
                self.refusals.append(outcome)

    # --- the network ---------------------------------------------------------------------------

    def _delay(self) -> float:
        return self.random.choice(self.delays_s)

    def _send(self, holder: Holder) -> None:
        made = holder.account.compose(holder.sequence + 1, holder.clock(self.now))
        if made is None:
            return
        holder.sequence = max(holder.sequence, made.sequence)
        composed_at = self._composed.setdefault((holder.name, made.sequence), self.now)
        call = {"over": False}

        def times_out() -> None:
            if not call["over"]:
                call["over"] = True
                self._outcomes(holder, holder.account.failed(holder.clock(self.now)))

        self._for(holder, self.now + self.times.wait_s, times_out)
        if self.random.random() >= self.loss:
            self.at(self.now + self._delay(), lambda: self._arrive(holder, made, call, composed_at))

    def _arrive(
        self, holder: Holder, made: Exchange, call: dict[str, bool], composed_at: float
    ) -> None:
        try:
            answer = self.book.exchange(made, EPOCH_MS + round(self.now * 1000))
        except StaleExchangeError:  # a late duplicate: nobody waits for its answer
            return
        holder.reported_until = max(holder.reported_until, composed_at)
        decided_at = self._decided.setdefault((holder.name, made.sequence), self.now)

        def answered(answer: Answer = answer) -> None:
            if not call["over"]:
                call["over"] = True
                now = holder.clock(self.now)
                self._outcomes(holder, holder.account.apply(answer, now), decided_at)
                self._send(holder)

        if self.random.random() >= self.loss:
            self._for(holder, self.now + self._delay(), answered)

    # --- the reference -------------------------------------------------------------------------

    def sums(self) -> tuple[int, int, int]:
        """Requests and tokens of the last 60 s, and requests at once, by plain counting."""
        recent = [held for held in self.held if held.at > self.now - 60.0]
        counted = [held for held in recent if held.counts(self.now)]
        return (
            len(counted),
            sum(held.tokens() for held in counted),
            sum(held.open_now(self.now) for held in self.held),
        )

    def judge(self) -> None:
        """Limits hold at every grant. Debt may exceed them; the reference counts none."""
        requests, tokens, slots = self.sums()
        for limit, used in (
            (self.limits.requests_per_min, requests),
            (self.limits.tokens_per_min, tokens),
            (self.limits.concurrent_requests, slots),
        ):
            assert limit is None or used <= limit, f"{used} of {limit} at {self.now:.3f}"
