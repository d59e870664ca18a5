"""CPU microseconds of the scheduler's domain: enqueue, dequeue, placement, turn, prefix index.

Part of ``bench.placement``. One process, no I/O; CPU time, median over batches, so that a busy
machine shows little.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from scheduler_svc.domain.canonical import Hashes, PrefixHasher
from scheduler_svc.domain.decision import Closed, Trail
from scheduler_svc.domain.fleet import Fleet
from scheduler_svc.domain.ledger import Ledger
from scheduler_svc.domain.limits import ClassLimits, SchedulerLimits
from scheduler_svc.domain.model import (
    Dispatch,
    InstanceName,
    InstanceReport,
    Prefix,
    PriorityClass,
    Ticket,
    TicketId,
)
from scheduler_svc.domain.placement import POLICIES, LeastWork
from scheduler_svc.domain.prefix_index import PrefixIndex
from scheduler_svc.domain.queue import TicketQueue
from scheduler_svc.domain.scheduler import Scheduler
from scheduler_svc.domain.turn import Scan

_ROOMY = ClassLimits(1_000_000, 1 << 40, 1_000_000, 1 << 40, 0.05)
LIMITS = SchedulerLimits(
    classes=dict.fromkeys(PriorityClass, _ROOMY), no_room_pause_s=0.1, initial_credit_sequences=256
)
BATCH = 100
TENANTS = 1_000


def ticket(number: int, now: float = 0.0, prompt_tokens: int = 400) -> Ticket:
    spread = number * 7_919 % 1_000 / 10.0
    return Ticket(
        id=TicketId(number),
        request_id=str(number),
        tenant=f"tenant-{number % TENANTS}",
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
    queue = TicketQueue(LIMITS.classes, {}, LIMITS.tenants_idle_max, LIMITS.debts_put_off)
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
    scheduler.instances.report(report(0), 0.0)
    for number in range(waiting):
        assert scheduler.submit(ticket(number), 0.0) is None
    extra = [ticket(waiting + number) for number in range(BATCH * 50)]

    def run(batch: int) -> int:
        for item in extra[batch * BATCH : (batch + 1) * BATCH]:
            scheduler.submit(item, 0.0)
        return BATCH

    return median_us(run, 50)


def placement_us(instances: int) -> float:
    """One decision of ``least_work``: filter, room, score and pick."""
    item = ticket(1)
    scan = Scan(item.line, _loaded_fleet(instances), LeastWork(), LIMITS)
    return median_us(lambda _: _find(scan, [item] * BATCH), 50)


def decision_note_us(instances: int, *, full: bool) -> float:
    """What one decision's note for its record costs, in brief or in full, beside the decision."""
    item = ticket(1)
    fleet = _loaded_fleet(instances)
    scan = Scan(item.line, fleet, LeastWork(), LIMITS)
    closed = Closed(fleet, LIMITS)
    row = scan.find(item)
    assert row is not None

    def run(_: int) -> int:
        for _ in range(BATCH):
            item.trail = Trail(full)
            item.trail.placed(scan.placement(item, row, closed))
        return BATCH

    return median_us(run, 50)


def _find(scan: Scan, items: list[Ticket]) -> int:
    for item in items:
        scan.find(item)
    return len(items)


def _loaded_fleet(instances: int) -> Fleet:
    ledger = Ledger(LIMITS.instances_max)
    fleet = Fleet(LIMITS, ledger)
    for number in range(instances):
        fleet.report(report(number), 0.0)
        held = ticket(10_000_000 + number)
        ledger.take(held, number, 16, 380_000)
        fleet.refresh_row(number)
    return fleet


def prefix_us(instances: int, prompts: int, blocks: int) -> dict[str, float]:
    """With so many prompts indexed, each of a system prompt that many share and blocks of its own,
    of ``blocks`` in all: one decision of ``weighted``, the notes of a dispatch, and hashing."""
    index = PrefixIndex(LIMITS.instances_max, LIMITS.prefix_index_bytes, 3_600.0)
    hasher = PrefixHasher(b"bench")
    prefixes = []
    notes = []
    for number in range(prompts):
        own = np.arange(blocks, dtype=np.uint64) + np.uint64((number + 1) * blocks)
        own[: blocks // 4] = number % 100
        hashes = hasher.hashes(own.tobytes(), 8, ["bench"])
        began = time.process_time()
        index.note(hashes, number * 7_919 % instances, 0.0)
        notes.append((time.process_time() - began) * 1e6)
        prefixes.append(hashes)
    fleet = _loaded_fleet(instances)
    policy = POLICIES["weighted"](0)
    scan = Scan(ticket(0).line, fleet, policy, LIMITS, index, 1.0)
    items = []
    for number in range(2_000):
        item = ticket(number, prompt_tokens=blocks * 32)
        item.prefix = Prefix(prefixes[number * 37 % prompts], float(blocks))
        items.append(item)
    data = bytes(range(256)) * (blocks * 128 // 256 + 1)

    def hashing(_: int) -> int:
        for _ in range(BATCH):
            hasher.hashes(data, 128, ["bench"])
        return BATCH

    return {
        "decision": median_us(lambda n: _find(scan, items[n * 40 : n * 40 + 40]), len(items) // 40),
        "note": statistics.median(notes),
        "hash": median_us(hashing, 20),
        "indexed_blocks": float(len(index)),
    }


def index_memory_mb(prompts: int, blocks: int, bytes_max: int) -> dict[str, float]:
    """Resident memory of this process while distinct prompts are noted: when the index is full for
    the first time, and at the end. ``hot_hit_rate``: blocks found of 1,000 prompts that come again
    every 20,000."""
    index = PrefixIndex(1_000, bytes_max, 1e6)
    hasher = PrefixHasher(b"bench")
    hot = [_prompt(hasher, 10**9 + number, blocks) for number in range(1_000)]
    full_mb, found = 0.0, 0
    for number in range(prompts):
        index.note(_prompt(hasher, number, blocks), number % 1_000, number / 1_000)
        if number % 20_000 == 0:
            for row, hashes in enumerate(hot):
                index.note(hashes, row, number / 1_000)
        if not full_mb and index.evictions > index.capacity:
            full_mb = _resident_mb()
    for row, hashes in enumerate(hot):
        matched = index.match(hashes, 1_000, prompts / 1_000)
        found += 0 if matched is None else int(matched[row])
    return {
        "bound_mb": bytes_max / 1e6,
        "index_mb": index.nbytes / 1e6,
        "resident_full_mb": full_mb,
        "resident_end_mb": _resident_mb(),
        "hot_hit_rate": found / (len(hot) * blocks),
    }


def _prompt(hasher: PrefixHasher, number: int, blocks: int) -> Hashes:
    own = np.arange(blocks, dtype=np.uint64) + np.uint64(number * blocks)
    return hasher.hashes(own.tobytes(), 8, ["bench"])


def _resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4_096 / 1e6


def turn_us(instances: int, per_turn: int) -> tuple[float, float]:
    """A turn per dispatch, and the rest of a ticket's life (accepted, first token, end)."""
    scheduler = Scheduler(LIMITS, LeastWork())
    for number in range(instances):
        scheduler.instances.report(report(number), 0.0)
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
            scheduler.attempts.accepted(effect.ticket.id, effect.attempt, 400, 0, 0.0)
            scheduler.attempts.first_token(effect.ticket.id, effect.attempt, 0.0)
            scheduler.attempts.ended(effect.ticket.id, effect.attempt, 0.0, output_tokens=10)
        lives.append((time.process_time() - began) / per_turn * 1e6)
    return statistics.median(turns), statistics.median(lives)


def blocked_turn_us(instances: int, waiting: int, sequences_max: int, prompt_tokens: int) -> float:
    """A turn that can place nothing: no sequence is free, or no KV memory."""
    scheduler = Scheduler(LIMITS, LeastWork())
    for number in range(instances):
        scheduler.instances.report(report(number, sequences_max), 0.0)
    for number in range(waiting):
        scheduler.submit(ticket(number, prompt_tokens=prompt_tokens), 0.0)
    while scheduler.turn(0.0):
        for item in list(scheduler._tickets.values()):
            scheduler.attempts.first_token(item.id, item.attempt, 0.0)

    def run(_: int) -> int:
        for _ in range(BATCH):
            assert not scheduler.turn(0.0)
        return BATCH

    assert len(scheduler._queue) > 0
    return median_us(run, 20)


def domain_figures() -> dict[str, float]:
    """Everything without an index."""
    figures: dict[str, float] = {}
    for waiting, name in ((10_000, "10k"), (100_000, "100k")):
        figures[f"enqueue_us_p50_{name}"], figures[f"dequeue_us_p50_{name}"] = queue_us(waiting)
        figures[f"submit_us_p50_{name}"] = submit_us(waiting)
    for instances in (10, 100, 1_000):
        figures[f"least_work_us_p50_{instances}"] = placement_us(instances)
        turn, life = turn_us(instances, per_turn=100)
        figures[f"turn_us_per_dispatch_{instances}"] = turn
        figures[f"life_us_per_ticket_{instances}"] = life
    for full, name in ((False, "brief"), (True, "full")):
        figures[f"decision_note_us_{name}_1000"] = decision_note_us(1_000, full=full)
    figures["blocked_turn_us_sequences_100"] = blocked_turn_us(100, 5_000, 16, 400)
    figures["blocked_turn_us_kv_100"] = blocked_turn_us(100, 10_000, 256, 7_900)
    return figures
