"""The engine model: continuous batching with one event per change of the batch, not per step.

Between two changes every step lasts the same and writes one token for each sequence, so that a run
of steps is one *stretch*: its end is known when it begins. A stretch ends with the step in which
something changes: a prompt was read, an output ends, the memory is full. One that is under way is
cut at the end of the running step when a sequence comes. Outputs end at a known count of steps,
kept in a heap, and sequences take a KV block at a known step modulo the block's size, kept as
counts. So the cost is per request, whatever its length, and times are those of the step-by-step
engine (``inference_svc``), preemptions included.

Only the prefix cache is an approximation (``prefix_cache``). Single-threaded and without a clock:
the caller passes the time in, and calls :meth:`EngineModel.advance` at :attr:`EngineModel.due_s`.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from math import ceil, inf

from scheduler_svc.simulation.kinds import GpuKind
from scheduler_svc.simulation.prefix_cache import PrefixCache

# Of a step: a time this close to a step's end is at its end.
_TOUCH = 1e-6
# Rates are those of the last window that is over: from its beginning to the first end of a step, or
# look at it, that is so much later. As the simulated engine's meter does.
WINDOW_S = 0.5

WAITING, READING, WRITING, OVER = range(4)

Counts = tuple[float, int, int, int]  # seconds of steps, steps, prompt and output tokens: totals


class Sequence:
    """One request in an engine. ``key`` is the caller's; counts are tokens. ``written`` is what it
    had written before it joined last: above 0 after a preemption. ``shift`` + step is how many
    tokens it has, prompt and output, while it writes."""

    __slots__ = (
        "cached",
        "end_step",
        "key",
        "order",
        "output_tokens",
        "prefix",
        "prompt_tokens",
        "shift",
        "state",
        "unread",
        "written",
    )

    def __init__(
        self, key: int, prompt_tokens: int, output_tokens: int, prefix: tuple[int, ...] = ()
    ) -> None:
        self.key = key
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.prefix = prefix
        self.state = WAITING
        self.unread = self.written = self.shift = self.end_step = self.order = 0
        self.cached = -1  # tokens found when it was first admitted


class Meter:
    """Rates of the last window that is over; ``step_ms`` is None before the first step."""

    __slots__ = (
        "_counts",
        "due_s",
        "output_tokens_per_s",
        "prompt_tokens_per_s",
        "start_s",
        "step_ms",
    )

    def __init__(self) -> None:
        self.start_s = 0.0
        self.due_s = WINDOW_S  # when the window may end
        self._counts: Counts = (0.0, 0, 0, 0)
        self.prompt_tokens_per_s = self.output_tokens_per_s = 0.0
        self.step_ms: float | None = None

    def close(self, now: float, counts: Counts) -> None:
        """Ends the window, and begins the next."""
        busy_s, steps, prompts, outputs = counts
        busy_then_s, steps_then, prompts_then, outputs_then = self._counts
        span_s = now - self.start_s
        self.prompt_tokens_per_s = (prompts - prompts_then) / span_s
        self.output_tokens_per_s = (outputs - outputs_then) / span_s
        if steps > steps_then:
            self.step_ms = (busy_s - busy_then_s) / (steps - steps_then) * 1_000.0
        self._counts = counts
        self.start_s, self.due_s = now, now + WINDOW_S


class EngineModel:
    """One engine of a kind. Counters are totals of whole stretches; :meth:`so_far` counts up to a
    time in the middle of one."""

    __slots__ = (
        "_base_s",
        "_block",
        "_ends",
        "_length_s",
        "_order",
        "_per_sequence_s",
        "_phases",
        "_prefill_s",
        "_reading",
        "_reads",
        "_running",
        "_start_s",
        "_step",
        "_steps",
        "_used",
        "_waiting",
        "_writing",
        "blocks",
        "busy_s",
        "cache",
        "due_s",
        "kind",
        "meter",
        "output_tokens",
        "preemptions",
        "prompt_tokens",
        "sequence_s",
        "stamp",
    )

    def __init__(self, kind: GpuKind, *, prefix_block_tokens: int = 0) -> None:
        self.kind = kind
        self._base_s = kind.decode_step_ms / 1_000.0
        self._per_sequence_s = kind.decode_step_ms_per_sequence / 1_000.0
        self._prefill_s = 1.0 / kind.prefill_tokens_per_s
        self._block = kind.kv_block_tokens
        self.blocks = kind.kv_tokens // kind.kv_block_tokens
        self.cache = PrefixCache(prefix_block_tokens) if prefix_block_tokens else None
        self._waiting: deque[Sequence] = deque()
        self._reading: list[Sequence] = []
        self._running: dict[int, Sequence] = {}  # by order of admission
        self._writing: dict[int, Sequence] = {}  # in the order in which they began to
        self._ends: list[tuple[int, int]] = []  # (step, order)
        self._phases = [0] * self._block  # sequences that take a block at a step, modulo
        self._reads: list[tuple[Sequence, int]] = []  # of the step under way
        self._used = 0  # blocks
        self._order = 0
        self._step = 0  # at the beginning of the stretch
        self._steps = 0  # of the stretch
        self._start_s = 0.0
        self._length_s = 0.0
        self.due_s = inf  # when to call advance; inf: idle
        self.stamp = 0  # changes with due_s
        self.meter = Meter()
        self.preemptions = 0
        self.busy_s = self.sequence_s = 0.0
        self.prompt_tokens = self.output_tokens = 0

    # --- what it holds ---

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def kv_tokens_used(self) -> int:
        """At the beginning of the stretch, in whole blocks."""
        return self._used * self._block

    def so_far(self, now: float) -> Counts:
        """Totals up to now, whole steps only."""
        return self._counts_after(self._steps_by(now))

    def read_meter(self, now: float) -> Meter:
        """The meter, its window closed if it is over."""
        self._meter_steps(self._steps_by(now))
        if now >= self.meter.due_s:
            self.meter.close(now, self.so_far(now))
        return self.meter

    def written(self, now: float) -> list[tuple[int, int]]:
        """Key and output tokens so far of each sequence that writes."""
        step = self._step + self._steps_by(now)
        return [(seq.key, seq.shift + step - seq.prompt_tokens) for seq in self._writing.values()]

    # --- what comes in ---

    def fits(self, prompt_tokens: int) -> bool:
        """Whether a prompt leaves room for at least one token of output."""
        return prompt_tokens < self.kind.context_tokens

    def cached_tokens(self, seq: Sequence) -> int:
        """Tokens of its prompt that are in the prefix cache now."""
        if self.cache is None:
            return 0
        # At least one token is read, since the first one written follows from it.
        return min(self.cache.find(seq.prefix), seq.prompt_tokens - 1)

    def start(self, seq: Sequence, now: float) -> None:
        """Queues a sequence: it is read from the next step on. Output beyond the context is cut."""
        seq.output_tokens = min(seq.output_tokens, self.kind.context_tokens - seq.prompt_tokens)
        assert seq.output_tokens > 0, "ask fits first"
        self._waiting.append(seq)
        if len(self._waiting) == 1 and len(self._running) < self.kind.sequences_max:
            self._cut(now)

    def abort(self, seq: Sequence, now: float) -> None:
        """Takes a sequence out at once; the step under way ends as planned."""
        if seq.state == WAITING:
            self._waiting.remove(seq)
        elif seq.state != OVER:
            self._settle(now)
            self._release(seq, self._step)
        seq.state = OVER
        if self.due_s < inf:
            self._cut(now)

    def advance(self, now: float) -> tuple[list[Sequence], list[Sequence]]:
        """The stretch is over: returns who wrote the first token in its last step, and whose
        output ended with it, and begins the next stretch."""
        first: list[Sequence] = []
        over: list[Sequence] = []
        if self._steps:
            self._meter_steps(self._steps - 1)
            self._account(self._steps - 1)
            self.busy_s += self._length_s
            self.sequence_s += self._length_s * len(self._running)
            self._step += 1
            joined = self._end_reads() if self._reads else []
            takes = self._phases[self._step % self._block]
            if self._used + takes <= self.blocks:
                self._used += takes
                self.output_tokens += len(self._writing)
                over = self._end_outputs()
                first = [seq for seq in joined if not seq.written]
            else:
                first, over = self._write_in_turn(joined)
            if now >= self.meter.due_s:
                self.meter.close(now, self._counts_after(0))
        self._plan(now)
        return first, over

    # --- stretches ---

    def _steps_by(self, now: float) -> int:
        """Whole steps of the stretch that are over; the last one only by :meth:`advance`."""
        if self._steps < 2:
            return 0
        return min(self._steps - 1, int((now - self._start_s) / self._length_s + _TOUCH))

    def _counts_after(self, steps: int) -> Counts:
        """Totals after so many steps of the stretch, none in which the batch changes."""
        return (
            self.busy_s + steps * self._length_s,
            self._step + steps,
            self.prompt_tokens,
            self.output_tokens + steps * len(self._writing),
        )

    def _meter_steps(self, steps: int) -> None:
        """Closes windows that end in the first ``steps`` steps of the stretch."""
        meter = self.meter
        while steps and meter.due_s <= self._start_s + steps * self._length_s:
            step = max(1, ceil((meter.due_s - self._start_s) / self._length_s - _TOUCH))
            if step > steps:
                return
            meter.close(self._start_s + step * self._length_s, self._counts_after(step))

    def _account(self, steps: int) -> None:
        """Counts so many steps as done: none in which the batch changes."""
        if not steps:
            return
        span = steps * self._length_s
        self.busy_s += span
        self.sequence_s += span * len(self._running)
        self.output_tokens += steps * len(self._writing)
        cycles, rest = divmod(steps, self._block)
        taken = cycles * len(self._writing)
        for step in range(self._step + 1, self._step + 1 + rest):
            taken += self._phases[step % self._block]
        self._used += taken
        self._step += steps

    def _settle(self, now: float) -> None:
        """Counts the whole steps that are over, so that the batch may change."""
        done = self._steps_by(now)
        self._meter_steps(done)
        self._account(done)
        self._steps -= done
        self._start_s += done * self._length_s

    def _cut(self, now: float) -> None:
        """Ends the stretch with the step under way; an idle engine begins at once."""
        if self.due_s == inf:
            self._steps = 0
            self._start_s = self.due_s = now
            self.stamp += 1
        elif self._steps > 1:
            steps = self._steps_by(now) + 1
            if steps < self._steps:
                self._steps = steps
                self.due_s = self._start_s + steps * self._length_s
                self.stamp += 1

    def _plan(self, now: float) -> None:
        """Begins a stretch at ``now``: the sizes of its steps, and how many there are."""
        sequences_max = self.kind.sequences_max
        budget = self.kind.step_tokens_max - len(self._writing)
        reads = self._reads
        for seq in self._reading:
            count = min(seq.unread, budget)
            if count > 0:
                reads.append((seq, count))
                budget -= count
        while self._waiting and budget > 0 and len(self._running) < sequences_max:
            seq = self._waiting[0]
            if not self._admit(seq):
                break  # in order: a smaller one behind it would starve it
            self._waiting.popleft()
            count = min(seq.unread, budget)
            reads.append((seq, count))
            budget -= count
        self.stamp += 1
        self._start_s = now
        if reads:
            tokens = sum(count for _, count in reads)
            self._length_s = (
                self._base_s
                + self._per_sequence_s * (len(self._writing) + len(reads))
                + tokens * self._prefill_s
            )
            self._steps = 1
        elif self._writing:
            self._length_s = self._base_s + self._per_sequence_s * len(self._writing)
            self._steps = self._steps_to_change()
        else:
            self._steps = 0
            self.due_s = inf
            return
        self.due_s = now + self._steps * self._length_s

    def _steps_to_change(self) -> int:
        """Steps up to the one in which an output ends or a block is missing."""
        ends = self._ends
        while not self._is_end(*ends[0]):
            heappop(ends)
        to_end = ends[0][0] - self._step
        cycles, free = divmod(self.blocks - self._used, len(self._writing))
        to_full = cycles * self._block
        while to_full < to_end and free >= 0:
            to_full += 1
            free -= self._phases[(self._step + to_full) % self._block]
        return min(to_end, to_full)

    # --- a step with changes ---

    def _end_reads(self) -> list[Sequence]:
        """The step read prompts: those that are read through write from this step on."""
        joined = []
        for seq, count in self._reads:
            if seq.state != READING:
                continue  # it was aborted
            self.prompt_tokens += count
            seq.unread -= count
            if seq.unread:
                continue
            seq.state = WRITING
            seq.shift = seq.prompt_tokens + seq.written + 1 - self._step
            seq.end_step = self._step + seq.output_tokens - seq.written - 1
            heappush(self._ends, (seq.end_step, seq.order))
            self._writing[seq.order] = seq
            self._phases[-seq.shift % self._block] += 1
            joined.append(seq)
            if self.cache is not None:
                self.cache.add(seq.prefix, (self.blocks - self._used) * self._block)
        self._reading = [seq for seq in self._reading if seq.state == READING]
        self._reads.clear()
        return joined

    def _is_end(self, step: int, order: int) -> bool:
        """Whether an entry of the heap is still true: preemptions and aborts leave dead ones."""
        seq = self._writing.get(order)
        return seq is not None and seq.end_step == step

    def _end_outputs(self) -> list[Sequence]:
        over = []
        while self._ends and self._ends[0][0] <= self._step:
            end, order = heappop(self._ends)
            if self._is_end(end, order):
                seq = self._writing[order]
                self._release(seq, self._step)
                seq.state = OVER
                over.append(seq)
        return over

    def _write_in_turn(self, joined: list[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
        """The step in which the memory is full, sequence by sequence: who needs a block and finds
        none preempts the one that was admitted last, maybe itself. Returns as :meth:`advance`."""
        fresh = [seq for seq in joined if not seq.written]
        over = []
        wrote = set()
        for seq in list(self._writing.values()):
            if seq.state != WRITING:
                continue  # preempted before its turn
            wrote.add(seq.order)
            self.output_tokens += 1
            if seq.end_step == self._step:
                # It did not take the block that its release would give back.
                self._release(seq, self._step - 1)
                seq.state = OVER
                over.append(seq)
            elif (seq.shift + self._step) % self._block == 0:
                while self._used >= self.blocks and seq.state == WRITING:
                    last = self._running[next(reversed(self._running))]
                    # What is in hand has its token, but not the block for the next one.
                    has = last.order in wrote
                    self._preempt(last, self._step if has else self._step - 1, last is seq)
                if seq.state == WRITING:
                    self._used += 1
        return [seq for seq in fresh if seq.order in wrote], over

    def _preempt(self, seq: Sequence, step: int, lacks_block: bool) -> None:
        """Puts a sequence back to the head of the queue; it reads its tokens again later."""
        writes = seq.state == WRITING
        self._used += lacks_block
        self._release(seq, step)
        if writes:
            seq.written = seq.shift + step - seq.prompt_tokens
        seq.state = WAITING
        self._waiting.appendleft(seq)
        self.preemptions += 1

    # --- memory ---

    def _admit(self, seq: Sequence) -> bool:
        """Gives a sequence a place and memory for its tokens and one more, if there is any."""
        tokens = seq.prompt_tokens + seq.written
        blocks = tokens // self._block + 1
        if self._used + blocks > self.blocks:
            return False
        cached = self.cached_tokens(seq)
        if seq.cached < 0:
            seq.cached = cached
            if self.cache is not None:
                self.cache.looked_tokens += seq.prompt_tokens
                self.cache.hit_tokens += cached
        seq.unread = tokens - cached
        seq.state = READING
        self._order += 1
        seq.order = self._order
        self._running[seq.order] = seq
        self._reading.append(seq)
        self._used += blocks
        return True

    def _release(self, seq: Sequence, step: int) -> None:
        """Takes the place of a sequence, and the memory that it has after ``step``."""
        del self._running[seq.order]
        if seq.state == WRITING:
            tokens = seq.shift + step
            self._phases[-seq.shift % self._block] -= 1
            del self._writing[seq.order]
        else:
            tokens = seq.prompt_tokens + seq.written
            self._reading.remove(seq)
        self._used -= tokens // self._block + 1
