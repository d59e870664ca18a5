"""Requests that go on elsewhere: gate, link, frames, instances and simulated engines, in virtual
time. The engine's next token is a hash of all before it, so that one token lost, repeated or made
from a wrong prefix changes everything after it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from inference_svc.adapters.simulated.faults import Fault
from scheduler_svc.adapters.live_request import LiveRequest
from sluice.common.v1 import result_pb2, sampling_pb2
from sluice.inference.v1 import inference_pb2
from tests.unit.scheduler.memory_mesh import END, MemoryMesh, memory_mesh

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


@dataclass
class Answer:
    """All that a client could see."""

    text: str
    token_ids: list[int]
    finish: bytes
    usage: tuple[int, int]

    @staticmethod
    def of(live: LiveRequest) -> Answer:
        assert live.error is None, live.error
        assert live.ended is not None
        usage = live.usage()
        (output,) = live.outputs
        (end,) = live.ended.outputs
        assert usage.completion_tokens == len(output.token_ids) == live.tokens
        return Answer(
            "".join(output.parts),
            list(output.token_ids),
            end.SerializeToString(deterministic=True),
            (usage.prompt_tokens, usage.completion_tokens),
        )


class Cuts:
    """Breaks the stream after each of so many tokens of the output, each time once; one beyond the
    last is the end itself."""

    def __init__(self, *after: int) -> None:
        self.left = sorted(after)
        self.passed = 0

    def __call__(self, delta: inference_pb2.Delta) -> bool:
        if delta is not END and delta.position != self.passed and delta.token_ids:
            raise AssertionError("output that was cut off comes again, or is missing")
        if self.left and (delta is END or self.left[0] <= self.passed):
            self.left.pop(0)
            return True
        self.passed += len(delta.token_ids)
        return False


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
        async with memory_mesh(tmp_path, "a", "b", "c", migrations_max=1_000) as mesh:
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
        async with memory_mesh(
            tmp_path, "a", "b", drain_run_max_s=-1.0, yield_look_s=0.001
        ) as mesh:
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
