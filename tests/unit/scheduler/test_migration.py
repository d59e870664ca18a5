"""Requests that go on elsewhere: gate, link, frames, instances and simulated engines, in virtual
time. The engine's next token is a hash of all before it, so that one token lost, repeated or made
from a wrong prefix changes everything after it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from inference_svc.adapters.simulated.engine import SimulatedEngine
from inference_svc.adapters.simulated.faults import Fault
from scheduler_svc.adapters.answers import finished
from scheduler_svc.domain.model import Outcome, PriorityClass, TicketState
from sluice.common.v1 import result_pb2, sampling_pb2
from sluice.errors import Code
from sluice.inference.v1 import inference_pb2
from tests.unit.scheduler.memory_mesh import END, PROFILE, Answer, Cuts, MemoryMesh, memory_mesh

Run = Callable[[Coroutine[Any, Any, None]], None]

PROMPT = "Tell me something long."


def sampling(**fields: Any) -> sampling_pb2.SamplingParams:
    return sampling_pb2.SamplingParams(temperature=0.0, **fields)


@dataclass(frozen=True)
class Case:
    """A request, and what the engine is scripted to say to it (``None``: what it makes up)."""

    sampling: sampling_pb2.SamplingParams
    reply: str | None = None
    reason: result_pb2.FinishReason.ValueType = result_pb2.FINISH_REASON_LENGTH
    says: str | None = field(default=None)


TEXT = "naïve 日本 😀 STO, then STOP and no more"
CASES = {
    "made up": Case(sampling(max_tokens=20)),
    "cut characters": Case(sampling(max_tokens=200), TEXT, result_pb2.FINISH_REASON_STOP, TEXT),
    "stop string": Case(
        sampling(max_tokens=200, stop=["STOP"]),
        TEXT,
        result_pb2.FINISH_REASON_STOP,
        TEXT[: TEXT.index("STOP")],
    ),
    "stop string left in": Case(
        sampling(max_tokens=200, stop=["STOP and"], include_stop=True),
        TEXT,
        result_pb2.FINISH_REASON_STOP,
        TEXT[: TEXT.index(" no more")],
    ),
    "max tokens in a character": Case(sampling(max_tokens=12), TEXT),
    "min tokens": Case(
        sampling(max_tokens=60, min_tokens=30, stop=["nai", "日", " "]),
        TEXT,
        result_pb2.FINISH_REASON_STOP,
    ),
    "special tokens and a penalty": Case(
        sampling(max_tokens=20, repetition_penalty=1.2, keep_special_tokens=True)
    ),
}


async def whole(mesh: MemoryMesh, case: Case) -> Answer:
    """The answer without any fault."""
    if case.reply is not None:
        mesh.rule(Fault(reply=case.reply, reply_bytes=True))
    answer = Answer.of(await mesh.over(mesh.submit(PROMPT, case.sampling)))
    end = inference_pb2.OutputEnd.FromString(answer.finish)
    assert end.finish_reason == case.reason
    assert case.says is None or answer.text == case.says
    return answer


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_stream_that_breaks_after_any_token_goes_on_as_if_it_had_not(
    run_virtual: Run, tmp_path: Path, case: Case
) -> None:
    """Every cut, the one after the last token and the one before the first included. Oracle: the
    answer without a cut, byte for byte. Mutants seen to fail: delivered_text_sent_again,
    position_starts_anew."""

    async def scenario() -> None:
        async with memory_mesh(tmp_path, "a", "b") as mesh:
            want = await whole(mesh, case)
            for cut in range(len(want.token_ids) + 1):
                mesh.execution.cut = Cuts(cut)
                live = await mesh.over(mesh.submit(PROMPT, case.sampling))
                assert Answer.of(live) == want, f"cut after {cut} tokens"
                assert live.attempt == 2
                assert live.ticket.migrations == (1 if cut else 0)

    run_virtual(scenario())


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_it_may_break_after_every_token(run_virtual: Run, tmp_path: Path, case: Case) -> None:
    """As many attempts as tokens, each of which makes one."""

    async def scenario() -> None:
        async with memory_mesh(tmp_path, *"abc", limits={"migrations_max": 1_000}) as mesh:
            want = await whole(mesh, case)
            cuts = Cuts(*range(1, len(want.token_ids) + 1))
            mesh.execution.cut = cuts
            live = await mesh.over(mesh.submit(PROMPT, case.sampling))
            assert Answer.of(live) == want
            assert not cuts.left
            assert live.attempt == len(want.token_ids) + 1

    run_virtual(scenario())


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_request_that_yields_after_any_token_goes_on_as_if_it_had_not(
    run_virtual: Run, tmp_path: Path, case: Case
) -> None:
    """An operator drains the instance that it runs on; what it makes until it has stopped counts.
    Oracle: as above."""

    async def scenario() -> None:
        quick = {"drain_run_max_s": -1.0, "yield_look_s": 0.001}
        async with memory_mesh(tmp_path, "a", "b", limits=quick) as mesh:
            want = await whole(mesh, case)
            for cut in range(1, len(want.token_ids) + 1):
                live = mesh.submit(PROMPT, case.sampling)

                def drain(name: str, delta: inference_pb2.Delta, cut: int = cut) -> None:
                    if delta.position + len(delta.token_ids) == cut:
                        mesh.execution.passed = lambda name, delta: None
                        mesh.drain(name, True)

                mesh.execution.passed = drain
                await mesh.over(live)
                assert Answer.of(live) == want, f"yielded after {cut} tokens"
                assert live.ticket.migrations == 0
                # The last tokens may be out before it is told to stop.
                assert live.attempt == 2 or cut >= len(want.token_ids) - 2
                for name in "ab":
                    mesh.drain(name, False)

    run_virtual(scenario())


def test_what_cannot_go_on_ends_with_an_error_that_says_how_far_it_came(
    run_virtual: Run, tmp_path: Path
) -> None:
    """Before the first token it is placed elsewhere, as ever."""

    async def scenario() -> None:
        async with memory_mesh(tmp_path, "a", "b") as mesh:
            want = await mesh.over(mesh.submit(PROMPT, sampling(max_tokens=20, seed=1)))
            whole_ids = list(want.outputs[0].token_ids)
            for cut in (0, 1, 2, 3, 4, 5, 20):
                mesh.execution.cut = Cuts(cut)
                live = await mesh.over(mesh.submit(PROMPT, sampling(max_tokens=20, seed=1)))
                assert list(live.outputs[0].token_ids) == whole_ids[: cut or None]
                if not cut:
                    assert live.ended is not None
                    continue
                assert live.error is not None
                assert (live.error.code, live.error.reason) == (Code.UNAVAILABLE, "INSTANCE_LOST")
                assert live.error.metadata["delivered_tokens"] == str(cut) == str(live.tokens)
                assert live.kept is None, "nothing is kept for nothing"

    run_virtual(scenario())


def test_it_never_goes_on_with_another_model(run_virtual: Run, tmp_path: Path) -> None:
    """An instance of the same name with other weights has all the room; the one with the same
    weights comes back after a while. Mutant seen to fail: fingerprint_ignored."""

    async def scenario() -> None:
        others = {"c": replace(PROFILE, weights="other")}
        async with memory_mesh(
            tmp_path, "a", "b", others=others, limits={"migrations_max": 50}
        ) as mesh:
            want = await whole(mesh, CASES["made up"])
            same = mesh.instances["a"].engine.describe().fingerprint
            # Until it is on an instance with the weights of the reference.
            for _ in range(20):
                cuts = Cuts(*range(1, 20))
                mesh.execution.cut = cuts
                live = await mesh.over(mesh.submit(PROMPT, CASES["made up"].sampling))
                if live.ticket.fingerprint == same:
                    assert Answer.of(live) == want
                else:
                    assert live.error is not None, "nobody else has what c has"
                    assert live.error.reason == "INSTANCE_LOST"

    run_virtual(scenario())


def test_an_instance_that_has_another_model_by_now_refuses_and_is_left_alone(
    run_virtual: Run, tmp_path: Path
) -> None:
    """The scheduler's knowledge is older than the instance: the engine's refusal is neutral, and a
    third instance goes on."""

    async def scenario() -> None:
        async with memory_mesh(tmp_path, "a", "b", "c") as mesh:
            want = await whole(mesh, CASES["made up"])
            live = mesh.submit(PROMPT, CASES["made up"].sampling)
            await asyncio.sleep(0.05)
            first = live.instance
            second, third = (mesh.instances[name] for name in "abc" if name != first)
            assert isinstance(second.engine, SimulatedEngine)
            second.engine._fingerprint = "another"
            second.report = lambda gate: None  # type: ignore[method-assign]
            for name in "abc":
                mesh.drain(name, name == third.name)
            mesh.execution.cut = Cuts(live.tokens, passed=live.tokens)
            await asyncio.sleep(0.05)
            mesh.drain(third.name, False)
            await mesh.over(live)
            assert Answer.of(live) == want
            refused = [start for name, start in mesh.execution.starts if name == second.name]
            assert any(start.work.HasField("continuation") for start in refused)
            assert live.ticket.migrations == 2

    run_virtual(scenario())


def test_batch_work_pauses_for_urgent_work_and_its_client_sees_only_that(
    run_virtual: Run, tmp_path: Path
) -> None:
    """The pause is longer than the inter-token limit, which does not end it. Mutants seen to fail:
    preempted_is_lost, pause_counts_as_silence."""

    async def scenario() -> None:
        profile = replace(PROFILE, sequences_max=1)
        async with memory_mesh(tmp_path, "a", profile=profile) as mesh:
            case = Case(sampling(max_tokens=200))
            want = await whole(mesh, case)
            batch = mesh.submit(
                PROMPT, case.sampling, priority_class=PriorityClass.BATCH, inter_token_limit_s=2.0
            )
            await asyncio.sleep(1.2)
            assert 0 < batch.tokens < 200
            began = asyncio.get_running_loop().time()
            urgent = [
                mesh.submit("now!", sampling(max_tokens=90), priority_class=PriorityClass.CRITICAL)
                for _ in range(4)
            ]
            await mesh.over(urgent[0])
            waited_s = urgent[0].first_token_s - began
            assert waited_s < 0.2, "it does not wait for the end of the batch work"
            assert batch.ticket.state is TicketState.WAITING
            for live in urgent[1:]:
                await mesh.over(live)
            assert asyncio.get_running_loop().time() - batch.last_token_s > 2.0
            await mesh.over(batch)
            assert Answer.of(batch) == want
            assert batch.ticket.yields == 1
            message = finished(batch, asyncio.get_running_loop().time(), 0.0).finished
            assert message.attempts == 2
            assert message.usage.completion_tokens == 200
            assert message.timings.queue.ToTimedelta().total_seconds() < 0.2
            total_s = message.timings.total.ToTimedelta().total_seconds()
            per_token_s = message.timings.per_output_token.ToTimedelta().total_seconds()
            assert total_s > 5.0
            assert per_token_s == pytest.approx(total_s / 200, rel=0.05), "the pause is in the mean"

    run_virtual(scenario())


def test_a_silent_instance_still_ends_a_request_that_went_on(
    run_virtual: Run, tmp_path: Path
) -> None:
    """The limit holds between the tokens of each attempt, its first one included."""

    async def scenario() -> None:
        async with memory_mesh(tmp_path, "a", "b") as mesh:
            live = mesh.submit(PROMPT, sampling(max_tokens=20), inter_token_limit_s=2.0)
            mesh.execution.cut = Cuts(5)
            await asyncio.sleep(0.03)
            mesh.rule(Fault(hang_after=0))
            await mesh.over(live)
            assert live.outcome is Outcome.INTER_TOKEN_TIMEOUT
            assert live.error is not None
            assert live.attempt == 2

    run_virtual(scenario())


def test_random_losses_drains_and_preemptions_lose_nothing(
    run_virtual: Run, tmp_path: Path
) -> None:
    """Forty requests of all classes over three small instances, while streams break and instances
    are drained and opened again at random. Oracle: each answer without a fault; all counters at
    zero afterwards; and what happened is seen to have happened."""

    async def scenario() -> None:
        random = Random(7)
        profile = replace(PROFILE, sequences_max=2)
        limits = {"drain_run_max_s": 0.1, "yield_run_min_s": 0.05, "migrations_max": 1_000}
        async with memory_mesh(tmp_path, *"abc", profile=profile, limits=limits) as mesh:
            wants = {}
            for number in range(8):
                text = f"question {number}"
                live = await mesh.over(mesh.submit(text, sampling(max_tokens=20 + 10 * number)))
                wants[text] = Answer.of(live)
            mesh.execution.cut = lambda delta: delta is not END and random.random() < 0.01
            lives = []
            for _ in range(40):
                number = random.randrange(8)
                cls = random.choice([PriorityClass.BATCH, *PriorityClass])
                live = mesh.submit(
                    f"question {number}", sampling(max_tokens=20 + 10 * number), priority_class=cls
                )
                lives.append((f"question {number}", live))
                await asyncio.sleep(random.random() * 0.2)
                mesh.drain(random.choice("abc"), random.random() < 0.3)
                mesh.gate.domain.check_invariants()
            for name in "abc":
                mesh.drain(name, False)
            for text, live in lives:
                assert Answer.of(await mesh.over(live)) == wants[text]
            assert sum(live.ticket.migrations for _, live in lives) > 10
            assert sum(live.ticket.yields for _, live in lives) > 5

    run_virtual(scenario())


def test_a_scheduler_gives_room_back_to_one_that_came_later(
    run_virtual: Run, tmp_path: Path
) -> None:
    """The first holds all but the other's reserve with work that runs for long; the second wants
    half. The instance lowers the first one's credit below what it holds, and continuable work
    yields. Mutant seen to fail: lowered_credit_ignored."""

    async def scenario() -> None:
        async with memory_mesh(tmp_path, "a", schedulers=2) as mesh:
            (later,) = mesh.beside
            case = Case(sampling(max_tokens=400))
            want = await whole(mesh, case)
            first = [mesh.submit(PROMPT, case.sampling) for _ in range(3)]
            await asyncio.sleep(1.5)
            assert mesh.gate.domain.snapshot().running == 3
            began = asyncio.get_running_loop().time()
            seconds = [later.submit("mine", sampling(max_tokens=50)) for _ in range(2)]
            for live in seconds:
                await later.over(live)
                assert live.first_token_s - began < 0.5
            assert not any(live.over for live in first)
            for live in first:
                assert Answer.of(await mesh.over(live)) == want
            assert sum(live.ticket.yields for live in first) == 1

    run_virtual(scenario())
