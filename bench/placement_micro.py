"""CPU microseconds of the scheduler's domain: enqueue, dequeue, placement, turn.

`python -m bench.placement_micro` prints a table and writes bench/results/placement-micro.json. One
process, no I/O; CPU time, median over batches, so that a busy machine shows little.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from bench.harness import table, write_results
from scheduler_svc.domain.fleet import Fleet
from scheduler_svc.domain.ledger import Ledger
from scheduler_svc.domain.limits import ClassLimits, SchedulerLimits
from scheduler_svc.domain.model import (
    Dispatch,
    InstanceName,
    InstanceReport,
    PriorityClass,
    Ticket,
    TicketId,
)
from scheduler_svc.domain.placement import LeastWork
from scheduler_svc.domain.queue import TicketQueue
from scheduler_svc.domain.scheduler import Scheduler
from scheduler_svc.domain.turn import Scan

_ROOMY = ClassLimits(1_000_000, 1 << 40, 1_000_000, 1 << 40, 0.05)
LIMITS = SchedulerLimits(
    classes=dict.fromkeys(PriorityClass, _ROOMY), no_room_pause_s=0.1, initial_credit_sequences=256
)
BATCH = 100


def ticket(number: int, now: float = 0.0, prompt_tokens: int = 400) -> Ticket:
    spread = number * 7_919 % 1_000 / 10.0
    return Ticket(
        id=TicketId(number),
        request_id=str(number),
        tenant=f"tenant-{number % 50}",
        model="model",
        priority_class=PriorityClass(number % 4),
        arrival_s=now,
        deadline_s=now + 1_000.0 + spread,
        first_token_limit_s=now + 500.0 + spread,
        prompt_tokens=prompt_tokens + number % 97,
        output_tokens=100,
        size_bytes=1_600,
    )


def report(number: int, sequences_max: int = 256) -> InstanceReport:
    return InstanceReport(
        name=InstanceName(f"instance-{number}"),
        model="model",
        fingerprint="f",
        serving=True,
        draining=False,
        sequences_max=sequences_max,
        kv_tokens=400_000,
        context_tokens=8_192,
        step_tokens_max=8_192,
        kv_block_tokens=16,
        generates=True,
        embeds=False,
        simulated=True,
    )


def median_us(run: Callable[[int], int], batches: int) -> float:
    """Median over batches of microseconds per operation; ``run`` returns its operations."""
    costs = []
    for batch in range(batches):
        began = time.process_time()
        operations = run(batch)
        costs.append((time.process_time() - began) / operations * 1e6)
    return statistics.median(costs)


def queue_us(waiting: int) -> tuple[float, float]:
    """Push, and take plus leave, with so many tickets waiting."""
    queue = TicketQueue(LIMITS.classes)
    for number in range(waiting):
        queue.push(ticket(number))
    line = ticket(0).line
    extra = [ticket(waiting + number) for number in range(BATCH * 100)]
    pushes, takes = [], []
    for batch in range(100):
        chunk = extra[batch * BATCH : (batch + 1) * BATCH]
        began = time.process_time()
        for item in chunk:
            queue.push(item)
        pushed = time.process_time()
        for _ in chunk:
            taken = queue.take(line, {}, 1)
            assert taken is not None
            queue.leave(taken, served=True)
        takes.append((time.process_time() - pushed) / BATCH * 1e6)
        pushes.append((pushed - began) / BATCH * 1e6)
    return statistics.median(pushes), statistics.median(takes)


def submit_us(waiting: int) -> float:
    """Submit, with its checks and estimates, with so many tickets waiting."""
    scheduler = Scheduler(LIMITS, LeastWork())
    scheduler.report(report(0), 0.0)
    for number in range(waiting):
        assert scheduler.submit(ticket(number), 0.0) is None
    extra = [ticket(waiting + number) for number in range(BATCH * 50)]

    def run(batch: int) -> int:
        for item in extra[batch * BATCH : (batch + 1) * BATCH]:
            scheduler.submit(item, 0.0)
        return BATCH

    return median_us(run, 50)


def placement_us(instances: int) -> float:
    """One decision: filter, room, score and pick."""
    ledger = Ledger(LIMITS.instances_max)
    fleet = Fleet(LIMITS, ledger)
    for number in range(instances):
        fleet.report(report(number), 0.0)
        held = ticket(10_000_000 + number)
        ledger.take(held, number, 16, 388_000)
        fleet.refresh_row(number)
    item = ticket(1)
    scan = Scan(item.line, fleet, LeastWork(), LIMITS)

    def run(_: int) -> int:
        for _ in range(BATCH):
            scan.find(item)
        return BATCH

    return median_us(run, 50)


def turn_us(instances: int, per_turn: int) -> tuple[float, float]:
    """A turn per dispatch, and the rest of a ticket's life (accepted, first token, end)."""
    scheduler = Scheduler(LIMITS, LeastWork())
    for number in range(instances):
        scheduler.report(report(number), 0.0)
    turns, lives = [], []
    for batch in range(60):
        for number in range(per_turn):
            scheduler.submit(ticket(batch * per_turn + number), 0.0)
        began = time.process_time()
        effects = scheduler.turn(0.0)
        ended = time.process_time()
        assert len(effects) == per_turn
        turns.append((ended - began) / per_turn * 1e6)
        began = time.process_time()
        for effect in effects:
            assert isinstance(effect, Dispatch)
            scheduler.accepted(effect.ticket.id, effect.attempt, 400, 0, 0.0)
            scheduler.first_token(effect.ticket.id, effect.attempt, 0.0)
            scheduler.ended(effect.ticket.id, effect.attempt, 0.0, output_tokens=10)
        lives.append((time.process_time() - began) / per_turn * 1e6)
    return statistics.median(turns), statistics.median(lives)


def blocked_turn_us(instances: int, waiting: int, sequences_max: int, prompt_tokens: int) -> float:
    """A turn that can place nothing: no sequence is free, or no KV memory."""
    scheduler = Scheduler(LIMITS, LeastWork())
    for number in range(instances):
        scheduler.report(report(number, sequences_max), 0.0)
    for number in range(waiting):
        scheduler.submit(ticket(number, prompt_tokens=prompt_tokens), 0.0)
    while scheduler.turn(0.0):
        for item in list(scheduler._tickets.values()):
            scheduler.first_token(item.id, item.attempt, 0.0)

    def run(_: int) -> int:
        for _ in range(BATCH):
            assert not scheduler.turn(0.0)
        return BATCH

    assert len(scheduler._queue) > 0
    return median_us(run, 20)


def main() -> None:
    figures: dict[str, float] = {}
    for waiting, name in ((10_000, "10k"), (100_000, "100k")):
        figures[f"enqueue_us_p50_{name}"], figures[f"dequeue_us_p50_{name}"] = queue_us(waiting)
        figures[f"submit_us_p50_{name}"] = submit_us(waiting)
    for instances in (10, 100, 1_000):
        figures[f"decision_us_p50_{instances}"] = placement_us(instances)
        turn, life = turn_us(instances, per_turn=100)
        figures[f"turn_us_per_dispatch_{instances}"] = turn
        figures[f"life_us_per_ticket_{instances}"] = life
    figures["blocked_turn_us_sequences_100"] = blocked_turn_us(100, 5_000, 16, 400)
    figures["blocked_turn_us_kv_100"] = blocked_turn_us(100, 10_000, 256, 7_900)
    print(table([["figure", "µs"], *([name, f"{value:.1f}"] for name, value in figures.items())]))
    print(write_results("placement-micro", figures))


if __name__ == "__main__":
    main()
