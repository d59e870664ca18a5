"""The simulated engine's step loop: continuous batching over one clock.

Owns the waiting queue, the running sequences and the KV memory. Used from one event loop; each
step is one timer callback on that loop's time, so that it runs under a virtual clock too. Steps
are laid out on absolute time and do not drift. A step that comes late by less than its own length
is made good by the next; more than that is lost, never made good in a burst.

In a step the sequences that write produce a token each; what is left of ``step_tokens_max`` reads
prompts, in order of arrival, in chunks. A sequence whose prompt is read writes its first token in
the same step. When the memory is full, the sequence admitted last is preempted: it gives back its
blocks and reads its tokens again later.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable

from inference_svc.adapters.simulated.faults import Fault
from inference_svc.adapters.simulated.kv import KvMemory
from inference_svc.adapters.simulated.meter import Meter
from inference_svc.adapters.simulated.model import EOS, FOLD, ROW_SHIFT, ROWS, STATE_MASK
from inference_svc.adapters.simulated.profile import SimulatedProfile
from inference_svc.adapters.simulated.sequence import Generation, Phase, SequenceState
from inference_svc.ports import FinishReason, OutputEnd
from sluice.errors import SluiceError, unavailable


class Batch:
    """All generations of one engine."""

    def __init__(
        self,
        profile: SimulatedProfile,
        loop: asyncio.AbstractEventLoop,
        crashed: Callable[[], None],
    ) -> None:
        self._profile = profile
        self._loop = loop
        self._crashed = crashed
        self.kv = KvMemory(
            profile.kv_tokens, profile.kv_block_tokens, prefix_cache=profile.prefix_cache
        )
        self.meter = Meter(loop.time())
        self._generations: dict[Generation, None] = {}  # in order of arrival
        self._waiting: deque[SequenceState] = deque()
        self._reading: list[SequenceState] = []
        self._plain: list[SequenceState] = []
        self._special: list[SequenceState] = []
        self._reads: list[tuple[SequenceState, int]] = []  # of the step under way
        self._stale = False  # a list holds sequences that are no longer live
        self._stepping = False
        self._stopped = False
        self._timer: asyncio.Handle | None = None
        self._due_s = self._begun_s = self._length_s = 0.0
        self._order = 0
        self.running = 0  # sequences that hold a place in the batch
        self.submitted = self.finished = self.aborted = self.failed = self.preemptions = 0

    @property
    def waiting(self) -> int:
        """Sequences that wait for a place."""
        return len(self._waiting)

    # --- from outside ---

    def submit(self, generation: Generation) -> None:
        """Queues a generation's sequences; its first step begins when the current one is over."""
        self.submitted += 1
        self._generations[generation] = None
        self._waiting.extend(generation.sequences)
        self._wake()

    def submit_complete(self, generation: Generation, text: str, end: OutputEnd) -> None:
        """Takes a continuation whose output was complete: it ends at once, without a step."""
        self.submitted += 1
        sequence = generation.sequences[0]
        sequence.phase = Phase.OVER
        generation.ends[0] = end
        generation.open = 0
        generation.counted = True
        self.finished += 1
        self._loop.call_soon(self._report_complete, generation, text)

    def abort(self, generation: Generation, reason: FinishReason) -> None:
        """Frees what a generation holds now; its sink learns it before the next step."""
        if generation.counted:
            return
        self.aborted += 1
        self._drop(generation)
        self._loop.call_soon(generation.sink.ended, generation.end(reason))

    def stop(self, reason: FinishReason, error: SluiceError | None = None) -> None:
        """Ends everything at once and stops stepping."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._stepping = False
        self._stopped = True
        for generation in list(self._generations):
            if error is None:
                self.aborted += 1
            else:
                self.failed += 1
            self._drop(generation)
            generation.sink.ended(generation.end(reason, error))
        self._sweep()

    # --- a generation's end ---

    def _report_complete(self, generation: Generation, text: str) -> None:
        sequence = generation.sequences[0]
        if text:
            sequence.deliver(sequence.index, text, (), sequence.position)
        generation.sink.ended(generation.end(FinishReason.STOP))

    def _drop(self, generation: Generation) -> None:
        """Takes a generation out of the engine, without reporting it."""
        generation.counted = True
        self._generations.pop(generation, None)
        for sequence in generation.sequences:
            if sequence.phase is Phase.WAITING:
                self._waiting.remove(sequence)
                sequence.phase = Phase.OVER
            elif sequence.phase is not Phase.OVER:
                self._release(sequence, Phase.OVER)
        self._wake()

    def _release(self, sequence: SequenceState, phase: Phase) -> None:
        """Takes a sequence's place and memory."""
        if sequence.timer is not None:
            sequence.timer.cancel()
            sequence.timer = None
        sequence.phase = phase
        sequence.live = False
        self._stale = True
        self.kv.free(sequence.hold)
        self.running -= 1

    def _finish(self, sequence: SequenceState, end: OutputEnd) -> None:
        """An output ended by itself."""
        self._release(sequence, Phase.OVER)
        generation = sequence.generation
        generation.ends[sequence.index] = end
        generation.open -= 1
        if not generation.open:
            self.finished += 1
            generation.counted = True
            self._generations.pop(generation, None)
            generation.sink.ended(generation.end(FinishReason.STOP))

    def _fail(self, generation: Generation, error: SluiceError) -> None:
        self.failed += 1
        self._drop(generation)
        generation.sink.ended(generation.end(FinishReason.ERROR, error))

    # --- planning a step ---

    def _wake(self) -> None:
        if self._waiting:
            self._step_from_rest()

    def _step_from_rest(self) -> None:
        if not self._stepping and not self._stopped:
            self._stepping = True
            # Not now: what arrives in the same turn of the loop goes into the same step.
            self._timer = self._loop.call_soon(self._begin_from_rest)

    def _begin_from_rest(self) -> None:
        now = self._loop.time()
        self._begun_s = now
        self._begin(now)

    def _begin(self, start_s: float) -> None:
        """Plans the step that starts at ``start_s`` and sets the timer for its end."""
        if self._stale:
            self._sweep()
        writing = len(self._plain) + len(self._special)
        budget = self._profile.step_tokens_max - writing
        self._reads = []
        for sequence in self._reading:
            budget = self._plan_read(sequence, budget)
        while self._waiting and budget > 0 and self.running < self._profile.sequences_max:
            if not self._admit(self._waiting[0]):
                break  # in order: a smaller one behind it would starve it
            budget = self._plan_read(self._waiting.popleft(), budget)
        if not writing and not self._reads:
            self._stepping = False
            self._timer = None
            return
        read_tokens = sum(count for _, count in self._reads)
        self._length_s = self._profile.step_s(writing + len(self._reads), read_tokens)
        self._due_s = start_s + self._length_s
        self._timer = self._loop.call_at(self._due_s, self._end_step)

    def _sweep(self) -> None:
        self._plain = [sequence for sequence in self._plain if sequence.live]
        self._special = [sequence for sequence in self._special if sequence.live]
        self._reading = [sequence for sequence in self._reading if sequence.live]
        self._stale = False

    def _plan_read(self, sequence: SequenceState, budget: int) -> int:
        count = min(sequence.unread, budget)
        if count > 0:
            self._reads.append((sequence, count))
        return budget - count

    def _admit(self, sequence: SequenceState) -> bool:
        """Gives a sequence a place and memory for its tokens and one more, if there is any."""
        tokens = sequence.prompt_tokens + sequence.position
        # At least one token is read, since the first one written follows from it.
        keys = sequence.keys[: (tokens - 1) // self.kv.block_tokens]
        found = self.kv.found(keys)
        blocks = self.kv.blocks_for(tokens + 1)
        if not self.kv.take(sequence.hold, keys[:found], blocks - found):
            return False
        cached = found * self.kv.block_tokens
        if sequence.cached_tokens is None:
            sequence.cached_tokens = cached
            if self._profile.prefix_cache:
                self.meter.looked(sequence.prompt_tokens, cached)
        sequence.unread = tokens - cached
        sequence.room = blocks * self.kv.block_tokens - sequence.prompt_tokens
        sequence.edge = min(sequence.limit, sequence.room)
        sequence.phase = Phase.RUNNING
        sequence.live = True
        self._order += 1
        sequence.order = self._order
        self.running += 1
        self._reading.append(sequence)
        return True

    # --- carrying a step out ---

    def _end_step(self) -> None:
        prompts = self._read_prompts()
        outputs = self._write_plain() + self._write_special()
        now = self._loop.time()
        self.meter.step(now, now - self._begun_s, prompts, outputs)
        self._begun_s = now
        if self._stepping:  # a crash stops the loop from inside
            self._begin(max(self._due_s, now - self._length_s))

    def _read_prompts(self) -> int:
        """Does the step's share of reading; returns the tokens read."""
        total = 0
        over = False
        for sequence, count in self._reads:
            if not sequence.live:
                continue
            total += count
            sequence.unread -= count
            if not sequence.unread:
                over = True
                self.kv.publish(sequence.hold, sequence.keys)
                self._join(sequence)
        if over:
            self._reading = [sequence for sequence in self._reading if sequence.unread]
        return total

    def _join(self, sequence: SequenceState) -> None:
        (self._plain if sequence.writer is None else self._special).append(sequence)

    def _write_plain(self) -> int:
        """One token for each plain sequence: the hot loop, a microsecond a token."""
        first_row = ROWS[0]
        rows = ROWS
        written = 0
        for sequence in self._plain:
            if not sequence.live:
                continue
            state = sequence.state
            row = sequence.row
            position = sequence.position
            written += 1
            if state < sequence.eos_below and row is first_row:
                sequence.position = position + 1
                sequence.deliver(sequence.index, "", (EOS,), position)
                if sequence.live:
                    self._finish(sequence, OutputEnd(sequence.index, FinishReason.STOP))
                continue
            choice = row[state >> ROW_SHIFT]
            sequence.state = (state * FOLD + choice.fold) & STATE_MASK
            sequence.row = rows[choice.row]
            sequence.position = position + 1
            sequence.deliver(sequence.index, choice.text, choice.ids, position)
            if position + 1 >= sequence.edge and sequence.live:
                self._look_up(sequence)
        return written

    def _look_up(self, sequence: SequenceState) -> None:
        """A sequence is at its limit, or at the end of its blocks."""
        if sequence.position >= sequence.limit:
            self._finish(sequence, OutputEnd(sequence.index, FinishReason.LENGTH))
            return
        while not self.kv.take(sequence.hold, (), 1):
            if self._preempt_last() is sequence:
                return
        sequence.room += self.kv.block_tokens
        sequence.edge = min(sequence.limit, sequence.room)

    def _preempt_last(self) -> SequenceState:
        lists = (self._reading, self._plain, self._special)
        live = [sequence for one in lists for sequence in one if sequence.live]
        last = max(live, key=lambda sequence: sequence.order)
        self._release(last, Phase.WAITING)
        self._waiting.appendleft(last)
        self.preemptions += 1
        return last

    def _write_special(self) -> int:
        written = 0
        for sequence in self._special:
            if sequence.live:
                written += self._write_one(sequence)
        return written

    def _write_one(self, sequence: SequenceState) -> int:
        """One delta of a sequence that is not plain; returns its tokens."""
        writer = sequence.writer
        assert writer is not None
        if writer.fault is not None and not self._may_write(sequence, writer.fault):
            return 0
        position = sequence.position
        done = writer.write(sequence)
        sequence.deliver(sequence.index, done.text, done.token_ids, position, done.logprobs)
        if not sequence.live:
            pass  # aborted by its own sink
        elif done.end is not None:
            self._finish(sequence, done.end)
        else:
            self._go_on(sequence, writer.fault)
        return len(done.token_ids)

    def _go_on(self, sequence: SequenceState, fault: Fault | None) -> None:
        """Makes room for the next delta, and keeps its pace."""
        while sequence.position >= sequence.edge:
            self._look_up(sequence)
            if not sequence.live:
                return
        rest_s = 0.0 if fault is None else (fault.pace_ms or 0.0) / 1000.0 - self._length_s
        if rest_s > 0.0:
            self._park(sequence, self._due_s + rest_s)

    # --- scripted faults ---

    def _may_write(self, sequence: SequenceState, fault: Fault) -> bool:
        """Lets a fault happen that is due; whether the sequence writes in this step after all."""
        made = sequence.position - sequence.base
        if fault.exit_after is not None and made >= fault.exit_after:
            os._exit(fault.exit_code)
        if fault.crash_after is not None and made >= fault.crash_after:
            self.stop(
                FinishReason.ERROR, unavailable("ENGINE_DIED", "The engine died while it ran.")
            )
            self._crashed()
            return False
        if fault.fail_after is not None and made >= fault.fail_after:
            self._fail(sequence.generation, fault.error())
            return False
        writer = sequence.writer
        assert writer is not None
        if fault.hang_after is not None and made >= fault.hang_after and not writer.hung:
            writer.hung = True
            hang_s = None if fault.hang_ms is None else fault.hang_ms / 1000.0
            self._park(sequence, None if hang_s is None else self._due_s + hang_s)
            return False
        return True

    def _park(self, sequence: SequenceState, until_s: float | None) -> None:
        """Sets a sequence aside, with its place and memory, until a time or an abort."""
        sequence.phase = Phase.PARKED
        sequence.live = False
        self._stale = True
        if until_s is not None:
            sequence.timer = self._loop.call_at(until_s, self._unpark, sequence)

    def _unpark(self, sequence: SequenceState) -> None:
        sequence.timer = None
        sequence.phase = Phase.RUNNING
        if self._stale:
            self._sweep()  # it may still stand in its list
        sequence.live = True
        self._special.append(sequence)
        self._step_from_rest()
