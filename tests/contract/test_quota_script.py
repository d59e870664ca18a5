"""The script inside the store against the book in Python: equal answers to everything.

Goal: the memory twin may stand in for the real store. Method: random histories of exchanges (three
holders, repeats, refunds, overuse, silences, clock steps, changed limits) given to both, the time
given too. Oracle: equality of every answer and of the sums. Seed: Hypothesis's, derandomized.
Mutants seen to fail: the script refunds to the current bucket; it reaps the holder that asks.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import pytest

from sluice.quota.exchange import (
    Amounts,
    Answer,
    Exchange,
    Limits,
    Need,
    Settlement,
    StaleExchangeError,
)
from state_svc.adapters.memory_quota import MemoryQuotaStore
from state_svc.adapters.valkey_link import ValkeyLink
from state_svc.adapters.valkey_quota import ValkeyQuotaStore
from tests.valkey import PATIENT_S, ValkeyProcess, valkey

STEPS = 300
START_MS = 1_800_000_000_000


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyProcess]:
    with valkey() as running:
        yield running


class _History:
    """Makes exchanges that mostly make sense, from a seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.clock_ms = START_MS + self.random.randrange(86_400_000)
        choose = self.random.choice
        self.limits = Limits(
            requests_per_min=choose((None, 0, 3, 20)),
            tokens_per_min=choose((None, 0, 500, 4000)),
            concurrent_requests=choose((None, 2, 10)),
            tokens_per_day=choose((None, 5000, 20_000)),
        )
        self.last: dict[str, Exchange] = {}
        self.open: dict[str, list[tuple[int, int, int, Amounts]]] = {}

    def step(self) -> Exchange:
        draw = self.random
        self.clock_ms += draw.choice((0, 1, 7, 120, 700, 2500, 9000, 61_000, -5000))
        if draw.random() < 0.02:
            self.clock_ms += draw.choice((86_400_000, 3_600_000))
        holder = draw.choice("abc")
        if holder in self.last and draw.random() < 0.1:
            return self.last[holder]
        sequence = self.last[holder].sequence + 1 if holder in self.last else 1
        if draw.random() < 0.03:
            sequence = max(1, sequence - 3)
        made = Exchange(
            holder=holder,
            sequence=sequence,
            limits=self.limits,
            running=draw.randrange(3),
            settlements=tuple(self._settlements(holder)),
            overuse_tokens=draw.choice((0, 0, 0, 55)),
            needs=tuple(
                Need(draw.choice((1, 10, 100, 900)), draw.random() < 0.5)
                for _ in range(draw.randrange(4))
            ),
            lease=draw.choice((Amounts(), Amounts(2, 60, 1), Amounts(5, 500, 3))),
            lease_ms=draw.choice((0, 250, 1000)),
            holder_ttl_ms=draw.choice((500, 3000, 3000)),
        )
        self.last[holder] = made
        return made

    def _settlements(self, holder: str) -> Iterator[Settlement]:
        kept = []
        for epoch, bucket, day, amounts in self.open.get(holder, []):
            if self.random.random() < 0.5:
                kept.append((epoch, bucket, day, amounts))
                continue
            yield Settlement(
                epoch,
                bucket,
                day,
                amounts,
                self.random.choice((0, amounts.requests)),
                self.random.choice((0, amounts.tokens, amounts.tokens // 2)),
            )
        self.open[holder] = kept

    def note(self, made: Exchange, answer: Answer) -> None:
        granted = [
            need for need, v in zip(made.needs, answer.verdicts, strict=False) if v.decision == 1
        ]
        tokens = sum(need.tokens for need in granted) + answer.lease.tokens
        amounts = Amounts(
            len(granted) + answer.lease.requests, tokens, len(granted) + answer.lease.slots
        )
        if amounts.requests:
            self.open.setdefault(made.holder, []).append(
                (answer.epoch, answer.bucket, answer.day, amounts)
            )


@pytest.mark.parametrize("seed", range(12))
async def test_script_and_book_answer_alike(server: ValkeyProcess, seed: int) -> None:
    history = _History(seed)
    tenant = f"tenant-{seed}"
    link = ValkeyLink(server.url, PATIENT_S)
    script = ValkeyQuotaStore(link)
    book = MemoryQuotaStore(clock_ms=lambda: history.clock_ms)
    try:
        for number in range(STEPS):
            made = history.step()
            script.clock_ms = history.clock_ms
            (from_script,) = await script.exchange([(tenant, made)])
            (from_book,) = await book.exchange([(tenant, made)])
            if isinstance(from_book, StaleExchangeError):
                assert isinstance(from_script, StaleExchangeError)
                continue
            assert from_script == from_book, f"seed {seed}, step {number}: {made}"
            assert isinstance(from_book, Answer)
            history.note(made, from_book)
            if number % 10 == 0:
                # The script's sums are as of its last exchange, which was at this time.
                assert await script.use(tenant) == await book.use(tenant)
    finally:
        await link.close()


async def test_a_store_that_lost_the_script_is_taught_it_again(server: ValkeyProcess) -> None:
    link = ValkeyLink(server.url, PATIENT_S)
    store = ValkeyQuotaStore(link)
    try:
        for sequence in (1, 2):
            await link.run(lambda client: client.script_flush())
            ask = Exchange("h", sequence, Limits(requests_per_min=5), needs=(Need(1),))
            answers = await asyncio.wait_for(store.exchange([("taught", ask)]), 5)
            assert isinstance(answers[0], Answer)
        assert (await store.use("taught")).requests == 2
    finally:
        await link.close()
