"""The engine contract on the real engine, and what is vLLM's alone.

One engine serves the whole module, so that every case also shows that it survived the cases before.
The last class kills that engine.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from agent_svc.domain.tool_format import Ask
from inference_svc.adapters.vllm_engine.settings import EngineConfigError
from inference_svc.ports import (
    Constraint,
    ConstraintKind,
    Engine,
    FinishReason,
    Sampling,
    TextPrompt,
)
from sluice.common.v1 import sampling_pb2
from sluice.errors import Code, SluiceError
from tests.contract.engine_contract import GREEDY, PROMPT, GenerationContract, chat, names, refused
from tests.contract.engine_contract_more import ContinuationContract, continuation
from tests.contract.engine_harness import EngineHarness, begin, finish, generate, until
from tests.contract.tool_task import run_task
from tests.contract.vllm_support import CHAT_MODEL, MARKS, harness_of, running_engine, settings
from tests.unit.scheduler.memory_mesh import Answer, Cuts, memory_mesh

pytestmark = MARKS

CONTEXT_TOKENS = 1024
NEAR_TIE = 0.05  # below this difference of log probabilities another batch may choose otherwise


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def harness() -> AsyncIterator[EngineHarness]:
    """The chat model."""
    wanted = settings(CHAT_MODEL, max_model_len=CONTEXT_TOKENS)
    async with running_engine(wanted) as engine:
        yield harness_of(engine, CHAT_MODEL)


class Lent:
    """The module's engine, for instances that would start and close it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def start(self) -> None:
        """It runs already."""

    async def close(self) -> None:
        """Others go on with it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


class TestVllmContract(GenerationContract, ContinuationContract):
    """Every case of the contract."""


class TestVllmItself:
    """What only a real model shows."""

    async def test_it_knows_the_capital_of_france(self, harness: EngineHarness) -> None:
        question = chat(("user", "What is the capital of France?"))
        done = await generate(harness, question, Sampling(temperature=0.0, max_tokens=24))
        assert "Paris" in done.sink.text()
        assert done.sink.reason() is FinishReason.STOP

    async def test_the_small_model_completes_a_task_of_several_steps(
        self, harness: EngineHarness
    ) -> None:
        """Structured output and the tool choice EACH let a model that cannot plan take every step
        in the right form. Whether what it writes into them is right is its own (here it was: 84),
        and may differ with the processor's rounding."""

        async def ask_engine(asked: Ask) -> tuple[str, str]:
            schema = asked.json_schema
            constraint = Constraint(ConstraintKind.JSON_SCHEMA, schema) if schema else None
            done = await generate(
                harness,
                chat(*((message.role, message.content) for message in asked.messages)),
                Sampling(temperature=0.0, max_tokens=80, constraint=constraint),
            )
            return done.sink.text(), done.sink.reason().value

        done = await run_task(ask_engine)
        assert done.problems == []
        assert done.calls == ["search", "calculator"]
        assert all(value for arguments in done.arguments for value in arguments.values())
        assert done.answer

    async def test_the_description_is_vllms_own(self, harness: EngineHarness) -> None:
        model = harness.engine.describe()
        assert model.engine.startswith("vllm ")
        assert not model.simulated
        assert model.chat
        assert model.structured_output
        assert not model.embed
        assert model.context_tokens == CONTEXT_TOKENS
        assert model.dtype == "float32"
        assert model.kv_tokens % model.kv_block_tokens == 0

    async def test_a_continuation_is_the_uninterrupted_text_up_to_a_near_tie(
        self, harness: EngineHarness
    ) -> None:
        sampling = replace(GREEDY, max_tokens=32)
        whole = await generate(harness, PROMPT, replace(sampling, logprobs=2))
        ids = whole.sink.token_ids()
        sure = len(ids)
        for place, entry in enumerate(whole.sink.logprobs()):
            if entry.top[0].logprob - entry.top[1].logprob < NEAR_TIE:
                sure = place
                break
        assert sure >= 2, "another prompt is needed: this one has a near tie at once"
        for cut in {1, sure // 2, sure - 1}:
            delivered = harness.decode(ids[:cut])
            rest = await generate(
                harness, PROMPT, sampling, continuation(harness, ids[:cut], delivered)
            )
            joined = ids[:cut] + rest.sink.token_ids()
            assert joined[:sure] == ids[:sure]
            text = delivered + rest.sink.text()
            assert text.startswith(harness.decode(ids[:sure]))

    async def test_a_stream_that_breaks_goes_on_by_the_schedulers_own_continuation(
        self, harness: EngineHarness, tmp_path: Path
    ) -> None:
        """Gate, link, frames and the instance's own parts before the real engine; the scheduler's
        code makes the second start. As above up to the first near tie, and without a gap."""
        sampling = replace(GREEDY, max_tokens=24)
        whole = await generate(harness, PROMPT, replace(sampling, logprobs=2))
        ids = whole.sink.token_ids()
        ties = [
            place
            for place, entry in enumerate(whole.sink.logprobs())
            if entry.top[0].logprob - entry.top[1].logprob < NEAR_TIE
        ]
        sure = min(ties, default=len(ids))
        assert sure >= 2, "another prompt is needed: this one has a near tie at once"
        lent = Lent(harness.engine)
        wanted = sampling_pb2.SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
        async with memory_mesh(tmp_path, engines={"a": lent, "b": lent}) as mesh:
            for cuts in ((1,), (sure // 2,), (sure - 1,), (1, sure // 2, len(ids))):
                mesh.execution.cut = Cuts(*cuts)
                answer = Answer.of(await mesh.over(mesh.submit(PROMPT, wanted)))
                assert tuple(answer.token_ids[:sure]) == ids[:sure]
                assert answer.text == harness.decode(answer.token_ids)
                assert answer.usage == (len(whole.prepared.prompt_token_ids), 24)

    async def test_a_repetition_penalty_counts_the_tokens_before_the_seam(
        self, harness: EngineHarness
    ) -> None:
        sampling = replace(GREEDY, repetition_penalty=2.0, max_tokens=12)
        whole = await generate(harness, PROMPT, sampling)
        ids = whole.sink.token_ids()
        rest = await generate(
            harness, PROMPT, sampling, continuation(harness, ids[:6], harness.decode(ids[:6]))
        )
        assert (ids[:6] + rest.sink.token_ids())[:8] == ids[:8]

    async def test_an_output_that_had_ended_is_not_gone_on_with(
        self, harness: EngineHarness
    ) -> None:
        question = chat(("user", "What is the capital of France?"))
        sampling = Sampling(temperature=0.0, max_tokens=64)
        whole = await generate(harness, question, sampling)
        assert whole.sink.reason() is FinishReason.STOP
        ids, text = whole.sink.token_ids(), whole.sink.text()
        rest = await generate(harness, question, sampling, continuation(harness, ids, text[:-4]))
        assert rest.sink.reason() is FinishReason.STOP
        assert rest.sink.token_ids() == ()
        assert rest.sink.text() == text[-4:]
        assert rest.sink.end is not None
        assert rest.sink.end.completion_tokens == 0

    async def test_a_seed_of_minus_one_is_a_seed(self, harness: EngineHarness) -> None:
        sampling = Sampling(temperature=1.0, seed=-1, max_tokens=12, ignore_eos=True)
        first = await generate(harness, PROMPT, sampling)
        again = await generate(harness, PROMPT, sampling)
        assert first.sink.token_ids() == again.sink.token_ids()

    async def test_several_greedy_outputs_are_invalid(self, harness: EngineHarness) -> None:
        error = await refused(harness, PROMPT, sampling=Sampling(temperature=0.0, n=2))
        assert names(error, "sampling.n")

    async def test_a_text_that_cannot_fit_is_refused_without_tokenising_it(
        self, harness: EngineHarness
    ) -> None:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        error = await refused(harness, TextPrompt("wave " * 1_000_000))
        assert loop.time() - began_s < 0.25
        assert names(error, "input.text")
        assert str(CONTEXT_TOKENS) in error.message

    async def test_tools_and_their_calls_are_rendered(self, harness: EngineHarness) -> None:
        call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{bad"}}
        prompt = replace(
            chat(("user", "Look!"), ("assistant", ""), ("tool", "a cat")),
            tools=({"type": "function", "function": {"name": "look", "parameters": {}}},),
        )
        messages = [dict(message) for message in prompt.messages]
        messages[1]["tool_calls"] = [call]
        messages[2]["tool_call_id"] = "1"
        done = await generate(harness, replace(prompt, messages=tuple(messages)), GREEDY)
        assert "a cat" in harness.decode(done.prepared.prompt_token_ids)

    async def test_a_conversation_that_the_template_cannot_render_is_invalid(
        self, harness: EngineHarness
    ) -> None:
        broken = replace(chat(("user", "x")), messages=({"content": "nobody says this"},))
        error = await refused(harness, broken)
        assert names(error, "input.conversation.messages")
        assert "nobody" not in error.message

    async def test_a_constraint_that_asks_for_too_much_is_refused_in_bounded_time(
        self, harness: EngineHarness
    ) -> None:
        deep = "root ::= " + "(" * 30_000
        loop = asyncio.get_running_loop()
        for _ in range(2):
            began_s = loop.time()
            error = await refused(
                harness,
                PROMPT,
                sampling=Sampling(constraint=Constraint(ConstraintKind.GRAMMAR, deep)),
            )
            assert names(error, "sampling.structured_output.grammar")
            assert loop.time() - began_s < 15
        choice = Constraint(ConstraintKind.REGEX, "(yes|no)")
        done = await generate(
            harness, PROMPT, Sampling(temperature=0.0, max_tokens=8, constraint=choice)
        )
        assert done.sink.text() in ("yes", "no")

    async def test_what_is_beyond_the_batch_waits_and_every_output_ends(
        self, harness: EngineHarness
    ) -> None:
        sampling = replace(GREEDY, max_tokens=3)
        many = harness.engine.describe().sequences_max // 4
        started = [await begin(harness, f"{PROMPT} {n}", sampling) for n in range(many)]
        for one in started:
            done = await finish(harness, one)
            assert len(done.sink.token_ids()) == 3
        assert harness.engine.healthy

    async def test_rates_and_cache_hits_are_reported(self, harness: EngineHarness) -> None:
        prompt = TextPrompt("The tide comes in and the tide goes out. " * 30)
        for _ in range(2):
            await generate(harness, prompt, replace(GREEDY, max_tokens=8))
        stats = harness.engine.stats()
        assert stats.prefix_hit_rate is not None
        assert 0 < stats.prefix_hit_rate < 1
        assert stats.output_tokens_per_s
        assert stats.prompt_tokens_per_s
        assert stats.step_ms
        assert stats.preemptions == 0

    async def test_an_embedding_is_not_made_by_a_model_that_generates(
        self, harness: EngineHarness
    ) -> None:
        with pytest.raises(SluiceError) as caught:
            await harness.engine.embed("wrong-engine", [TextPrompt("a cat")])
        assert caught.value.code is Code.FAILED_PRECONDITION

    async def test_an_unknown_engine_argument_stops_the_start_and_is_named(self) -> None:
        from inference_svc.adapters.vllm_engine.engine import VllmEngine

        wanted = settings(CHAT_MODEL, engine_args={"max_num_sequences": 4})
        before = set(psutil.Process().children(recursive=True))
        with pytest.raises(EngineConfigError, match="max_num_sequences"):
            await VllmEngine(wanted).start()
        assert set(psutil.Process().children(recursive=True)) <= before


class TestVllmFailure:
    """Ends the module's engine: the last class of the file."""

    async def test_a_dead_engine_process_ends_its_outputs_with_a_typed_error(
        self, harness: EngineHarness
    ) -> None:
        """Goal: an engine process that dies is seen at once by everyone who waits for it.
        Method: SIGKILL to vLLM's engine process while one output runs and one is prepared.
        Oracle: the output ends with ERROR and UNAVAILABLE ENGINE_FAILED; healthy is False; new work
        is UNAVAILABLE; close leaves no child process. Seed: none. Seen to fail with the branch for
        EngineDeadError removed (the error was INTERNAL)."""
        started = await begin(harness, PROMPT, Sampling(temperature=0.0, ignore_eos=True))
        async with asyncio.timeout(30):
            await started.sink.begun.wait()
        prepared = await harness.engine.prepare(replace(started.spec, request_id="too-late"))
        [core] = [child for child in psutil.Process().children() if "EngineCore" in child.name()]
        core.send_signal(signal.SIGKILL)
        done = await finish(harness, started)
        assert done.sink.reason() is FinishReason.ERROR
        assert done.sink.end is not None
        error = done.sink.end.error
        assert isinstance(error, SluiceError)
        assert (error.code, error.reason) == (Code.UNAVAILABLE, "ENGINE_FAILED")
        await until(harness, lambda: not harness.engine.healthy)
        with pytest.raises(SluiceError) as caught:
            harness.engine.submit(prepared, done.sink)
        assert caught.value.code is Code.UNAVAILABLE
        with pytest.raises(SluiceError) as caught:
            await harness.engine.prepare(started.spec)
        assert caught.value.code is Code.UNAVAILABLE

    async def test_close_leaves_no_process_and_may_be_repeated(
        self, harness: EngineHarness
    ) -> None:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        await harness.engine.close()
        await harness.engine.close()
        assert loop.time() - began_s < 30
        assert not harness.engine.healthy
        assert psutil.Process().children(recursive=True) == []
