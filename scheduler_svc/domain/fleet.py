"""The instances: what they say of themselves, and columns over all of them for placement.

Owns one :class:`Instance` per row and numpy columns indexed by row. A row's columns are worked out
anew whenever its report, credit or freshness changes (about 2 µs), and once a turn if its load has
changed, so that placing a ticket only reads whole columns. Rows of removed instances are reused
once nothing runs there.

Failure modes: a stale report (older than ``report_stale_s``) leaves the ledger and the credit as
the only word on room, or closes the instance (``stale_open``); a broken load watch, a drain or
``serving: false`` closes it until a report says otherwise; so does a GPU that faults (an Xid, or an
uncorrected ECC error that was not there when this engine was first seen), until its engine begins
anew; more instances than ``instances_max``
are not taken up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

import numpy as np

from scheduler_svc.domain.breaker import Breaker, BreakerState
from scheduler_svc.domain.ledger import Ledger, Load
from scheduler_svc.domain.limits import SchedulerLimits
from scheduler_svc.domain.model import InstanceName, InstanceReport, Line, WorkKind
from scheduler_svc.ports import Column, Mask

RATE_WEIGHT = 0.2  # of a new report in learnt rates
DEFAULT_PREFILL_TOKENS_PER_S = 8_000.0
DEFAULT_STEP_S = 0.02
PREFILL_TOKENS_PER_S_MIN = 1.0
STEP_S_MIN = 1e-4
# Expected times of an instance with a throttled GPU are this much longer: hardware slowdowns halve
# the clocks or worse. It fades as reports show what the instance still does.
THROTTLED_SLOWDOWN = 2.0
# Output tokens that a sequence of another scheduler is taken to have left.
FOREIGN_OUTPUT_TOKENS = 64

_FREE_ROW = {"stale_at_s": inf, "context_tokens": inf, "gpu_memory_free": 1.0}  # others: 0


@dataclass(slots=True)
class Instance:
    """What is known of one instance besides the ledger.

    ``foreign_*``: what it was reported to run beyond what this scheduler had there. Credits are
    ``None`` until the first one. ``paused_until_s``: it said NO_ROOM. ``barred``: by somebody's
    word, apart from its ``breaker``. ``draining``: it says so itself; ``drained_by_hand``: an
    operator does.
    ``ecc_errors_first``: what its GPUs had counted when this engine was first seen."""

    name: InstanceName
    row: int
    report: InstanceReport
    report_s: float
    breaker: Breaker
    reachable: bool = True
    unreachable_reason: str = ""
    silent: bool = False  # unreachable because it did not answer its load watch
    draining: bool = False
    drained_by_hand: bool = False
    removed: bool = False
    stale: bool = False
    credit_sequences: int | None = None
    credit_kv_tokens: int | None = None
    paused_until_s: float = 0.0
    foreign_sequences: int = 0
    foreign_kv_tokens: int = 0
    prefill_tokens_per_s: float = DEFAULT_PREFILL_TOKENS_PER_S
    step_s: float = DEFAULT_STEP_S
    barred: bool = False
    ecc_errors_first: int | None = None

    @property
    def drains(self) -> bool:
        """Whether it starts nothing more, and what would run on for long leaves it."""
        return self.draining or self.drained_by_hand or self.gpu_fault

    @property
    def gpu_fault(self) -> bool:
        """Whether a GPU of it must not be trusted with more work."""
        gpus = self.report.gpus
        if gpus is None:
            return False
        grown = (gpus.ecc_errors or 0) > (self.ecc_errors_first or 0)
        return bool(gpus.xid_errors) or grown


class Fleet:
    """Implements ``ports.FleetColumns``. Changes go through methods that name the instance."""

    def __init__(self, limits: SchedulerLimits, ledger: Ledger) -> None:
        size = limits.instances_max
        self._limits = limits
        self._ledger = ledger
        self._by_name: dict[InstanceName, Instance] = {}
        self._by_row: list[Instance | None] = [None] * size
        self._free_rows = list(range(size))
        self._models: Counter[str] = Counter()  # instances that have a model,
        self._lines: Counter[Line] = Counter()  # and that can serve a line, if they are up
        self._contexts: dict[str, float] = {}  # the longest that a model has had
        self._model_ids: dict[str, int] = {}
        self._next_model_id = 1
        self._paused: set[InstanceName] = set()
        self._changed: set[int] = set()  # rows whose columns are out of date
        self._cooling: set[InstanceName] = set()  # with an open breaker
        self._probed: set[InstanceName] = set()  # with a half-open one
        self._stale_from_s = inf  # no report goes stale before; reports only move it on
        self._draining: set[InstanceName] = set()
        self._fingerprints: Counter[str] = Counter()
        self._fingerprint_ids: dict[str, int] = {}
        self._next_fingerprint_id = 1
        self._usable: dict[Line, Mask] = {}
        self._all = {
            "model_id": np.zeros(size),
            "fingerprint_id": np.zeros(size),
            "serves_generate": np.zeros(size),
            "serves_embed": np.zeros(size),
            "stale_at_s": np.full(size, inf),
            "context_tokens": np.full(size, inf),
            "backlog_s": np.zeros(size),
            "prompt_s_per_token": np.zeros(size),
            "output_s_per_token": np.zeros(size),
            "free_sequences": np.zeros(size),
            "free_uncredited": np.zeros(size),
            "free_kv_tokens": np.zeros(size),
            "free_prefill_tokens": np.zeros(size),
            "kv_load": np.zeros(size),
            "gpu_memory_free": np.ones(size),
        }
        self.context_tokens_min = inf
        self.gpu_memory_free_min = 1.0
        self._view(0)

    def __len__(self) -> int:
        return len(self._by_name)

    # --- questions ---------------------------------------------------------------------------

    def get(self, name: InstanceName) -> Instance | None:
        return self._by_name.get(name)

    def at(self, row: int) -> Instance:
        instance = self._by_row[row]
        assert instance is not None
        return instance

    def instances(self) -> Iterator[Instance]:
        return iter(self._by_name.values())

    def has_model(self, model: str) -> bool:
        """Whether any instance, usable or not, has it."""
        return model in self._models

    def longest_context(self, model: str) -> float:
        """The most tokens of prompt and output that an instance of it has had since the first of
        those known now came; ``inf`` when that is not known."""
        return self._contexts.get(model, inf)

    def has_line(self, line: Line) -> bool:
        """Whether any instance, usable or not, can serve it when it is up."""
        return line in self._lines

    def draining(self) -> list[Instance]:
        """Instances that start nothing more, by their own word or an operator's."""
        return [self._by_name[name] for name in sorted(self._draining)]

    def with_fingerprint(self, fingerprint: str) -> Mask:
        """Rows whose model has the fingerprint, usable or not."""
        mask: Mask = self._fingerprint_id == self._fingerprint_ids.get(fingerprint, -1)
        return mask

    def free_for(self, line: Line, kv_tokens: int = 1) -> float:
        """Sequences of so many KV tokens each that may still start on usable rows of a line."""
        self.settle()
        usable = self.usable(line)
        if line[1] is WorkKind.GENERATE:
            free = np.minimum(self.free_sequences, np.floor(self.free_kv_tokens / kv_tokens))
        else:
            free = self._free_uncredited
        return float(np.maximum(free[usable], 0.0).sum())

    def usable(self, line: Line) -> Mask:
        """Rows that may run tickets of a line, room aside. Do not write to it."""
        mask = self._usable.get(line)
        if mask is None:
            model, kind = line
            serves = self._serves_generate if kind is WorkKind.GENERATE else self._serves_embed
            mask = (self._model_id == self._model_ids.get(model, 0)) & (serves > 0)
            if model in self._models:  # so the cache is bounded by the fleet
                self._usable[line] = mask
        return mask

    def is_served(self, line: Line) -> bool:
        """Whether any row may run tickets of a line, room aside."""
        return bool(np.count_nonzero(self.usable(line)))

    def with_sequence(self, kind: WorkKind) -> Mask:
        """Rows where one more sequence may start."""
        free = self.free_sequences if kind is WorkKind.GENERATE else self._free_uncredited
        return free >= 1.0

    def has_sequence(self, row: int, kind: WorkKind) -> bool:
        free = self.free_sequences if kind is WorkKind.GENERATE else self._free_uncredited
        return bool(free[row] >= 1.0)

    def with_memory(self, kind: WorkKind, to_read: int | Column, kv_tokens: int) -> Mask:
        """Rows with room for that many prompt tokens to read (one number, or a column of them) and
        KV tokens to hold."""
        prefill: Mask = self._free_prefill_tokens >= to_read
        if kind is WorkKind.GENERATE:
            prefill &= self.free_kv_tokens >= kv_tokens
        return prefill

    def has_prefill(self, row: int, to_read: int) -> bool:
        """Whether so many prompt tokens may be added to those outstanding on a row."""
        return bool(self._free_prefill_tokens[row] >= to_read)

    def has_memory(self, row: int, kind: WorkKind, to_read: int, kv_tokens: int) -> bool:
        """``with_memory`` for one row."""
        fits = kind is not WorkKind.GENERATE or self.free_kv_tokens[row] >= kv_tokens
        return bool(self._free_prefill_tokens[row] >= to_read and fits)

    def probed(self) -> list[int]:
        """Rows of instances that are tried again after their breaker was open."""
        return [self._by_name[name].row for name in self._probed]

    def first_token_s(self, row: int) -> float:
        """Expected time to the first token of a ticket that was just taken there."""
        load = self._ledger.load(row)
        return float(load.prefill_tokens * self.prompt_s_per_token[row]) + self.at(row).step_s

    def can_spare(self, row: int) -> bool:
        """Whether at least half of the instances of the row's model would be left to serve it."""
        model = self.at(row).report.model
        for kind in WorkKind:
            usable = self.usable((model, kind))
            if usable[row] and 2 * (int(usable.sum()) - 1) < self._lines[model, kind]:
                return False
        return True

    def next_probe_s(self, line: Line) -> float | None:
        """When the first instance of the line with an open breaker may be tried again."""
        cooling = map(self._by_name.__getitem__, self._cooling)
        ends = (one.breaker.until_s for one in cooling if line in _lines(one.report))
        return min(ends, default=None)

    def next_change(self) -> float | None:
        """When time alone changes something: a report goes stale, a pause or a cool-down ends."""
        times = [self._by_name[name].paused_until_s for name in self._paused]
        times += [self._by_name[name].breaker.until_s for name in self._cooling]
        times.append(float(self._stale_at_s.min(initial=inf)))
        return min(times) if min(times) < inf else None

    # --- changes -----------------------------------------------------------------------------

    def report(self, report: InstanceReport, now: float) -> Instance | None:
        """Takes a report in. ``None``: not known, and no row is free."""
        instance = self._by_name.get(report.name)
        if instance is None:
            if not self._free_rows:
                return None
            instance = self._admit(report, now)
        else:
            self._enter(report)
            self._leave(instance.report)
        if instance.silent or report.epoch != instance.report.epoch:
            instance.breaker.revive()
            self._sort_by_breaker(instance)
        instance.silent = False
        load = self._ledger.load(instance.row)
        self._learn(instance, report, load, now)
        self._see_gpus(instance, report)
        instance.report, instance.report_s = report, now
        instance.reachable, instance.unreachable_reason = True, ""
        instance.draining = report.draining
        instance.removed = instance.stale = False
        self._set_foreign(instance, report, load)
        load.reported(report.step_tokens_max, now)
        self._resume(instance)
        self._reopen(instance)
        return instance

    def credit(self, instance: Instance, sequences: int, kv_tokens: int) -> None:
        """The most that may run there for this scheduler."""
        instance.credit_sequences, instance.credit_kv_tokens = sequences, kv_tokens
        self._resume(instance)
        self.refresh_row(instance.row)

    def revoke_credit(self, instance: Instance) -> None:
        """Its stream is gone: nothing until the next credit."""
        instance.credit_sequences = instance.credit_kv_tokens = 0
        self.refresh_row(instance.row)

    def pause(self, instance: Instance, until_s: float) -> None:
        """It said NO_ROOM."""
        instance.paused_until_s = until_s
        self._paused.add(instance.name)
        self.refresh_row(instance.row)

    def freed(self, instance: Instance) -> None:
        """A sequence ended there: its room may have come back."""
        self._resume(instance)
        if instance.removed and not self._ledger.load(instance.row).sequences:
            self._release(instance)
        else:
            self.changed(instance.row)

    def close(self, instance: Instance, reason: str, *, silent: bool = True) -> None:
        """Its load watch broke, or (not ``silent``) it says that it is down."""
        instance.reachable, instance.unreachable_reason = False, reason
        instance.silent = silent
        self._reopen(instance)

    def bar(self, instance: Instance, barred: bool) -> None:
        """Nothing more starts there, until it is unbarred."""
        instance.barred = barred
        self._reopen(instance)

    def judged(self, instance: Instance) -> None:
        """Its breaker changed its state or the places for probes."""
        self._sort_by_breaker(instance)
        self._reopen(instance)

    def drain(self, instance: Instance) -> None:
        """It starts nothing more, until a report says otherwise."""
        instance.draining = True
        self._reopen(instance)

    def drain_by_hand(self, instance: Instance, drain: bool) -> None:
        """It starts nothing more until this is taken back."""
        instance.drained_by_hand = drain
        self._reopen(instance)

    def remove(self, instance: Instance) -> None:
        """It leaves the fleet, at once or when the last ticket there has ended."""
        instance.removed = True
        self._reopen(instance)
        if not self._ledger.load(instance.row).sequences:
            self._release(instance)

    def refresh(self, now: float) -> None:
        """Lets time pass: reports go stale, pauses and cool-downs end. Nothing to do in nearly
        every turn."""
        self.settle()
        if now < self._stale_from_s and not self._paused and not self._cooling:
            return
        self.refresh_breakers(now)
        for name in [n for n in self._paused if self._by_name[n].paused_until_s <= now]:
            self._resume(self._by_name[name])
            self.refresh_row(self._by_name[name].row)
        for row in np.flatnonzero(self._stale_at_s <= now):
            instance = self.at(int(row))
            instance.stale = True
            instance.foreign_sequences = instance.foreign_kv_tokens = 0
            self._stale_at_s[row] = inf  # looked at once
            self._reopen(instance)
        self._stale_from_s = float(self._stale_at_s.min(initial=inf))

    def refresh_breakers(self, now: float) -> None:
        """Lets cool-downs end."""
        for name in [n for n in self._cooling if self._by_name[n].breaker.look(now)]:
            self.judged(self._by_name[name])

    def changed(self, row: int) -> None:
        """What this scheduler runs on a row is not what it was: the columns of the row are worked
        out anew before anybody asks, once for all that happened until then."""
        self._changed.add(row)

    def settle(self) -> None:
        """Works the rows out that changed. The columns are exact from here to the next event."""
        for row in self._changed:
            if self._by_row[row] is not None:
                self.refresh_row(row)
        self._changed.clear()

    def refresh_row(self, row: int) -> None:
        """Works the room and load columns of a row out anew, at once."""
        instance = self.at(row)
        load = self._ledger.load(row)
        report = instance.report
        free = report.sequences_max - load.sequences - instance.foreign_sequences
        if instance.name in self._paused:
            free = 0
        probes = instance.breaker.probes_free
        if probes is not None:
            free = min(free, probes)
        credit = instance.credit_sequences
        if credit is None:
            credit = self._limits.initial_credit_sequences
        self._free_uncredited[row] = free
        self.free_sequences[row] = min(free, credit - load.sequences)
        self.free_kv_tokens[row] = self._free_kv(instance, load)
        self._free_prefill_tokens[row] = self._free_prefill(report, load)
        slowdown = THROTTLED_SLOWDOWN if report.gpus and report.gpus.throttled else 1.0
        prompt_s = slowdown / instance.prefill_tokens_per_s
        output_s = slowdown * instance.step_s / max(1, report.sequences_max)
        output = load.output_tokens + instance.foreign_sequences * FOREIGN_OUTPUT_TOKENS
        self.prompt_s_per_token[row] = prompt_s
        self.output_s_per_token[row] = output_s
        self.backlog_s[row] = load.prefill_tokens * prompt_s + output * output_s
        kv_max = self.kv_max(instance)
        held = load.kv_tokens + instance.foreign_kv_tokens
        self.kv_load[row] = min(1.0, held / kv_max) if kv_max else 0.0

    def kv_max(self, instance: Instance) -> int:
        """KV tokens that are planned with; 0: KV memory is no limit."""
        return int(instance.report.kv_tokens * (1.0 - self._limits.kv_reserve))

    def memory(self, instance: Instance) -> tuple[int, int]:
        """KV tokens per block, and KV tokens that are planned with."""
        return max(1, instance.report.kv_block_tokens), self.kv_max(instance)

    def check(self) -> None:
        """Columns equal what they are made of. O(rows), for tests."""
        assert len(self._by_name) + len(self._free_rows) == self._limits.instances_max
        self.settle()
        models: Counter[str] = Counter()
        fingerprints: Counter[str] = Counter()
        lines: Counter[Line] = Counter()
        for name, instance in self._by_name.items():
            assert self._by_row[instance.row] is instance
            assert instance.name == name
            models[instance.report.model] += 1
            fingerprints[instance.report.fingerprint] += 1
            same = self.with_fingerprint(instance.report.fingerprint)
            assert same[instance.row]
            assert instance.drains == (name in self._draining)
            lines.update(_lines(instance.report))
            before = {key: column[instance.row] for key, column in self._all.items()}
            self.refresh_row(instance.row)
            for key, column in self._all.items():
                assert column[instance.row] == before[key], f"{name}: {key} was out of date"
            assert not instance.removed or self._ledger.load(instance.row).sequences
        assert models == self._models
        assert lines == self._lines
        assert all(count > 0 for count in (*self._models.values(), *self._lines.values()))
        assert set(self._model_ids) == set(models)
        assert set(self._contexts) == set(models)
        assert fingerprints == self._fingerprints
        assert set(self._fingerprint_ids) == set(fingerprints)
        assert self._draining <= set(self._by_name)
        assert {line[0] for line in self._usable} <= set(models)
        assert (self._paused | self._cooling | self._probed) <= set(self._by_name)
        for name, instance in self._by_name.items():
            state = instance.breaker.state
            assert (name in self._cooling) == (state is BreakerState.OPEN)
            assert (name in self._probed) == (state is BreakerState.HALF_OPEN)
        for row in self._free_rows:
            assert self._by_row[row] is None
            assert self._ledger.load(row).sequences == 0
        assert self._stale_from_s <= self._stale_at_s.min(initial=inf)

    # --- parts -------------------------------------------------------------------------------

    def _free_kv(self, instance: Instance, load: Load) -> float:
        """Room in KV memory by ledger, report and credit. An idle instance takes any one ticket:
        what does not fit it at all is for the engine to refuse, with exact counts."""
        kv_max = self.kv_max(instance)
        if not kv_max:
            return inf
        idle = not load.sequences and not instance.foreign_sequences
        free = inf if idle else kv_max - load.kv_tokens - instance.foreign_kv_tokens
        credit = instance.credit_kv_tokens
        if credit is None:
            credit = kv_max if self._limits.initial_credit_sequences else 0
        # One ticket larger than this scheduler's share runs where nothing else of it does: the
        # instance takes it so, and with others' shares there would never be a larger credit.
        credit_free = inf if credit and not load.sequences else credit - load.kv_tokens
        # A ticket is held in whole blocks, but asks in tokens.
        return min(free, credit_free) - (instance.report.kv_block_tokens or 1) + 1

    def _free_prefill(self, report: InstanceReport, load: Load) -> float:
        """Prompt tokens that may be added to those outstanding; any one prompt when there are
        none."""
        if not report.step_tokens_max or not load.prefill_tokens:
            return inf
        return self._limits.prefill_steps_max * report.step_tokens_max - load.prefill_tokens

    def _learn(self, instance: Instance, report: InstanceReport, load: Load, now: float) -> None:
        """Rates from a report. A throughput is a lower bound of what the instance can do, so a
        lower one than known counts only if full steps of prompts were to be read all the time."""
        rate = report.prompt_tokens_per_s
        busy = load.reads_full_steps(report.step_tokens_max, now)
        if rate and (busy or rate > instance.prefill_tokens_per_s):
            learnt = instance.prefill_tokens_per_s
            learnt += RATE_WEIGHT * (rate - learnt)
            instance.prefill_tokens_per_s = max(PREFILL_TOKENS_PER_S_MIN, learnt)
        if report.step_ms:
            learnt = instance.step_s + RATE_WEIGHT * (report.step_ms / 1_000.0 - instance.step_s)
            instance.step_s = max(STEP_S_MIN, learnt)

    def _set_foreign(self, instance: Instance, report: InstanceReport, load: Load) -> None:
        """What the report shows beyond the most that this scheduler had there since the last one:
        the load of other schedulers, or what the engine holds of us beyond our count."""
        sequences = (report.running or 0) + (report.waiting or 0)
        instance.foreign_sequences = max(0, sequences - load.sequences_peak)
        instance.foreign_kv_tokens = max(0, (report.kv_tokens_used or 0) - load.kv_peak)
        if not instance.foreign_sequences:
            instance.foreign_kv_tokens = 0  # block rounding and cached prefixes of our own

    def _sort_by_breaker(self, instance: Instance) -> None:
        for names, state in (
            (self._cooling, BreakerState.OPEN),
            (self._probed, BreakerState.HALF_OPEN),
        ):
            if instance.breaker.state is state:
                names.add(instance.name)
            else:
                names.discard(instance.name)

    def _resume(self, instance: Instance) -> None:
        self._paused.discard(instance.name)

    def _reopen(self, instance: Instance) -> None:
        """Works out whether the instance may be used, and its columns."""
        row, report = instance.row, instance.report
        fresh = self._limits.stale_open or not instance.stale
        open_ = (
            report.serving
            and not instance.drains
            and instance.reachable
            and not instance.removed
            and not instance.barred
            and instance.breaker.state is not BreakerState.OPEN
            and fresh
        )
        state = (
            float(self._model_ids[report.model]),
            float(open_ and report.generates),
            float(open_ and report.embeds),
        )
        if state != (self._model_id[row], self._serves_generate[row], self._serves_embed[row]):
            self._model_id[row], self._serves_generate[row], self._serves_embed[row] = state
            self._usable.clear()
        self._fingerprint_id[row] = self._fingerprint_ids[report.fingerprint]
        if instance.drains:
            self._draining.add(instance.name)
        else:
            self._draining.discard(instance.name)
        if not instance.stale:
            self._stale_at_s[row] = instance.report_s + self._limits.report_stale_s
            self._stale_from_s = min(self._stale_from_s, float(self._stale_at_s[row]))
        context_tokens = float(report.context_tokens) or inf
        if context_tokens > self._contexts.get(report.model, 0.0):
            self._contexts[report.model] = context_tokens
        if self.context_tokens[row] != context_tokens:
            self.context_tokens[row] = context_tokens
            self.context_tokens_min = float(self.context_tokens.min())
        memory_free = report.gpus.memory_free if report.gpus is not None else None
        memory_free = 1.0 if memory_free is None else memory_free
        if self.gpu_memory_free[row] != memory_free:
            self.gpu_memory_free[row] = memory_free
            self.gpu_memory_free_min = float(self.gpu_memory_free.min())
        self.refresh_row(row)

    @staticmethod
    def _see_gpus(instance: Instance, report: InstanceReport) -> None:
        """ECC errors outlive an engine, so those that its first report shows are known to whoever
        started it; what comes on top is a fault."""
        if report.epoch != instance.report.epoch:
            instance.ecc_errors_first = None
        if instance.ecc_errors_first is None and report.gpus is not None:
            instance.ecc_errors_first = report.gpus.ecc_errors

    def _admit(self, report: InstanceReport, now: float) -> Instance:
        row = heappop(self._free_rows)  # the lowest, so that columns stay short
        instance = Instance(report.name, row, report, now, Breaker(self._limits.breaker))
        self._by_name[report.name] = instance
        self._by_row[row] = instance
        if row >= len(self.backlog_s):
            self._view(row + 1)
        self._enter(report)
        self._ledger.load(row).reported(report.step_tokens_max, now)
        return instance

    def _release(self, instance: Instance) -> None:
        row = instance.row
        self._resume(instance)
        self._cooling.discard(instance.name)
        self._probed.discard(instance.name)
        self._draining.discard(instance.name)
        del self._by_name[instance.name]
        self._by_row[row] = None
        heappush(self._free_rows, row)
        self._leave(instance.report)
        for name, column in self._all.items():
            column[row] = _FREE_ROW.get(name, 0.0)
        self._usable.clear()
        self.context_tokens_min = float(self.context_tokens.min())
        self.gpu_memory_free_min = float(self.gpu_memory_free.min())

    def _enter(self, report: InstanceReport) -> None:
        self._models[report.model] += 1
        self._lines.update(_lines(report))
        self._fingerprints[report.fingerprint] += 1
        if report.fingerprint not in self._fingerprint_ids:
            self._fingerprint_ids[report.fingerprint] = self._next_fingerprint_id
            self._next_fingerprint_id += 1
        if report.model not in self._model_ids:
            self._model_ids[report.model] = self._next_model_id
            self._next_model_id += 1

    def _leave(self, report: InstanceReport) -> None:
        self._models[report.model] -= 1
        self._lines.subtract(_lines(report))
        self._fingerprints[report.fingerprint] -= 1
        if not self._fingerprints[report.fingerprint]:
            del self._fingerprints[report.fingerprint]
            del self._fingerprint_ids[report.fingerprint]  # ids are never reused
        for line in _lines(report):
            if not self._lines[line]:
                del self._lines[line]
        if not self._models[report.model]:
            del self._models[report.model]
            self._contexts.pop(report.model, None)
            del self._model_ids[report.model]  # ids are never reused
            self._usable.clear()

    def _view(self, rows: int) -> None:
        """Shows the first ``rows`` rows of every column."""

        def column(name: str) -> Column:
            return self._all[name][:rows]

        self._model_id = column("model_id")
        self._fingerprint_id = column("fingerprint_id")
        self._serves_generate = column("serves_generate")
        self._serves_embed = column("serves_embed")
        self._stale_at_s = column("stale_at_s")
        self._free_uncredited = column("free_uncredited")
        self._free_prefill_tokens = column("free_prefill_tokens")
        self.context_tokens = column("context_tokens")
        self.backlog_s = column("backlog_s")
        self.prompt_s_per_token = column("prompt_s_per_token")
        self.output_s_per_token = column("output_s_per_token")
        self.free_sequences = column("free_sequences")
        self.free_kv_tokens = column("free_kv_tokens")
        self.kv_load = column("kv_load")
        self.gpu_memory_free = column("gpu_memory_free")
        self._usable.clear()


def _lines(report: InstanceReport) -> list[Line]:
    kinds = ((WorkKind.GENERATE, report.generates), (WorkKind.EMBED, report.embeds))
    return [(report.model, kind) for kind, can in kinds if can]
