"""The contract of ``inference_svc.ports.Engine``, as cases that every engine must pass.

Two classes: :class:`GenerationContract` for engines that generate and :class:`EmbeddingContract`
for engines that embed (an engine may pass both). How to use them is in ``engine_harness``. Cases
keep outputs to tens of tokens, since one of the engines is a real model on a CPU.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from dataclasses import replace

import pytest

from inference_svc.ports import (
    ChatPrompt,
    Constraint,
    ConstraintKind,
    FinishReason,
    Sampling,
    TextPrompt,
    TokenPrompt,
)
from sluice.errors import Code, SluiceError
from tests.contract.engine_harness import (
    EngineHarness,
    Started,
    a_spec,
    begin,
    finish,
    generate,
    until,
)

PROMPT = "Once upon a time there was a small lighthouse that"
TOKENS = 16
GREEDY = Sampling(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
MIXED_REPLY = "삼겹살 🫠 龜"
KNOWN_REPLY = "The tide turns. STOP here. The boats come home."
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "people": {"type": "integer"}},
    "required": ["city", "people"],
    "additionalProperties": False,
}

# A value for each sampling field, and zero where zero is in the field's range.
FIELD_VALUES: Mapping[str, object] = {
    "temperature": 0.5,
    "top_p": 0.75,
    "top_k": 5,
    "min_p": 0.25,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.25,
    "min_tokens": 2,
    "seed": 7,
    "logprobs": 2,
    "ignore_eos": True,
    "keep_special_tokens": True,
    "stop": ("\n\n\n\n",),
    "include_stop": True,
}
FIELDS_WITH_ZERO: Mapping[str, object] = {
    "temperature": 0.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "min_tokens": 0,
    "seed": 0,
    "logprobs": 0,
}


def chat(*turns: tuple[str, str], continue_final_message: bool = False) -> ChatPrompt:
    """A conversation of (role, content) turns."""
    messages = tuple({"role": role, "content": content} for role, content in turns)
    return ChatPrompt(messages, continue_final_message=continue_final_message)


def constrained(kind: ConstraintKind, text: str = "", *choices: str) -> Sampling:
    """Greedy sampling under a constraint, with room for the whole form."""
    constraint = Constraint(kind, text, tuple(choices))
    return Sampling(temperature=0.0, max_tokens=64, constraint=constraint)


async def refused(harness: EngineHarness, spec_of: object, **kwargs: object) -> SluiceError:
    """The error with which a spec is refused at ``prepare``."""
    spec = a_spec(spec_of, **kwargs)  # type: ignore[arg-type]
    with pytest.raises(SluiceError) as caught:
        await harness.engine.prepare(spec)
    return caught.value


def names(error: SluiceError, field: str) -> bool:
    """Whether an error is INVALID_ARGUMENT and names a field, or one inside it."""
    return error.code is Code.INVALID_ARGUMENT and any(
        violation.field == field or violation.field.startswith((f"{field}.", f"{field}["))
        for violation in error.fields
    )


def whole(harness: EngineHarness, started: Started, index: int = 0) -> str:
    """What the token ids of an output spell."""
    return harness.decode(started.sink.token_ids(index))


class GenerationContract:
    """Cases of an engine that generates."""

    # --- what it serves ---

    async def test_the_description_names_the_model_and_its_limits(
        self, harness: EngineHarness
    ) -> None:
        model = harness.engine.describe()
        assert harness.engine.healthy
        assert model.model
        assert model.engine
        assert model.generate
        assert model.continuation
        assert len(model.fingerprint) >= 8
        assert 0 < model.context_tokens <= model.kv_tokens
        assert model.kv_block_tokens > 0
        assert model.sequences_max > 0
        assert model.step_tokens_max > 0
        assert model.dtype

    # --- inputs ---

    async def test_text_is_tokenised_as_it_stands_and_counted_exactly(
        self, harness: EngineHarness
    ) -> None:
        done = await generate(harness, PROMPT, GREEDY)
        assert done.prepared.prompt_token_ids == harness.encode(PROMPT)
        assert done.sink.end is not None
        assert done.sink.end.prompt_tokens == len(done.prepared.prompt_token_ids)
        assert done.sink.end.completion_tokens == len(done.sink.token_ids()) == TOKENS
        assert done.running.output_tokens == TOKENS
        assert done.sink.end.error is None

    async def test_token_ids_are_used_as_they_are(self, harness: EngineHarness) -> None:
        ids = harness.encode(PROMPT)
        by_ids = await generate(harness, TokenPrompt(ids), GREEDY)
        by_text = await generate(harness, PROMPT, GREEDY)
        assert by_ids.prepared.prompt_token_ids == ids
        assert by_ids.sink.token_ids() == by_text.sink.token_ids()

    async def test_chat_messages_are_rendered_with_the_models_template(
        self, harness: EngineHarness
    ) -> None:
        done = await generate(harness, chat(("system", "Be brief."), ("user", "Hello!")), GREEDY)
        rendered = harness.decode(done.prepared.prompt_token_ids)
        assert rendered.index("Be brief.") < rendered.index("Hello!")
        assert len(rendered) > len("Be brief.Hello!")
        assert done.sink.token_ids()

    async def test_the_final_message_is_continued_when_asked(self, harness: EngineHarness) -> None:
        turns = (("user", "Hello!"), ("assistant", "Good morn"))
        new_turn = await harness.engine.prepare(a_spec(chat(*turns)))
        going_on = await harness.engine.prepare(a_spec(chat(*turns, continue_final_message=True)))
        assert harness.decode(going_on.prompt_token_ids).endswith("Good morn")
        assert not harness.decode(new_turn.prompt_token_ids).endswith("Good morn")

    @pytest.mark.parametrize(
        ("prompt", "field"),
        [
            (TextPrompt(""), "input.text"),
            (TokenPrompt(()), "input.token_ids"),
            (ChatPrompt(()), "input.conversation.messages"),
        ],
    )
    async def test_an_empty_input_is_invalid_and_named(
        self, harness: EngineHarness, prompt: object, field: str
    ) -> None:
        assert names(await refused(harness, prompt), field)

    async def test_a_token_id_outside_the_vocabulary_is_invalid(
        self, harness: EngineHarness
    ) -> None:
        outside = TokenPrompt((*harness.encode("a"), harness.vocabulary_size + 7))
        assert names(await refused(harness, outside), "input.token_ids")

    # --- the context ---

    async def test_a_prompt_over_the_context_names_the_limit_and_its_length(
        self, harness: EngineHarness
    ) -> None:
        limit = harness.engine.describe().context_tokens
        ids = harness.encode("a") * (limit + 1)
        error = await refused(harness, TokenPrompt(ids))
        assert names(error, "input")
        assert str(limit) in error.message
        assert str(len(ids)) in error.message

    async def test_a_prompt_of_one_token_less_than_the_context_leaves_one_token(
        self, harness: EngineHarness
    ) -> None:
        limit = harness.engine.describe().context_tokens
        ids = harness.encode("a") * (limit - 1)
        done = await generate(harness, TokenPrompt(ids), replace(GREEDY, max_tokens=None))
        assert done.prepared.max_output_tokens == 1
        assert done.sink.reason() is FinishReason.LENGTH
        assert len(done.sink.token_ids()) == 1

    async def test_a_prompt_that_fills_the_context_is_invalid(self, harness: EngineHarness) -> None:
        limit = harness.engine.describe().context_tokens
        ids = harness.encode("a") * limit
        error = await refused(harness, TokenPrompt(ids))
        assert names(error, "input")
        assert str(limit) in error.message

    async def test_unset_max_tokens_means_what_the_context_leaves(
        self, harness: EngineHarness
    ) -> None:
        prepared = await harness.engine.prepare(a_spec(PROMPT, Sampling()))
        limit = harness.engine.describe().context_tokens
        assert prepared.max_output_tokens == limit - len(prepared.prompt_token_ids)

    async def test_max_tokens_beyond_the_context_is_capped(self, harness: EngineHarness) -> None:
        limit = harness.engine.describe().context_tokens
        prepared = await harness.engine.prepare(a_spec(PROMPT, Sampling(max_tokens=limit)))
        assert prepared.max_output_tokens == limit - len(prepared.prompt_token_ids)

    # --- deltas ---

    async def test_joined_deltas_are_what_the_token_ids_spell(self, harness: EngineHarness) -> None:
        done = await generate(harness, PROMPT, GREEDY)
        assert done.sink.text() == whole(harness, done)
        assert done.sink.deltas[0].position == 0

    async def test_characters_cut_by_tokens_arrive_whole(self, harness: EngineHarness) -> None:
        sampling = constrained(ConstraintKind.CHOICE, "", MIXED_REPLY)
        done = await generate(harness, PROMPT, sampling)
        assert done.sink.text() == MIXED_REPLY
        assert all("\N{REPLACEMENT CHARACTER}" not in delta.text for delta in done.sink.deltas)

    async def test_greedy_output_repeats(self, harness: EngineHarness) -> None:
        first = await generate(harness, PROMPT, GREEDY)
        second = await generate(harness, PROMPT, GREEDY)
        assert first.sink.token_ids() == second.sink.token_ids()

    async def test_requests_in_one_batch_do_not_mix(self, harness: EngineHarness) -> None:
        prompts = [f"{PROMPT} number {index}" for index in range(6)]
        alone = [await generate(harness, prompt, GREEDY) for prompt in prompts]
        started = [await begin(harness, prompt, GREEDY) for prompt in prompts]
        together = [await finish(harness, one) for one in started]
        for one, other in zip(alone, together, strict=True):
            assert len(other.sink.token_ids()) == TOKENS
            assert other.sink.text() == whole(harness, other)
            if harness.exact:
                assert one.sink.token_ids() == other.sink.token_ids()

    # --- ends ---

    @pytest.mark.parametrize("most", [1, 2, 7])
    async def test_max_tokens_is_exact(self, harness: EngineHarness, most: int) -> None:
        done = await generate(harness, PROMPT, replace(GREEDY, max_tokens=most))
        assert len(done.sink.token_ids()) == most
        assert done.sink.reason() is FinishReason.LENGTH

    @pytest.mark.parametrize("beside", [1, 3])
    async def test_prompt_and_output_stay_within_their_total(
        self, harness: EngineHarness, beside: int
    ) -> None:
        prompt = len((await harness.engine.prepare(a_spec(PROMPT, GREEDY))).prompt_token_ids)
        total = prompt + beside
        done = await generate(harness, PROMPT, replace(GREEDY, total_tokens_max=total))
        assert done.sink.end is not None
        assert done.sink.end.prompt_tokens + done.sink.end.completion_tokens == total
        assert done.sink.reason() is FinishReason.LENGTH

    async def test_a_total_that_does_not_hold_the_prompt_is_refused(
        self, harness: EngineHarness
    ) -> None:
        prompt = len((await harness.engine.prepare(a_spec(PROMPT, GREEDY))).prompt_token_ids)
        sampling = replace(GREEDY, total_tokens_max=prompt)
        error = await refused(harness, PROMPT, sampling=sampling)
        assert names(error, "sampling.total_tokens_max")
        assert error.reason == "TOTAL_TOKENS"

    async def test_a_stop_token_ends_the_output_and_is_reported(
        self, harness: EngineHarness
    ) -> None:
        ids = (await generate(harness, PROMPT, GREEDY)).sink.token_ids()
        stop = ids[5]
        sampling = replace(GREEDY, stop_token_ids=(stop,))
        done = await generate(harness, PROMPT, sampling)
        expected = ids[: ids.index(stop) + 1]
        assert done.sink.token_ids() == expected
        assert done.sink.text() == harness.decode(expected[:-1])
        assert done.sink.reason() is FinishReason.STOP
        assert done.sink.output_end().stop_token_id == stop

    async def test_min_tokens_holds_a_stop_token_off(self, harness: EngineHarness) -> None:
        ids = (await generate(harness, PROMPT, GREEDY)).sink.token_ids()
        sampling = replace(GREEDY, stop_token_ids=(ids[2],), min_tokens=8)
        done = await generate(harness, PROMPT, sampling)
        assert len(done.sink.token_ids()) >= 8
        assert ids[2] not in done.sink.token_ids()[:8]

    async def test_a_stop_string_ends_the_output_and_is_never_sent(
        self, harness: EngineHarness
    ) -> None:
        text = (await generate(harness, PROMPT, GREEDY)).sink.text()
        stop = text[len(text) // 2 : len(text) // 2 + 3]
        done = await generate(harness, PROMPT, replace(GREEDY, stop=("\x00never", stop)))
        assert done.sink.text() == text[: text.index(stop)]
        assert done.sink.reason() is FinishReason.STOP
        assert done.sink.output_end().stop_string == stop
        assert len(done.sink.token_ids()) < TOKENS

    async def test_a_stop_string_across_two_tokens_is_found(self, harness: EngineHarness) -> None:
        ids = (await generate(harness, PROMPT, GREEDY)).sink.token_ids()
        border = next(
            cut
            for cut in range(3, TOKENS - 3)
            if len(harness.decode(ids[:cut])) < len(harness.decode(ids[: cut + 1]))
            and len(harness.decode(ids[:cut])) > len(harness.decode(ids[: cut - 1]))
        )
        text, edge = harness.decode(ids), len(harness.decode(ids[:border]))
        stop = text[edge - 1 : edge + 1]
        done = await generate(harness, PROMPT, replace(GREEDY, stop=(stop,)))
        assert done.sink.text() == text[: text.index(stop)]
        assert done.sink.output_end().stop_string == stop

    async def test_a_stop_string_in_a_known_reply_ends_it(self, harness: EngineHarness) -> None:
        sampling = replace(constrained(ConstraintKind.CHOICE, "", KNOWN_REPLY), stop=("STOP",))
        done = await generate(harness, PROMPT, sampling)
        assert done.sink.text() == "The tide turns. "
        assert done.sink.output_end().stop_string == "STOP"

    async def test_include_stop_leaves_the_stop_string_in(self, harness: EngineHarness) -> None:
        text = (await generate(harness, PROMPT, GREEDY)).sink.text()
        stop = text[len(text) // 2 : len(text) // 2 + 3]
        sampling = replace(GREEDY, stop=(stop,), include_stop=True)
        done = await generate(harness, PROMPT, sampling)
        assert done.sink.text() == text[: text.index(stop) + len(stop)]
        assert done.sink.reason() is FinishReason.STOP

    async def test_min_tokens_holds_a_stop_string_off(self, harness: EngineHarness) -> None:
        plain = await generate(harness, PROMPT, GREEDY)
        stop = next(char for char in plain.sink.text() if char.strip())
        done = await generate(harness, PROMPT, replace(GREEDY, stop=(stop,), min_tokens=8))
        assert len(done.sink.token_ids()) > 8
        if done.sink.reason() is FinishReason.LENGTH:
            assert done.sink.text() == plain.sink.text()

    async def test_text_held_back_for_a_stop_string_comes_when_none_matched(
        self, harness: EngineHarness
    ) -> None:
        plain = await generate(harness, PROMPT, GREEDY)
        never = plain.sink.text()[-6:] + "\x00"
        done = await generate(harness, PROMPT, replace(GREEDY, stop=(never,)))
        assert done.sink.text() == plain.sink.text()
        assert done.sink.reason() is FinishReason.LENGTH

    # --- several outputs, log probabilities, seeds ---

    async def test_n_outputs_come_by_index_and_each_ends(self, harness: EngineHarness) -> None:
        sampling = Sampling(temperature=1.0, n=2, max_tokens=8, seed=3, ignore_eos=True)
        done = await generate(harness, PROMPT, sampling)
        assert done.sink.end is not None
        assert [one.index for one in done.sink.end.outputs] == [0, 1]
        for index in (0, 1):
            assert len(done.sink.token_ids(index)) == 8
            assert done.sink.text(index) == whole(harness, done, index)
            assert done.sink.reason(index) is FinishReason.LENGTH
        assert done.sink.token_ids(0) != done.sink.token_ids(1)
        assert done.sink.end.completion_tokens == 16
        assert done.sink.end.prompt_tokens == len(done.prepared.prompt_token_ids)

    @pytest.mark.parametrize("candidates", [0, 3])
    async def test_log_probabilities_come_for_each_token(
        self, harness: EngineHarness, candidates: int
    ) -> None:
        done = await generate(harness, PROMPT, replace(GREEDY, logprobs=candidates))
        entries = done.sink.logprobs()
        assert tuple(entry.token_id for entry in entries) == done.sink.token_ids()
        for entry in entries:
            assert entry.logprob <= 0.0
            assert isinstance(entry.token, bytes)
            assert candidates <= len(entry.top) <= candidates + 1
            assert len({one.token_id for one in entry.top}) == len(entry.top)
            values = [one.logprob for one in entry.top]
            assert values == sorted(values, reverse=True)
            if candidates:
                # Greedy: the sampled token is the best candidate.
                assert entry.top[0].token_id == entry.token_id
        joined = b"".join(entry.token for entry in entries).decode(errors="ignore")
        assert joined == done.sink.text()

    async def test_no_log_probabilities_come_unasked(self, harness: EngineHarness) -> None:
        done = await generate(harness, PROMPT, GREEDY)
        assert done.sink.logprobs() == ()

    async def test_a_seed_repeats_and_another_seed_differs(self, harness: EngineHarness) -> None:
        sampling = Sampling(temperature=1.0, seed=11, max_tokens=TOKENS, ignore_eos=True)
        first = await generate(harness, PROMPT, sampling)
        again = await generate(harness, PROMPT, sampling)
        other = await generate(harness, PROMPT, replace(sampling, seed=12))
        assert first.sink.token_ids() == again.sink.token_ids()
        assert first.sink.token_ids() != other.sink.token_ids()

    # --- sampling fields reach the engine ---

    @pytest.mark.parametrize("field", sorted(FIELD_VALUES))
    async def test_a_sampling_field_reaches_the_engine(
        self, harness: EngineHarness, field: str
    ) -> None:
        value = FIELD_VALUES[field]
        sampling = replace(Sampling(max_tokens=2), **{field: value})  # type: ignore[arg-type]
        done = await generate(harness, PROMPT, sampling)
        assert harness.received(done.spec.request_id).get(field) == value

    @pytest.mark.parametrize("field", sorted(FIELDS_WITH_ZERO))
    async def test_zero_is_not_unset(self, harness: EngineHarness, field: str) -> None:
        zero = FIELDS_WITH_ZERO[field]
        sampling = replace(Sampling(max_tokens=2), **{field: zero})  # type: ignore[arg-type]
        done = await generate(harness, PROMPT, sampling)
        assert harness.received(done.spec.request_id).get(field) == zero
        unset = await generate(harness, PROMPT, Sampling(max_tokens=2))
        received = harness.received(unset.spec.request_id).get(field)
        assert received == harness.defaults.get(field)

    async def test_a_bias_bans_and_forces_tokens(self, harness: EngineHarness) -> None:
        first = (await generate(harness, PROMPT, GREEDY)).sink.token_ids()[0]
        banned = await generate(harness, PROMPT, replace(GREEDY, logit_bias={first: -100.0}))
        assert first not in banned.sink.token_ids()
        forced_id = harness.encode("x")[0]
        sampling = replace(GREEDY, max_tokens=3, logit_bias={forced_id: 100.0})
        forced = await generate(harness, PROMPT, sampling)
        assert forced.sink.token_ids() == (forced_id,) * 3

    @pytest.mark.parametrize(
        ("sampling", "field"),
        [
            (Sampling(temperature=2.5), "sampling.temperature"),
            (Sampling(temperature=float("nan")), "sampling.temperature"),
            (Sampling(top_p=0.0), "sampling.top_p"),
            (Sampling(max_tokens=0), "sampling.max_tokens"),
            (Sampling(max_tokens=2, min_tokens=3), "sampling.min_tokens"),
            (Sampling(n=9), "sampling.n"),
            (Sampling(logprobs=21), "sampling.logprobs"),
            (Sampling(stop=("",)), "sampling.stop"),
        ],
    )
    async def test_a_value_out_of_range_is_invalid_and_named(
        self, harness: EngineHarness, sampling: Sampling, field: str
    ) -> None:
        assert names(await refused(harness, PROMPT, sampling=sampling), field)

    @pytest.mark.parametrize("field", ["stop_token_ids", "logit_bias"])
    async def test_a_sampling_token_outside_the_vocabulary_is_invalid(
        self, harness: EngineHarness, field: str
    ) -> None:
        outside = harness.vocabulary_size + 7
        sampling = (
            Sampling(stop_token_ids=(outside,))
            if field == "stop_token_ids"
            else Sampling(logit_bias={outside: 1.0})
        )
        assert names(await refused(harness, PROMPT, sampling=sampling), f"sampling.{field}")

    # --- structured output ---

    async def test_a_json_schema_is_obeyed(self, harness: EngineHarness) -> None:
        sampling = constrained(ConstraintKind.JSON_SCHEMA, json.dumps(SCHEMA))
        done = await generate(harness, PROMPT, sampling)
        value = json.loads(done.sink.text())
        assert set(value) == {"city", "people"}
        assert isinstance(value["city"], str)
        assert len(value["city"]) <= 8
        assert isinstance(value["people"], int)
        assert done.sink.reason() is FinishReason.STOP

    async def test_a_regular_expression_is_obeyed(self, harness: EngineHarness) -> None:
        expression = r"(red|blue)-[0-9]{3}[a-f]?"
        done = await generate(harness, PROMPT, constrained(ConstraintKind.REGEX, expression))
        assert re.fullmatch(expression, done.sink.text())

    async def test_one_of_the_choices_is_taken(self, harness: EngineHarness) -> None:
        choices = ("yes", "no", "perhaps")
        done = await generate(harness, PROMPT, constrained(ConstraintKind.CHOICE, "", *choices))
        assert done.sink.text() in choices

    async def test_a_grammar_is_obeyed(self, harness: EngineHarness) -> None:
        grammar = 'root ::= "answer: " digit digit\ndigit ::= [0-9]\n'
        done = await generate(harness, PROMPT, constrained(ConstraintKind.GRAMMAR, grammar))
        assert re.fullmatch(r"answer: [0-9][0-9]", done.sink.text())

    @pytest.mark.parametrize(
        ("kind", "text", "field"),
        [
            (ConstraintKind.JSON_SCHEMA, "{not json", "json_schema"),
            (ConstraintKind.JSON_SCHEMA, '{"type": "no such type"}', "json_schema"),
            (ConstraintKind.REGEX, "(unclosed", "regex"),
            (ConstraintKind.GRAMMAR, "root ::= (", "grammar"),
        ],
    )
    async def test_a_constraint_that_does_not_compile_is_invalid(
        self, harness: EngineHarness, kind: ConstraintKind, text: str, field: str
    ) -> None:
        error = await refused(harness, PROMPT, sampling=constrained(kind, text))
        assert names(error, f"sampling.structured_output.{field}")

    # --- aborts ---

    async def test_an_abort_in_mid_stream_ends_it_and_frees_its_memory(
        self, harness: EngineHarness
    ) -> None:
        started = await begin(harness, PROMPT, Sampling(temperature=0.0, ignore_eos=True))
        async with asyncio.timeout(harness.timeout_s):
            await started.sink.begun.wait()
        started.running.abort(FinishReason.CANCELLED)
        done = await finish(harness, started)
        assert done.sink.reason() is FinishReason.CANCELLED
        seen = len(done.sink.token_ids())
        assert done.sink.end is not None
        assert done.sink.end.completion_tokens >= seen
        await until(harness, lambda: not harness.engine.stats().running)
        await generate(harness, PROMPT, GREEDY)
        assert len(done.sink.token_ids()) == seen
        assert done.sink.faults == []

    async def test_an_abort_before_the_first_token_ends_it(self, harness: EngineHarness) -> None:
        started = await begin(harness, PROMPT, GREEDY)
        started.running.abort(FinishReason.DEADLINE)
        done = await finish(harness, started)
        assert done.sink.reason() is FinishReason.DEADLINE
        await until(harness, lambda: not harness.engine.stats().running)

    async def test_an_abort_may_be_repeated_and_may_come_after_the_end(
        self, harness: EngineHarness
    ) -> None:
        started = await begin(harness, PROMPT, GREEDY)
        started.running.abort(FinishReason.CANCELLED)
        started.running.abort(FinishReason.DEADLINE)
        done = await finish(harness, started)
        assert done.sink.reason() is FinishReason.CANCELLED
        over = await generate(harness, PROMPT, GREEDY)
        over.running.abort(FinishReason.CANCELLED)
        await generate(harness, PROMPT, GREEDY)
        assert over.sink.reason() is FinishReason.LENGTH
        assert over.sink.faults == []

    # --- cache and statistics ---

    async def test_a_prefix_is_shared_within_its_salt_only(self, harness: EngineHarness) -> None:
        block = harness.engine.describe().kv_block_tokens
        unit = harness.encode(" lighthouse and sea")
        ids = (unit * (2 * block // len(unit) + 2))[: 2 * block + 8]
        short = replace(GREEDY, max_tokens=2)
        fresh = await generate(harness, TokenPrompt(ids), short, cache_salt="tenant-a")
        again = await generate(harness, TokenPrompt(ids), short, cache_salt="tenant-a")
        other = await generate(harness, TokenPrompt(ids), short, cache_salt="tenant-b")
        assert fresh.sink.end is not None
        assert again.sink.end is not None
        assert other.sink.end is not None
        assert fresh.sink.end.cached_tokens == 0
        assert again.sink.end.cached_tokens == 2 * block
        assert other.sink.end.cached_tokens == 0
        assert again.sink.token_ids() == fresh.sink.token_ids()

    async def test_statistics_are_the_engines_own_numbers(self, harness: EngineHarness) -> None:
        model = harness.engine.describe()
        started = await begin(harness, PROMPT, Sampling(temperature=0.0, ignore_eos=True))
        await until(harness, lambda: harness.engine.stats().running == 1)
        await until(harness, lambda: bool(harness.engine.stats().kv_tokens_used))
        busy = harness.engine.stats()
        assert busy.kv_tokens_used is not None
        assert busy.kv_tokens_free is not None
        assert busy.kv_tokens_used + busy.kv_tokens_free <= model.kv_tokens
        assert busy.sequences_max == model.sequences_max
        assert busy.waiting == 0
        started.running.abort(FinishReason.CANCELLED)
        await finish(harness, started)
        await until(harness, lambda: harness.engine.stats().running == 0)
        await until(harness, lambda: harness.engine.stats().kv_tokens_used == 0)
