"""The ledger: sums that change only together with holds."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from scheduler_svc.domain.ledger import Ledger
from scheduler_svc.domain.model import Ticket, TicketId
from tests.unit.scheduler.scheduling import SEARCH, SEARCH_TIMEOUT_S, a_ticket

BLOCK, KV_MAX = 16, 1_600


def test_freeing_twice_and_taking_twice_are_assertions() -> None:
    ledger, ticket = Ledger(2), a_ticket()
    ledger.take(ticket, 0, BLOCK, KV_MAX)
    with pytest.raises(AssertionError):
        ledger.take(ticket, 1, BLOCK, KV_MAX)
    ledger.free(ticket.id)
    with pytest.raises(AssertionError):
        ledger.free(ticket.id)


def test_a_prompt_counts_as_outstanding_until_its_first_token_without_its_cached_part() -> None:
    ledger, ticket = Ledger(1), a_ticket(prompt_tokens=100)
    ledger.take(ticket, 0, BLOCK, KV_MAX)
    assert ledger.load(0).prefill_tokens == 100
    ticket.prompt_tokens = 120
    ledger.correct(ticket, 64, BLOCK, KV_MAX)
    assert ledger.load(0).prefill_tokens == 56
    ledger.first_token(ticket)
    ledger.correct(ticket, 0, BLOCK, KV_MAX)  # late: the prompt was read already
    assert ledger.load(0).prefill_tokens == 0


def test_memory_is_set_aside_for_the_expected_end_in_whole_blocks_and_grows_past_it() -> None:
    ledger, ticket = Ledger(1), a_ticket(prompt_tokens=100, output_tokens=50)
    ledger.take(ticket, 0, BLOCK, KV_MAX)
    assert ledger.load(0).kv_tokens == 160
    ticket.generated_tokens = 90
    ledger.progress(ticket, BLOCK, KV_MAX)
    assert ledger.load(0).kv_tokens == 192
    assert ledger.load(0).output_tokens == 1


def test_no_ticket_counts_for_more_than_the_whole_memory_and_none_where_there_is_none() -> None:
    ledger, ticket = Ledger(2), a_ticket(prompt_tokens=5_000)
    ledger.take(ticket, 0, BLOCK, KV_MAX)
    assert ledger.load(0).kv_tokens == ledger.load(0).kv_held == KV_MAX
    embedding = a_ticket(prompt_tokens=5_000)
    ledger.take(embedding, 1, BLOCK, 0)
    assert ledger.load(1).kv_tokens == 0


class LedgerMachine(RuleBasedStateMachine):
    """The ledger against sums over a list of dictionaries."""

    @initialize()
    def start(self) -> None:
        self.ledger = Ledger(3)
        self.running: dict[TicketId, tuple[Ticket, dict[str, int]]] = {}

    @rule(
        row=st.integers(0, 2),
        prompt=st.integers(1, 2_000),
        output=st.integers(0, 300),
        kv_max=st.sampled_from([0, KV_MAX]),
    )
    def take(self, row: int, prompt: int, output: int, kv_max: int) -> None:
        ticket = a_ticket(prompt_tokens=prompt, output_tokens=output)
        self.ledger.take(ticket, row, BLOCK, kv_max)
        counted = {"row": row, "kv_max": kv_max, "prefill": prompt, "output": output}
        self.running[ticket.id] = (ticket, counted | {"kv": blocks(prompt + output, kv_max)})

    @precondition(lambda self: self.running)
    @rule(data=st.data(), prompt=st.integers(1, 2_000), cached=st.integers(0, 2_500))
    def correct(self, data: st.DataObject, prompt: int, cached: int) -> None:
        ticket, counted = self._any(data)
        ticket.prompt_tokens = prompt
        self.ledger.correct(ticket, cached, BLOCK, counted["kv_max"])
        if counted["prefill"]:
            counted["prefill"] = max(0, prompt - cached)
        counted["kv"] = blocks(ticket.kv_tokens, counted["kv_max"])

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def first_token(self, data: st.DataObject) -> None:
        ticket, counted = self._any(data)
        self.ledger.first_token(ticket)
        counted["prefill"] = 0

    @precondition(lambda self: self.running)
    @rule(data=st.data(), more=st.integers(1, 200))
    def progress(self, data: st.DataObject, more: int) -> None:
        ticket, counted = self._any(data)
        ticket.generated_tokens += more
        self.ledger.progress(ticket, BLOCK, counted["kv_max"])
        left = max(1, ticket.output_tokens - ticket.generated_tokens)
        counted["output"] = min(counted["output"], left)
        counted["kv"] = blocks(ticket.kv_tokens, counted["kv_max"])

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        ticket, counted = self._any(data)
        assert self.ledger.free(ticket.id) == counted["row"]
        del self.running[ticket.id]

    @invariant()
    def sums_equal_a_recount(self) -> None:
        self.ledger.check()
        for row in range(3):
            here = [counted for _, counted in self.running.values() if counted["row"] == row]
            load = self.ledger.load(row)
            assert load.sequences == len(here)
            assert load.prefill_tokens == sum(c["prefill"] for c in here)
            assert load.output_tokens == sum(c["output"] for c in here)
            assert load.kv_tokens == sum(c["kv"] for c in here)

    def _any(self, data: st.DataObject) -> tuple[Ticket, dict[str, int]]:
        return data.draw(st.sampled_from(list(self.running.values())))


def blocks(tokens: int, kv_max: int) -> int:
    """Tokens in whole blocks, at most the memory."""
    return min(kv_max, (max(1, tokens) + BLOCK - 1) // BLOCK * BLOCK)


@pytest.mark.timeout(SEARCH_TIMEOUT_S)
def test_the_ledger_agrees_with_sums_over_a_list() -> None:
    """Goal: no leak, no double free. Method: random takes, corrections, progress, frees. Oracle:
    sums anew. Mutants seen to fail: ``free`` that keeps the KV tokens; ``correct`` after the first
    token that counts the prompt again."""
    run_state_machine_as_test(LedgerMachine, settings=SEARCH)
