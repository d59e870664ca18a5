"""The engine contract, continued: outputs begun elsewhere, and embeddings."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace

import pytest

from inference_svc.ports import (
    Constraint,
    ConstraintKind,
    Continuation,
    FinishReason,
    Prompt,
    Sampling,
    TextPrompt,
    TokenPrompt,
)
from sluice.errors import Code, SluiceError
from tests.contract.engine_contract import GREEDY, PROMPT, TOKENS, chat, names, refused
from tests.contract.engine_harness import EngineHarness, Started, generate, until

TAIL_BYTES = 64


def tail_of(text: str) -> str:
    """The last whole characters of a text, at most ``TAIL_BYTES`` bytes."""
    return text.encode()[-TAIL_BYTES:].decode(errors="ignore")


def continuation(harness: EngineHarness, ids: tuple[int, ...], delivered: str) -> Continuation:
    """What a scheduler sends after ``ids`` were generated and ``delivered`` reached its client."""
    return Continuation(
        output_token_ids=ids,
        delivered_text_bytes=len(delivered.encode()),
        delivered_text_tail=tail_of(delivered),
        model_fingerprint=harness.engine.describe().fingerprint,
    )


def cuts_of(harness: EngineHarness, done: Started) -> list[tuple[tuple[int, ...], str]]:
    """Token ids and text as delivered at the borders between deltas that the harness chose."""
    ids: tuple[int, ...] = ()
    text = ""
    borders = [(ids, text)]
    for delta in done.sink.deltas:
        ids += delta.token_ids
        text += delta.text
        if not delta.token_ids:
            borders.pop()  # text alone: the same cut, with more of it delivered
        borders.append((ids, text))
    wanted = set(harness.cuts(len(ids)))
    return [border for border in borders if len(border[0]) in wanted]


async def assert_continues(
    harness: EngineHarness,
    whole: Started,
    sampling: Sampling,
    cut: tuple[tuple[int, ...], str],
) -> None:
    """Goes on from a cut and compares with the output that was never interrupted."""
    ids, delivered = cut
    rest = await generate(harness, PROMPT, sampling, continuation(harness, ids, delivered))
    assert rest.sink.end is not None
    assert rest.sink.end.completion_tokens == len(rest.sink.token_ids())
    if rest.sink.token_ids():
        assert rest.sink.deltas[0].position == len(ids)
    if harness.exact:
        assert ids + rest.sink.token_ids() == whole.sink.token_ids()
        assert delivered + rest.sink.text() == whole.sink.text()
        assert rest.sink.output_end() == whole.sink.output_end()
    else:
        spelled = harness.decode(ids + rest.sink.token_ids())
        joined = delivered + rest.sink.text()
        assert spelled.startswith(joined)
        if rest.sink.reason() is FinishReason.LENGTH:
            assert joined == spelled
            assert len(ids) + len(rest.sink.token_ids()) == sampling.max_tokens


class ContinuationContract:
    """Cases of an engine that goes on with outputs begun elsewhere."""

    async def test_a_continued_output_equals_the_uninterrupted_one_at_every_cut(
        self, harness: EngineHarness
    ) -> None:
        whole = await generate(harness, PROMPT, GREEDY)
        for cut in cuts_of(harness, whole):
            await assert_continues(harness, whole, GREEDY, cut)

    async def test_text_not_yet_delivered_comes_after_the_seam(
        self, harness: EngineHarness
    ) -> None:
        whole = await generate(harness, PROMPT, GREEDY)
        for ids, delivered in cuts_of(harness, whole):
            await assert_continues(harness, whole, GREEDY, (ids, delivered[:-3]))

    async def test_a_stop_string_is_matched_across_the_seam(self, harness: EngineHarness) -> None:
        plain = await generate(harness, PROMPT, GREEDY)
        text = plain.sink.text()
        middle = len(text) // 2
        sampling = replace(GREEDY, stop=(text[middle - 4 : middle + 4],))
        whole = await generate(harness, PROMPT, sampling)
        assert whole.sink.reason() is FinishReason.STOP
        for cut in cuts_of(harness, whole):
            await assert_continues(harness, whole, sampling, cut)

    async def test_text_held_back_at_the_seam_is_not_lost(self, harness: EngineHarness) -> None:
        plain = await generate(harness, PROMPT, GREEDY)
        never = plain.sink.text()[-6:] + "\x00"
        sampling = replace(GREEDY, stop=(never,))
        whole = await generate(harness, PROMPT, sampling)
        assert whole.sink.text() == plain.sink.text()
        for cut in cuts_of(harness, whole):
            await assert_continues(harness, whole, sampling, cut)

    async def test_an_included_stop_string_is_sent_once_across_the_seam(
        self, harness: EngineHarness
    ) -> None:
        plain = await generate(harness, PROMPT, GREEDY)
        text = plain.sink.text()
        middle = len(text) // 2
        sampling = replace(GREEDY, stop=(text[middle - 4 : middle + 4],), include_stop=True)
        whole = await generate(harness, PROMPT, sampling)
        for cut in cuts_of(harness, whole):
            await assert_continues(harness, whole, sampling, cut)

    async def test_min_and_max_tokens_count_what_was_generated_before(
        self, harness: EngineHarness
    ) -> None:
        plain = await generate(harness, PROMPT, GREEDY)
        stop_id = plain.sink.token_ids()[3]
        sampling = replace(GREEDY, stop_token_ids=(stop_id,), min_tokens=6)
        whole = await generate(harness, PROMPT, sampling)
        for cut in cuts_of(harness, whole):
            await assert_continues(harness, whole, sampling, cut)

    async def test_an_output_that_a_stop_token_ended_is_continued_at_every_cut(
        self, harness: EngineHarness
    ) -> None:
        plain = await generate(harness, PROMPT, GREEDY)
        sampling = replace(GREEDY, stop_token_ids=(plain.sink.token_ids()[9],))
        whole = await generate(harness, PROMPT, sampling)
        assert whole.sink.reason() is FinishReason.STOP
        for cut in cuts_of(harness, whole):
            await assert_continues(harness, whole, sampling, cut)

    async def test_unseeded_sampling_with_a_repetition_penalty_is_continued(
        self, harness: EngineHarness
    ) -> None:
        sampling = Sampling(
            temperature=0.9, top_p=0.9, repetition_penalty=1.1, max_tokens=TOKENS, ignore_eos=True
        )
        whole = await generate(harness, PROMPT, sampling)
        ids, delivered = cuts_of(harness, whole)[-2]
        rest = await generate(harness, PROMPT, sampling, continuation(harness, ids, delivered))
        assert len(ids) + len(rest.sink.token_ids()) == TOKENS
        spelled = harness.decode(ids + rest.sink.token_ids())
        assert delivered + rest.sink.text() == spelled

    async def test_another_fingerprint_is_refused(self, harness: EngineHarness) -> None:
        ids = (await generate(harness, PROMPT, GREEDY)).sink.token_ids()[:4]
        other = replace(
            continuation(harness, ids, harness.decode(ids)), model_fingerprint="another-model"
        )
        error = await refused(harness, PROMPT, sampling=GREEDY, continuation=other)
        assert error.code is Code.FAILED_PRECONDITION

    async def test_a_tail_that_the_tokens_do_not_spell_is_refused(
        self, harness: EngineHarness
    ) -> None:
        ids = (await generate(harness, PROMPT, GREEDY)).sink.token_ids()[:6]
        text = harness.decode(ids)
        wrong = replace(continuation(harness, ids, text), delivered_text_tail="\x01\x02")
        error = await refused(harness, PROMPT, sampling=GREEDY, continuation=wrong)
        assert error.code is Code.FAILED_PRECONDITION

    async def test_more_text_than_the_tokens_spell_is_refused(self, harness: EngineHarness) -> None:
        ids = (await generate(harness, PROMPT, GREEDY)).sink.token_ids()[:6]
        text = harness.decode(ids)
        wrong = replace(
            continuation(harness, ids, text), delivered_text_bytes=len(text.encode()) + 64
        )
        error = await refused(harness, PROMPT, sampling=GREEDY, continuation=wrong)
        assert error.code is Code.FAILED_PRECONDITION

    async def test_a_continued_token_outside_the_vocabulary_is_invalid(
        self, harness: EngineHarness
    ) -> None:
        ids = (harness.vocabulary_size + 7,)
        error = await refused(
            harness, PROMPT, sampling=GREEDY, continuation=continuation(harness, ids, "")
        )
        assert names(error, "continuation.output_token_ids")

    async def test_more_output_than_the_context_holds_is_invalid(
        self, harness: EngineHarness
    ) -> None:
        ids = harness.encode("a") * harness.engine.describe().context_tokens
        error = await refused(
            harness, PROMPT, sampling=GREEDY, continuation=continuation(harness, ids, "")
        )
        assert names(error, "continuation.output_token_ids")

    @pytest.mark.parametrize(
        "sampling",
        [
            replace(GREEDY, temperature=0.7, seed=1),
            replace(GREEDY, presence_penalty=0.5),
            replace(GREEDY, frequency_penalty=0.5),
            replace(GREEDY, constraint=Constraint(ConstraintKind.REGEX, "[ab]+")),
            replace(GREEDY, temperature=0.7, n=2),
            replace(GREEDY, logprobs=1),
        ],
        ids=["seed", "presence", "frequency", "structured", "n", "logprobs"],
    )
    async def test_what_is_not_continuable_is_refused(
        self, harness: EngineHarness, sampling: Sampling
    ) -> None:
        ids = harness.encode("a")
        error = await refused(
            harness, PROMPT, sampling=sampling, continuation=continuation(harness, ids, "a")
        )
        assert error.code is Code.FAILED_PRECONDITION


class EmbeddingContract:
    """Cases of an engine that embeds."""

    TEXTS = ("a cat on the mat", "quarterly revenue fell", "two kittens on a mat")

    @staticmethod
    def _prompts(*texts: str) -> list[Prompt]:
        return [TextPrompt(text) for text in texts]

    async def test_the_description_names_the_dimensions(self, harness: EngineHarness) -> None:
        model = harness.engine.describe()
        assert model.embed
        assert model.embedding_dimensions > 0

    async def test_vectors_come_in_order_and_equal_those_of_single_calls(
        self, harness: EngineHarness
    ) -> None:
        together, _ = await harness.engine.embed("embed-all", self._prompts(*self.TEXTS))
        assert len(together) == len(self.TEXTS)
        for index, text in enumerate(self.TEXTS):
            alone, _ = await harness.engine.embed(f"embed-{index}", self._prompts(text))
            assert together[index] == pytest.approx(alone[0], abs=1e-4)

    async def test_vectors_have_length_one(self, harness: EngineHarness) -> None:
        dimensions = harness.engine.describe().embedding_dimensions
        vectors, _ = await harness.engine.embed("embed-norm", self._prompts(*self.TEXTS))
        for vector in vectors:
            assert len(vector) == dimensions
            assert math.sqrt(sum(value * value for value in vector)) == pytest.approx(1.0, abs=1e-3)

    async def test_different_texts_have_different_vectors(self, harness: EngineHarness) -> None:
        vectors, _ = await harness.engine.embed("embed-differ", self._prompts(*self.TEXTS))
        assert vectors[0] != pytest.approx(vectors[1], abs=1e-3)

    async def test_tokens_read_are_counted(self, harness: EngineHarness) -> None:
        _, one = await harness.engine.embed("embed-count", self._prompts(self.TEXTS[0]))
        _, two = await harness.engine.embed("embed-count2", self._prompts(*self.TEXTS[:1] * 2))
        assert one > 0
        assert two == 2 * one

    async def test_token_ids_are_embedded_as_they_are(self, harness: EngineHarness) -> None:
        prompts: list[Prompt] = [TokenPrompt(harness.encode(self.TEXTS[0]))]
        vectors, tokens = await harness.engine.embed("embed-ids", prompts)
        assert tokens == len(harness.encode(self.TEXTS[0]))
        assert len(vectors) == 1

    async def test_a_conversation_is_not_embedded(self, harness: EngineHarness) -> None:
        prompts: list[Prompt] = [chat(("user", "hello"))]
        with pytest.raises(SluiceError) as caught:
            await harness.engine.embed("embed-chat", prompts)
        assert names(caught.value, "inputs[0]")

    async def test_an_input_over_the_context_is_invalid_and_its_index_named(
        self, harness: EngineHarness
    ) -> None:
        limit = harness.engine.describe().context_tokens
        prompts: list[Prompt] = [
            TextPrompt("fits"),
            TokenPrompt(harness.encode("a")[:1] * (limit + 1)),
        ]
        with pytest.raises(SluiceError) as caught:
            await harness.engine.embed("embed-long", prompts)
        assert names(caught.value, "inputs[1]")
        assert str(limit) in caught.value.message

    async def test_an_empty_input_is_invalid_and_its_index_named(
        self, harness: EngineHarness
    ) -> None:
        with pytest.raises(SluiceError) as caught:
            await harness.engine.embed("embed-empty", self._prompts("fits", ""))
        assert names(caught.value, "inputs[1]")

    async def test_a_cancelled_embedding_frees_the_engine(self, harness: EngineHarness) -> None:
        limit = harness.engine.describe().context_tokens
        prompts = self._prompts(*["word " * (limit // 8)] * 32)
        task = asyncio.get_running_loop().create_task(harness.engine.embed("embed-gone", prompts))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(harness, lambda: not harness.engine.stats().running)
        vectors, _ = await harness.engine.embed("embed-after", self._prompts("still here"))
        assert len(vectors) == 1
