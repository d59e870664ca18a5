"""Parts around vLLM that need its libraries and a tokenizer, but no engine."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from inference_svc.adapters.vllm_engine.constraint_checker import ConstraintChecker
from inference_svc.adapters.vllm_engine.settings import GIB
from inference_svc.ports import Continuation, Sampling
from sluice.errors import Code, SluiceError
from tests.contract.vllm_support import CHAT_MODEL, EMBEDDING_MODEL, MARKS, MODELS

pytestmark = [mark for mark in MARKS if mark.name != "asyncio"]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """The chat model's."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(MODELS / CHAT_MODEL))


class TestTokenBytes:
    """Log probabilities carry bytes: a token may be part of a character."""

    TEXT = "The tide: 삼겹살 🫠 龜 — né\n\ttwo  spaces"

    def test_the_bytes_of_tokens_join_to_the_text(self, tokenizer: Any) -> None:
        from inference_svc.adapters.vllm_engine.text import TokenBytes

        token_bytes = TokenBytes(tokenizer)
        ids = tokenizer.encode(self.TEXT, add_special_tokens=False)
        assert b"".join(token_bytes.of(token) for token in ids) == self.TEXT.encode()
        assert any(len(token_bytes.of(token)) == 1 for token in ids)

    def test_every_token_of_the_vocabulary_has_bytes(self, tokenizer: Any) -> None:
        from inference_svc.adapters.vllm_engine.text import TokenBytes

        token_bytes = TokenBytes(tokenizer)
        for token in range(len(tokenizer)):
            assert token_bytes.of(token)
        assert token_bytes.of(tokenizer.eos_token_id) == tokenizer.eos_token.encode()

    def test_a_word_piece_vocabulary_is_read_too(self) -> None:
        from transformers import AutoTokenizer

        from inference_svc.adapters.vllm_engine.text import TokenBytes

        words = AutoTokenizer.from_pretrained(str(MODELS / EMBEDDING_MODEL))
        [token] = words.encode("lighthouse", add_special_tokens=False)
        assert TokenBytes(words).of(token) == b"lighthouse"


class TestContinuedText:
    """The text of an output across its seam."""

    PROMPT = "Once upon a time"
    OUTPUT = " the tide turned. 삼겹살 🫠 龜 STOP and on"
    STOP = "龜 STOP"

    def _continued(
        self, tokenizer: Any, ids: list[int], delivered: str, *, stop: tuple[str, ...] = ()
    ) -> Any:
        from inference_svc.adapters.vllm_engine.continuation import ContinuedText
        from inference_svc.adapters.vllm_engine.sampling import translate

        original = translate(Sampling(stop=stop), {}, max_tokens=64, min_tokens=0)
        continuation = Continuation(
            tuple(ids), len(delivered.encode()), delivered[-4:], "a-fingerprint"
        )
        prompt = tokenizer.encode(self.PROMPT)
        return ContinuedText(tokenizer, "r", prompt, original, continuation, ended_by_token=False)

    def _uninterrupted(self, tokenizer: Any, ids: list[int], stop: tuple[str, ...]) -> list[str]:
        """The text delivered before each token and after the last: what a client has at a cut.
        Ends where a stop string matched."""
        stream = self._continued(tokenizer, [], "", stop=stop)
        delivered = [""]
        for token in ids:
            taken = stream.take([token], finished=False, ended_by_token=False)
            delivered.append(delivered[-1] + taken.text)
            if taken.stop_string is not None:
                break
        return delivered

    @pytest.mark.parametrize("stop", [(), ("never to be seen",)], ids=["plain", "held back"])
    def test_a_cut_at_every_token_loses_and_repeats_nothing(
        self, tokenizer: Any, stop: tuple[str, ...]
    ) -> None:
        ids = tokenizer.encode(self.OUTPUT, add_special_tokens=False)
        texts = self._uninterrupted(tokenizer, ids, stop)
        assert any(len(text) < len(self.OUTPUT) for text in texts)
        for cut, at_the_cut in enumerate(texts):
            for delivered in (at_the_cut, at_the_cut[:-2]):
                continued = self._continued(tokenizer, ids[:cut], delivered, stop=stop)
                text = delivered
                for token in ids[cut:]:
                    text += continued.take([token], finished=False, ended_by_token=False).text
                assert text + continued.rest() == self.OUTPUT

    def test_a_stop_string_is_found_at_every_cut_and_drops_what_follows(
        self, tokenizer: Any
    ) -> None:
        ids = tokenizer.encode(self.OUTPUT, add_special_tokens=False)
        before = self.OUTPUT[: self.OUTPUT.index(self.STOP)]
        texts = self._uninterrupted(tokenizer, ids, (self.STOP,))
        assert texts[-1] == before
        for cut, delivered in enumerate(texts):
            continued = self._continued(tokenizer, ids[:cut], delivered, stop=(self.STOP,))
            text, found = delivered, continued.stop_string
            if found is not None:
                text += continued.rest()
            for token in ids[cut:]:
                if found is None:
                    taken = continued.take([token], finished=False, ended_by_token=False)
                    text += taken.text
                    found = taken.stop_string
            assert found == self.STOP
            assert text == before

    def test_tokens_after_a_stop_string_in_one_step_are_not_kept(self, tokenizer: Any) -> None:
        ids = tokenizer.encode(" one STOP two three", add_special_tokens=False)
        continued = self._continued(tokenizer, [], "", stop=(" STOP",))
        taken = continued.take(ids, finished=True, ended_by_token=False)
        assert taken.stop_string == " STOP"
        assert taken.text == " one"
        assert tokenizer.decode(ids[: taken.kept]) == " one STOP"

    def test_a_text_that_the_tokens_do_not_spell_is_refused(self, tokenizer: Any) -> None:
        ids = tokenizer.encode(" the tide", add_special_tokens=False)
        with pytest.raises(SluiceError) as caught:
            self._continued(tokenizer, ids, " the bird")
        assert caught.value.code is Code.FAILED_PRECONDITION
        assert caught.value.reason == "CONTINUATION_MISMATCH"


class TestSamplingTranslation:
    """Unset, zero and the model's own configuration are three things."""

    def _params(self, sampling: Sampling, **defaults: float) -> Any:
        from inference_svc.adapters.vllm_engine.sampling import translate

        return translate(sampling, defaults, max_tokens=8, min_tokens=0)

    def test_an_unset_field_takes_the_models_configuration(self) -> None:
        params = self._params(Sampling(), temperature=0.6, top_p=0.9, top_k=20)
        assert (params.temperature, params.top_p, params.top_k) == (0.6, 0.9, 20)

    def test_zero_is_not_the_models_configuration(self) -> None:
        params = self._params(Sampling(temperature=0.0), temperature=0.6, top_p=0.9)
        assert params.temperature == 0.0
        assert self._params(Sampling(top_k=0), top_k=20).top_k == 0

    def test_where_both_are_silent_the_value_is_neutral(self) -> None:
        params = self._params(Sampling())
        assert (params.temperature, params.top_p, params.top_k) == (1.0, 1.0, 0)
        assert (params.repetition_penalty, params.min_p, params.seed) == (1.0, 0.0, None)

    def test_several_greedy_outputs_are_refused_by_the_models_default_too(self) -> None:
        with pytest.raises(SluiceError) as caught:
            self._params(Sampling(n=2), temperature=0.0)
        assert caught.value.fields[0].field == "sampling.n"

    def test_every_seed_is_a_seed(self) -> None:
        seeds = [self._params(Sampling(seed=seed)).seed for seed in (0, -1, -2, 2**63 - 1)]
        assert None not in seeds
        assert len(set(seeds)) == 4


class TestStatistics:
    """From vLLM's records to the port's figures."""

    def _reader(self) -> tuple[Any, list[float]]:
        from inference_svc.adapters.vllm_engine.stats import statistics_factory

        now = [100.0]
        made: list[Any] = []
        statistics_factory(lambda: now[0], made.append)(vllm_config=None, engine_indexes=[0])
        return made[0], now

    def _step(self, prompt: int = 0, output: int = 0, gaps: tuple[float, ...] = ()) -> Any:
        return SimpleNamespace(
            num_preempted_reqs=0,
            prompt_token_stats=SimpleNamespace(computed=prompt),
            num_generation_tokens=output,
            inter_token_latencies_iter=list(gaps),
        )

    def _scheduler(self, running: int, usage: float = 0.0) -> Any:
        from vllm.v1.metrics.stats import SchedulerStats

        return SchedulerStats(num_running_reqs=running, kv_cache_usage=usage)

    def test_nothing_is_known_before_the_first_step(self) -> None:
        reader, _ = self._reader()
        stats = reader.read(kv_tokens=1000, sequences_max=8)
        assert stats.sequences_max == 8
        assert stats.running is None
        assert stats.kv_tokens_used is None
        assert stats.output_tokens_per_s is None

    def test_rates_are_means_over_two_seconds(self) -> None:
        reader, now = self._reader()
        for _ in range(100):
            now[0] += 0.1
            reader.record(self._scheduler(4, 0.25), self._step(output=4, gaps=(0.1, 0.1, 0.4)))
        stats = reader.read(kv_tokens=1000, sequences_max=8)
        assert stats.output_tokens_per_s == pytest.approx(40, rel=0.15)
        assert stats.step_ms == pytest.approx(100)
        assert (stats.running, stats.kv_tokens_used, stats.kv_tokens_free) == (4, 250, 750)
        now[0] += 5
        idle = reader.read(kv_tokens=1000, sequences_max=8)
        assert idle.output_tokens_per_s == 0
        assert idle.step_ms is None

    def test_data_parallel_engines_are_added_up(self) -> None:
        reader, now = self._reader()
        now[0] += 0.1
        reader.record(self._scheduler(3, 0.5), None, engine_idx=0)
        reader.record(self._scheduler(4, 0.1), None, engine_idx=1)
        stats = reader.read(kv_tokens=2000, sequences_max=16)
        assert (stats.running, stats.kv_tokens_used) == (7, 600)

    def test_a_model_without_a_kv_cache_has_no_kv_figures(self) -> None:
        reader, _ = self._reader()
        reader.record(self._scheduler(1), None)
        assert reader.read(kv_tokens=0, sequences_max=8).kv_tokens_used is None


class TestConstraintCompiler:
    """The real compiler in its process."""

    @pytest.fixture
    async def checker(self, tokenizer: Any) -> AsyncIterator[ConstraintChecker]:
        import xgrammar

        information = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=49152)
        made = ConstraintChecker(
            str(information.serialize_json()), seconds_max=2.0, memory_bytes=GIB // 2
        )
        await made.start()
        yield made
        await made.close()

    async def test_good_and_bad_constraints_are_told_apart(
        self, checker: ConstraintChecker
    ) -> None:
        schema = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}})
        verdicts = [
            await checker.compiles(kind, text)
            for kind, text in (
                ("json_schema", schema),
                ("regex", "[a-f]{2,4}"),
                ("ebnf", 'root ::= "yes" | "no"'),
                ("lark", 'start: "yes" | "no"'),
                ("json_schema", "{"),
                ("regex", "(a"),
                ("ebnf", "root ::= missing"),
            )
        ]
        assert verdicts == [True, True, True, True, False, False, False]

    async def test_what_asks_for_too_much_time_memory_or_stack_is_refused(
        self, checker: ConstraintChecker
    ) -> None:
        properties = {f"p{number}": {"type": "string"} for number in range(4000)}
        slow = json.dumps({"type": "object", "properties": properties})
        deep = '{"type":"array","items":' * 20_000 + "{}" + "}" * 20_000
        assert not await checker.compiles("json_schema", slow)
        assert not await checker.compiles("json_schema", deep)
        assert not await checker.compiles("ebnf", "root ::= " + "(" * 60_000)
        assert await checker.compiles("regex", "[ab]")


def test_the_compiler_process_needs_nothing_of_this_project() -> None:
    from inference_svc.adapters.vllm_engine.constraint_checker import PROGRAM

    source = Path(PROGRAM).read_text(encoding="utf-8")
    assert "inference_svc" not in source.replace("inference_svc/", "")
    assert "import sluice" not in source
