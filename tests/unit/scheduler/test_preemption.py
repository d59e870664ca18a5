"""Which victims make room for whom: the choice alone, on rooms made by hand."""

from __future__ import annotations

from scheduler_svc.domain.model import PriorityClass, Ticket
from scheduler_svc.domain.preemption import PREEMPTIBLE, PREEMPTS, Spare, by_price, victims_for
from tests.unit.scheduler.scheduling import a_ticket


def running(row: int, tokens: int, *, yielded_s: float = 0.0, **changes: object) -> Ticket:
    """A batch ticket on a row that would have so many tokens to read again."""
    changes = {"priority_class": PriorityClass.BATCH, **changes}
    ticket = a_ticket(prompt_tokens=tokens, output_tokens=0, **changes)
    ticket.row = row
    ticket.yielded_s = yielded_s
    return ticket


def choose(
    kv_tokens: int, candidates: list[Ticket], spare: dict[int, Spare]
) -> tuple[int, list[Ticket]] | None:
    return victims_for(
        kv_tokens, candidates, lambda row: spare[row], lambda ticket: ticket.prompt_tokens
    )


def test_nobody_is_preempted_by_its_own_class_or_by_a_lower_one() -> None:
    assert {PriorityClass.BATCH} == PREEMPTIBLE
    for taker, victims in PREEMPTS.items():
        assert all(victim > taker for victim in victims)
    assert PriorityClass.STANDARD not in PREEMPTS


def test_the_cheapest_is_first_and_among_equals_who_yielded_longest_ago() -> None:
    dear, cheap = running(0, 3000), running(0, 100)
    late, early = running(0, 1030, yielded_s=9.0), running(0, 1040, yielded_s=2.0)
    standard = running(0, 1, priority_class=PriorityClass.STANDARD)
    assert by_price([dear, late, standard, cheap, early]) == [cheap, early, late, dear, standard]


def test_one_victim_is_enough_where_one_sequence_is_missing() -> None:
    candidates = [running(0, 100), running(1, 200)]
    spare = {row: Spare(0.0, 1_000.0, 4) for row in (0, 1)}
    assert choose(500, candidates, spare) == (0, candidates[:1])
    assert spare[0] == Spare(0.0, 1_000.0, 4), "the room as it is now is not changed"


def test_as_many_go_as_the_memory_needs_and_not_one_more() -> None:
    small, middle, large = running(0, 100), running(0, 150), running(0, 900)
    spare = {0: Spare(2.0, 50.0, 4)}
    assert choose(290, [small, middle, large], spare) == (0, [small, middle])
    assert choose(900, [small, middle, large], spare) == (0, [large]), "the small ones may stay"


def test_they_are_all_on_the_row_that_gets_the_room() -> None:
    a, b, c = running(0, 100), running(1, 110), running(1, 120)
    spare = {0: Spare(0.0, 0.0, 9), 1: Spare(0.0, 0.0, 9)}
    assert choose(200, [a, b, c], spare) == (1, [b, c])


def test_nobody_goes_when_it_would_not_be_enough() -> None:
    spare = {0: Spare(-3.0, 1_000.0, 9)}
    assert choose(100, [running(0, 100), running(0, 100)], spare) is None
    assert choose(100, [], spare) is None


def test_an_instance_that_will_be_idle_takes_any_one() -> None:
    one, two = running(0, 100), running(0, 100)
    assert choose(10_000, [one, two], {0: Spare(0.0, 0.0, 2)}) == (0, [one, two])
