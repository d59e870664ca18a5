"""Prompts outstanding on an instance are bounded: what a burst of long prompts does to the rest."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import numpy as np
import pytest

from scheduler_svc.domain.limits import SchedulerLimits
from scheduler_svc.domain.model import PriorityClass
from scheduler_svc.simulation.arrivals import Arrival
from scheduler_svc.simulation.kinds import GpuKind
from scheduler_svc.simulation.record import Group
from scheduler_svc.simulation.run import Options, Simulation

KIND = GpuKind("default")
FULL_STEP_S = KIND.step_tokens_max / KIND.prefill_tokens_per_s + (
    (KIND.decode_step_ms + KIND.decode_step_ms_per_sequence * KIND.sequences_max) / 1_000.0
)


def chat(documents: int) -> Group:
    """Interactive requests of 200 tokens, 6 a second for 30 s; after 10 s so many documents of
    6,000 tokens come at once, as batch work."""

    def come() -> Iterator[Arrival]:
        random, at_s, sent = Random(1), 0.0, False
        while at_s < 30.0:
            at_s += random.expovariate(6.0)
            if at_s > 10.0 and not sent:
                sent = True
                for _ in range(documents):
                    yield Arrival(10.0, "documents", PriorityClass.BATCH, 6_000, 20)
            yield Arrival(max(at_s, 10.0 * sent), "chat", PriorityClass.INTERACTIVE, 200, 100)

    simulation = Simulation(Options(fleet=[(KIND, 1)], limits=SchedulerLimits()))
    simulation.run(come())
    simulation.check()
    return simulation.recorder.groups[PriorityClass.INTERACTIVE, "chat"]


@pytest.mark.parametrize("documents", [20, 60, 200])
def test_a_burst_of_long_prompts_costs_running_streams_and_new_ones_a_step_or_two(
    documents: int,
) -> None:
    """Goal: what waits inside the engine is bounded, however large the burst. Method: chats run
    while 20 to 200 long documents come at once. Oracle: a token of a chat takes less than a full
    engine step in the mean of its stream; a first token no more than the prompts that may be
    outstanding and its own step. Mutant seen to fail: prompts outstanding without a bound."""
    group = chat(documents)
    assert max(group.tpot_s) < FULL_STEP_S
    outstanding_s = (SchedulerLimits().prefill_steps_max + 1.0) * FULL_STEP_S
    assert np.percentile(np.frombuffer(group.ttft_s), 99) < outstanding_s


def test_without_long_prompts_streams_keep_their_pace() -> None:
    group = chat(0)
    assert max(group.tpot_s) < 1.5 * KIND.unloaded_tpot_s
