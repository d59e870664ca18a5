"""Fleet columns, the least-work policy and the learnt estimates."""

from __future__ import annotations

from collections import Counter

import pytest

from scheduler_svc.domain.estimate import PREFILL_MEMORY_S, Estimates, Means
from scheduler_svc.domain.fleet import DEFAULT_PREFILL_TOKENS_PER_S, Fleet
from scheduler_svc.domain.ledger import Ledger
from scheduler_svc.domain.model import InstanceName, InstanceReport, Ticket, WorkKind
from scheduler_svc.domain.placement import LeastWork
from scheduler_svc.domain.turn import Scan
from tests.unit.scheduler.scheduling import a_report, a_ticket, limits

LINE = a_ticket().line


class Columns:
    """A fleet on its own, with a ledger to load it."""

    def __init__(self, *reports: InstanceReport, credit: bool = True, **changes: object) -> None:
        self.limits = limits(**changes)
        self.ledger = Ledger(self.limits.instances_max)
        self.fleet = Fleet(self.limits, self.ledger)
        self.policy = LeastWork()
        for report in reports:
            instance = self.fleet.report(report, 0.0)
            assert instance is not None
            if credit:
                self.fleet.credit(instance, report.sequences_max, report.kv_tokens)

    def run(self, name: str, ticket: Ticket) -> None:
        instance = self.fleet.get(InstanceName(name))
        assert instance is not None
        block = instance.report.kv_block_tokens
        self.ledger.take(ticket, instance.row, block, self.fleet.kv_max(instance))
        self.fleet.refresh_row(instance.row)

    def find(self, ticket: Ticket) -> str | None:
        row = Scan(ticket.line, self.fleet, self.policy, self.limits).find(ticket)
        self.fleet.check()
        return None if row is None else self.fleet.at(row).name


@pytest.mark.parametrize(
    "change",
    [
        {"model": "other"},
        {"serving": False},
        {"draining": True},
        {"generates": False},
        {"sequences_max": 0},
    ],
)
def test_an_instance_that_cannot_take_the_ticket_is_never_chosen(change: dict[str, object]) -> None:
    assert Columns(a_report("a", **change)).find(a_ticket()) is None
    assert Columns(a_report("a", **change), a_report("b")).find(a_ticket()) == "b"


def test_without_credit_nothing_is_chosen_unless_an_initial_credit_says_so() -> None:
    assert Columns(a_report(), credit=False).find(a_ticket()) is None
    columns = Columns(a_report(), credit=False, initial_credit_sequences=1)
    assert columns.find(a_ticket()) == "a"
    columns.run("a", a_ticket())
    assert columns.find(a_ticket()) is None


def test_an_embedding_needs_no_credit_but_an_instance_that_embeds() -> None:
    embedding = a_ticket(kind=WorkKind.EMBED, output_tokens=0)
    assert Columns(a_report(), credit=False).find(embedding) is None
    assert Columns(a_report(embeds=True), credit=False).find(embedding) == "a"


def test_a_long_prompt_goes_where_the_context_is_long_enough_and_anywhere_if_none_is() -> None:
    short, long = a_report("a", context_tokens=1_000), a_report("b", context_tokens=4_000)
    assert Columns(short, long).find(a_ticket(prompt_tokens=3_000)) == "b"
    # The estimate may be wrong: the engine refuses with exact counts.
    assert Columns(short, long).find(a_ticket(prompt_tokens=9_000)) == "a"


def test_the_memory_of_an_instance_is_never_planned_beyond_its_reserve_and_credit() -> None:
    columns = Columns(a_report(kv_tokens=1_000, sequences_max=9), kv_reserve=0.1)
    for _ in range(5):
        assert columns.find(a_ticket()) == "a"
        columns.run("a", a_ticket())  # 160 tokens in whole blocks
    assert columns.find(a_ticket()) is None  # 5 * 160 + 150 > 900
    columns = Columns(a_report(kv_tokens=100_000, sequences_max=9))
    instance = columns.fleet.at(0)
    columns.fleet.credit(instance, 9, 400)
    columns.run("a", a_ticket())
    assert columns.find(a_ticket(output_tokens=100)) == "a"
    columns.run("a", a_ticket())
    assert columns.find(a_ticket()) is None  # 2 * 160 + 150 > 400


def test_an_idle_instance_takes_any_one_ticket_however_large() -> None:
    columns = Columns(a_report(kv_tokens=1_000))
    huge = a_ticket(prompt_tokens=5_000)
    assert columns.find(huge) == "a"
    columns.run("a", huge)
    assert columns.find(a_ticket()) is None


def test_prompts_outstanding_are_bounded_but_one_is_always_possible() -> None:
    columns = Columns(a_report(step_tokens_max=200), prefill_steps_max=2.0)
    first = a_ticket(prompt_tokens=1_000)
    assert columns.find(first) == "a"
    columns.run("a", first)
    assert columns.find(a_ticket(prompt_tokens=1)) is None
    columns.ledger.first_token(first)
    columns.fleet.refresh_row(0)
    second = a_ticket(prompt_tokens=300)
    columns.run("a", second)
    assert columns.find(a_ticket(prompt_tokens=101)) is None
    assert columns.find(a_ticket(prompt_tokens=100)) == "a"


def test_the_ticket_goes_where_the_least_work_waits() -> None:
    columns = Columns(a_report("a"), a_report("b"), a_report("c"))
    columns.run("a", a_ticket(prompt_tokens=2_000))
    columns.run("b", a_ticket(prompt_tokens=100))
    columns.run("c", a_ticket(prompt_tokens=500))
    assert columns.find(a_ticket()) == "b"


def test_a_long_output_counts_as_work_and_a_faster_instance_has_less() -> None:
    columns = Columns(a_report("a"), a_report("b"))
    columns.run("a", a_ticket(output_tokens=1_000))
    columns.run("b", a_ticket(output_tokens=100))
    assert columns.find(a_ticket()) == "b"
    fast = [a_report(name, step_ms=1.0 if name == "b" else 30.0) for name in "ab"]
    columns = Columns(*fast)
    for report in fast * 20:  # learnt little by little
        columns.fleet.report(report, 0.0)
    columns.run("a", a_ticket(output_tokens=100))
    columns.run("b", a_ticket(output_tokens=300))
    assert columns.find(a_ticket()) == "b"


def test_equal_instances_are_chosen_in_turn_and_the_seed_says_where_it_begins() -> None:
    """Mutant seen to fail: ``pick`` that takes the first of the ties."""
    columns = Columns(*(a_report(name) for name in "abcd"))
    chosen = Counter(columns.find(a_ticket()) for _ in range(100))
    assert chosen == dict.fromkeys("abcd", 25)
    columns.policy = LeastWork(seed=2)
    assert columns.find(a_ticket()) == "c"


def test_a_stale_report_leaves_the_ledger_and_credit_or_closes_the_instance() -> None:
    busy = a_report(running=3, sequences_max=4)
    for stale_open in (True, False):
        columns = Columns(busy, stale_open=stale_open, report_stale_s=3.0)
        columns.run("a", a_ticket())
        assert columns.find(a_ticket()) is None  # 3 sequences of others and one of ours
        assert columns.fleet.next_change() == 3.0
        columns.fleet.refresh(2.9)
        assert columns.find(a_ticket()) is None
        columns.fleet.refresh(3.0)
        assert columns.find(a_ticket()) == ("a" if stale_open else None)
        assert columns.fleet.next_change() is None
        columns.fleet.report(a_report(), 4.0)
        assert columns.find(a_ticket()) == "a"


def test_what_ended_here_just_before_a_report_is_not_taken_for_the_load_of_others() -> None:
    """Mutant seen to fail: the report is compared with what runs now instead of the peak."""
    columns = Columns(a_report(sequences_max=2))
    tickets = [a_ticket(), a_ticket()]
    for ticket in tickets:
        columns.run("a", ticket)
    columns.fleet.report(a_report(sequences_max=2), 1.0)
    for ticket in tickets:
        columns.ledger.free(ticket.id)
        columns.fleet.freed(columns.fleet.at(0))
    columns.fleet.report(a_report(sequences_max=2, running=2, kv_tokens_used=320), 1.1)
    assert columns.find(a_ticket()) == "a"
    columns.fleet.report(a_report(sequences_max=2, running=2, kv_tokens_used=320), 2.1)
    assert columns.find(a_ticket()) is None  # by now it must be somebody else's


def test_a_low_throughput_teaches_nothing_unless_there_was_a_prompt_to_read_all_the_time() -> None:
    columns = Columns(a_report())
    instance = columns.fleet.at(0)
    columns.fleet.report(a_report(prompt_tokens_per_s=5.0), 1.0)
    assert instance.prefill_tokens_per_s == DEFAULT_PREFILL_TOKENS_PER_S
    columns.fleet.report(a_report(prompt_tokens_per_s=50_000.0), 2.0)
    assert instance.prefill_tokens_per_s > DEFAULT_PREFILL_TOKENS_PER_S
    columns.run("a", a_ticket())
    columns.fleet.report(a_report(), 3.0)
    for second in range(4, 40):
        columns.fleet.report(a_report(prompt_tokens_per_s=500.0), float(second))
    assert instance.prefill_tokens_per_s == pytest.approx(500.0, rel=0.05)


def test_an_engine_that_was_asked_for_little_is_not_taken_for_a_slow_one() -> None:
    """Mutant seen to fail: any prompt outstanding counts as busy. A short prompt whose first token
    never came would then teach 5 tokens/s, and longer prompts be refused as hopeless."""
    columns = Columns(a_report(step_tokens_max=2_048))
    instance = columns.fleet.at(0)
    columns.run("a", a_ticket(prompt_tokens=2_047))
    columns.fleet.report(a_report(step_tokens_max=2_048), 1.0)
    columns.fleet.report(a_report(step_tokens_max=2_048, prompt_tokens_per_s=5.0), 2.0)
    assert instance.prefill_tokens_per_s == DEFAULT_PREFILL_TOKENS_PER_S
    columns.run("a", a_ticket(prompt_tokens=1))
    columns.fleet.report(a_report(step_tokens_max=2_048), 3.0)
    columns.fleet.report(a_report(step_tokens_max=2_048, prompt_tokens_per_s=5.0), 5.0)
    assert instance.prefill_tokens_per_s < DEFAULT_PREFILL_TOKENS_PER_S


def test_rows_are_reused_and_a_removed_instance_leaves_when_its_last_ticket_has() -> None:
    columns = Columns(a_report("a"), a_report("b"))
    ticket = a_ticket()
    columns.run("a", ticket)
    columns.fleet.remove(columns.fleet.at(0))
    assert columns.find(a_ticket()) == "b"
    assert len(columns.fleet) == 2
    columns.ledger.free(ticket.id)
    columns.fleet.freed(columns.fleet.at(0))
    assert len(columns.fleet) == 1
    assert columns.fleet.report(a_report("c", model="other"), 1.0) is columns.fleet.at(0)
    assert columns.find(a_ticket(model="other")) is None  # no credit came over from the old one
    columns.fleet.remove(columns.fleet.at(0))
    assert not columns.fleet.has_model("other")


def test_a_full_fleet_takes_no_more_instances_and_stays_as_it_was() -> None:
    columns = Columns(a_report("a"), a_report("b"), instances_max=2)
    assert columns.fleet.report(a_report("c"), 1.0) is None
    assert columns.fleet.report(a_report("b", draining=True), 1.0) is not None
    assert columns.find(a_ticket()) == "a"


def test_an_instance_may_change_its_model() -> None:
    columns = Columns(a_report("a"), a_report("b"))
    columns.fleet.report(a_report("a", model="new", embeds=True, generates=False), 1.0)
    assert columns.find(a_ticket()) == "b"
    assert columns.find(a_ticket(model="new", kind=WorkKind.EMBED)) == "a"
    assert columns.fleet.has_line(("new", WorkKind.EMBED))
    assert not columns.fleet.has_line(("new", WorkKind.GENERATE))


def test_means_forget_the_least_recently_taught_key_at_their_bound() -> None:
    means: Means[str] = Means(2)
    for key in ("a", "b", "a", "c"):
        means.learn(key, 1.0)
    assert (means.get("a"), means.get("b"), means.get("c"), len(means)) == (1.0, None, 1.0, 2)


def test_token_estimates_start_at_defaults_and_follow_what_was_counted() -> None:
    estimates = Estimates(limits())
    assert estimates.prompt_tokens("m", 350) == 100
    assert estimates.output_tokens("t", "m", None) == 128
    assert estimates.output_tokens("t", "m", 5) == 5
    for _ in range(100):
        estimates.saw_prompt("m", 200, 100)
        estimates.saw_end(a_ticket(tenant="t"), 10, 1.0)
        estimates.saw_end(a_ticket(tenant="u"), 90, 1.0)
    assert estimates.prompt_tokens("m", 350) == 175
    assert estimates.output_tokens("t", "m", None) == 10
    assert 40 <= estimates.output_tokens("new", "m", None) <= 60
    assert estimates.prompt_tokens("m", 0) == 1


def test_a_measured_prefill_rate_is_forgotten_so_that_a_wrong_one_heals() -> None:
    estimates = Estimates(limits())
    assert estimates.prefill_s("m", 1_000, 0.0) == 0.0
    estimates.saw_prefill("m", 100.0, 0.0)
    assert estimates.prefill_s("m", 1_000, 1.0) == 10.0
    estimates.saw_prefill("m", 1_000.0, 1.0)  # a better one counts at once
    assert estimates.prefill_s("m", 1_000, 1.0) == 1.0
    assert estimates.prefill_s("m", 1_000, 1.1 + PREFILL_MEMORY_S) == 0.0


def test_every_map_of_estimates_stays_within_its_bound() -> None:
    estimates = Estimates(limits(models_max=4, tenant_models_max=8))
    for number in range(1_000):
        model = f"model-{number}"
        estimates.saw_prompt(model, 100, 10)
        estimates.saw_end(a_ticket(model=model, tenant=f"t{number}"), 10, 1.0)
        estimates.saw_prefill(model, 100.0, 0.0)
    estimates.check()
