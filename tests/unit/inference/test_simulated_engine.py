"""The simulated engine's clock, batch, memory and next-token function, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from inference_svc.adapters.simulated.model import EOS, TOKEN_BYTES, decode, encode
from inference_svc.adapters.simulated.profile import SimulatedProfile
from inference_svc.ports import FinishReason, Sampling, TokenPrompt
from sluice.clock import VirtualTimeLoop
from sluice.errors import Code, SluiceError
from tests.unit.inference.simulated import GREEDY, PROFILE, Run, TimedRecorder, begin, engine, reply

Virtual = Callable[[Coroutine[Any, Any, Any]], Any]
STEP_S = 0.01


def now() -> float:
    return asyncio.get_running_loop().time()


# --- the clock ---


def test_steps_keep_to_absolute_time_without_drift(run_virtual: Virtual) -> None:
    async def scenario() -> None:
        start = now()
        sink = await reply(await engine(), sampling=replace(GREEDY, max_tokens=200))
        for step, seen in enumerate(sink.times, start=1):
            # The first step reads five prompt tokens, 5 microseconds.
            assert seen - start == pytest.approx(step * STEP_S + 5e-6, abs=1e-9)

    run_virtual(scenario())


def test_a_late_step_is_made_good_by_one_step_and_not_in_a_burst(
    virtual_loop: VirtualTimeLoop,
) -> None:
    async def scenario() -> None:
        made = await engine()
        run = await begin(made, sampling=replace(GREEDY, max_tokens=20))
        await asyncio.sleep(4.5 * STEP_S)
        virtual_loop.stall(10 * STEP_S)  # the process is stopped for ten steps
        sink = await run.over()
        gaps = [b - a for a, b in zip(sink.times, sink.times[1:], strict=False)]
        # One long gap, one step at once after it, then the old pace.
        assert max(gaps) == pytest.approx(10.5 * STEP_S, abs=1e-4)
        after = gaps[gaps.index(max(gaps)) + 1 :]
        assert after[0] == pytest.approx(0.0, abs=1e-9)
        assert all(gap == pytest.approx(STEP_S, abs=1e-6) for gap in after[1:])
        assert len(sink.token_ids()) == 20

    virtual_loop.run_until_complete(scenario())


def test_a_little_lateness_is_made_good(virtual_loop: VirtualTimeLoop) -> None:
    async def scenario() -> None:
        start = virtual_loop.time()
        run = await begin(await engine(), sampling=replace(GREEDY, max_tokens=10))
        await asyncio.sleep(2.5 * STEP_S)
        virtual_loop.stall(0.9 * STEP_S)
        sink = await run.over()
        assert sink.times[-1] - start == pytest.approx(10 * STEP_S, abs=1e-4)

    virtual_loop.run_until_complete(scenario())


def test_the_step_grows_with_the_batch_and_with_prompts(run_virtual: Virtual) -> None:
    async def scenario() -> None:
        profile = replace(PROFILE, decode_step_ms_per_sequence=1.0, prefill_tokens_per_s=1000.0)
        made = await engine(profile)
        start = now()
        runs = [await begin(made, TokenPrompt((97,) * 20)) for _ in range(2)]
        sinks = [await run.over() for run in runs]
        for sink in sinks:
            # 10 ms, 1 ms for each of two sequences, 40 prompt tokens of 1 ms.
            assert sink.times[0] - start == pytest.approx(0.052, abs=1e-6)
            assert sink.times[1] - sink.times[0] == pytest.approx(0.012, abs=1e-6)

    run_virtual(scenario())


def test_an_idle_engine_sets_no_timer(run_virtual: Virtual) -> None:
    async def scenario() -> None:
        made = await engine()
        await reply(made)
        # A loop that kept stepping would move virtual time in steps, not in one jump.
        loop = asyncio.get_running_loop()
        assert not [timer for timer in loop._scheduled if not timer.cancelled()]  # type: ignore[attr-defined]

    run_virtual(scenario())


# --- the batch ---


def test_requests_beyond_the_batch_wait_in_order(run_virtual: Virtual) -> None:
    async def scenario() -> None:
        made = await engine()
        runs = [await begin(made, f"hello {index}") for index in range(6)]
        await asyncio.sleep(1.5 * STEP_S)
        assert (made.stats().running, made.stats().waiting) == (4, 2)
        sinks = [await run.over() for run in runs]
        firsts = [sink.times[0] for sink in sinks]
        assert max(firsts[:4]) < min(firsts[4:])
        assert (made.stats().running, made.stats().waiting) == (0, 0)

    run_virtual(scenario())


def test_a_place_that_is_freed_by_an_abort_is_taken_in_the_next_step(
    run_virtual: Virtual,
) -> None:
    async def scenario() -> None:
        made = await engine()
        long = replace(GREEDY, max_tokens=400)
        runs = [await begin(made, f"hello {index}", long) for index in range(5)]
        await asyncio.sleep(2.5 * STEP_S)
        runs[0].running.abort(FinishReason.CANCELLED)
        assert made.stats().running == 3
        await asyncio.sleep(2 * STEP_S)
        assert made.stats().running == 4
        assert runs[4].sink.times
        for run in runs[1:]:
            run.running.abort(FinishReason.CANCELLED)
        assert made.stats().kv_tokens_used == 0
        for run in runs:
            assert (await run.over()).reason() is FinishReason.CANCELLED
        assert made.counters().aborted == 5

    run_virtual(scenario())


def test_an_abort_while_waiting_never_reaches_the_batch(run_virtual: Virtual) -> None:
    async def scenario() -> None:
        made = await engine()
        runs = [await begin(made, f"hello {index}") for index in range(5)]
        await asyncio.sleep(1.5 * STEP_S)
        runs[4].running.abort(FinishReason.DEADLINE)
        sink = await runs[4].over()
        assert sink.end is not None
        assert sink.end.completion_tokens == 0
        assert made.stats().waiting == 0
        for run in runs[:4]:
            assert (await run.over()).reason() is FinishReason.LENGTH

    run_virtual(scenario())


def test_an_abort_from_inside_a_delta_ends_it_there(run_virtual: Virtual) -> None:
    async def scenario() -> None:
        made = await engine()

        class Stopping(TimedRecorder):
            run: Run

            def delta(self, *args: object, **kwargs: object) -> None:
                super().delta(*args, **kwargs)
                if len(self.deltas) == 3:
                    self.run.running.abort(FinishReason.CANCELLED)

        for sampling in (GREEDY, replace(GREEDY, stop=("\x00",))):
            template = await begin(made, "template", sampling)
            await template.over()
            sink = Stopping()
            spec = replace(made.last_spec, request_id="stopping")  # type: ignore[type-var]
            assert spec is not None
            sink.run = Run(made.submit(await made.prepare(spec), sink), sink)
            await sink.run.over()
            assert len(sink.deltas) == 3
            assert sink.reason() is FinishReason.CANCELLED
        assert made.stats().running == 0

    run_virtual(scenario())


def test_long_prompts_are_read_in_chunks_beside_running_output(run_virtual: Virtual) -> None:
    async def scenario() -> None:
        profile = replace(PROFILE, step_tokens_max=64, prefix_cache=False)
        made = await engine(profile)
        short = await begin(made, sampling=replace(GREEDY, max_tokens=30))
        await asyncio.sleep(1.5 * STEP_S)
        start = now()
        long = await begin(made, TokenPrompt((97,) * 300))
        sink = await long.over()
        # 63 tokens a step beside the short one: five steps, and what is left of the current one.
        assert sink.times[0] - start == pytest.approx(5.5 * STEP_S, rel=0.1)
        gaps = [b - a for a, b in zip(short.sink.times, short.sink.times[1:], strict=False)]
        assert max(gaps) < 1.1 * STEP_S

    run_virtual(scenario())


# --- memory ---


def test_a_full_memory_preempts_the_latest_and_loses_nothing(run_virtual: Virtual) -> None:
    async def scenario() -> None:
        long = replace(GREEDY, max_tokens=400)
        roomy = await engine(replace(PROFILE, kv_tokens=8192))
        alone = [(await reply(roomy, f"hello {index}", long)).token_ids() for index in range(4)]
        made = await engine(replace(PROFILE, prefix_cache=False))
        runs = [await begin(made, f"hello {index}", long) for index in range(4)]
        while any(run.sink.end is None for run in runs):
            await asyncio.sleep(STEP_S)
            batch = made._batch
            assert batch is not None
            writing = [one for one in batch._plain if one.live]
            held = sum(one.prompt_tokens + one.position for one in writing)
            assert held <= batch.kv.used * 16 <= 1024
        together = [(await run.over()).token_ids() for run in runs]
        assert together == alone
        preemptions = made.stats().preemptions
        assert preemptions is not None
        assert preemptions > 0
        assert made.stats().kv_tokens_used == 0
        assert made.stats().kv_tokens_free == 1024

    run_virtual(scenario())


def test_what_was_preempted_goes_on_before_what_waits(run_virtual: Virtual) -> None:
    async def scenario() -> None:
        made = await engine(replace(PROFILE, prefix_cache=False, sequences_max=3))
        long = replace(GREEDY, max_tokens=400)
        runs = [await begin(made, f"hello {index}", long) for index in range(3)]
        late = await begin(made, "late")
        sinks = [await run.over() for run in runs]
        assert made.stats().preemptions
        late_sink = await late.over()
        # The third was preempted and had its place again before the late one had any.
        gap_ends = [b for a, b in zip(sinks[2].times, sinks[2].times[1:], strict=False)
                    if b - a > 2 * STEP_S]  # fmt: skip
        assert gap_ends
        assert gap_ends[0] <= late_sink.times[0]

    run_virtual(scenario())


def test_memory_in_use_is_whole_blocks_of_what_runs(run_virtual: Virtual) -> None:
    async def scenario() -> None:
        made = await engine(replace(PROFILE, prefix_cache=False))
        run = await begin(made, TokenPrompt((97,) * 40), replace(GREEDY, max_tokens=30))
        await asyncio.sleep(2.5 * STEP_S)
        assert made.stats().kv_tokens_used == 48
        await asyncio.sleep(10 * STEP_S)
        assert made.stats().kv_tokens_used == 64
        await run.over()
        assert made.stats().kv_tokens_used == 0

    run_virtual(scenario())


def test_the_cache_saves_reading_and_reports_its_hits(run_virtual: Virtual) -> None:
    async def scenario() -> None:
        made = await engine(replace(PROFILE, prefill_tokens_per_s=1000.0))
        prompt = TokenPrompt((97,) * 164)
        start = now()
        first = await reply(made, prompt)
        cold = first.times[0] - start
        start = now()
        second = await reply(made, prompt)
        warm = second.times[0] - start
        assert cold == pytest.approx(0.174, abs=1e-6)
        assert warm == pytest.approx(0.014, abs=1e-6)
        assert second.end is not None
        assert second.end.cached_tokens == 160
        assert made.stats().prefix_hit_rate == pytest.approx(160 / 328)
        assert made.stats().kv_tokens_used == 0

    run_virtual(scenario())


# --- the next token ---


def test_a_lost_repeated_or_exchanged_token_changes_everything_after_it(
    run_virtual: Virtual,
) -> None:
    async def scenario() -> None:
        made = await engine()
        ids = encode("the quick brown fox jumps over the lazy dog")
        base = (await reply(made, TokenPrompt(ids))).token_ids()
        for index in (0, len(ids) // 2, len(ids) - 1):
            lost = ids[:index] + ids[index + 1 :]
            repeated = ids[: index + 1] + ids[index:]
            exchanged = (*ids[:index], ids[index] ^ 1, *ids[index + 1 :])
            for wrong in (lost, repeated, exchanged):
                assert (await reply(made, TokenPrompt(wrong))).token_ids() != base

    run_virtual(scenario())


def test_output_given_as_prompt_goes_on_alike_where_no_character_is_open(
    run_virtual: Virtual,
) -> None:
    async def scenario() -> None:
        made = await engine()
        ids = encode("once more")
        base = (await reply(made, TokenPrompt(ids), replace(GREEDY, max_tokens=12))).token_ids()
        cut = next(cut for cut in range(4, 12) if decode(base[:cut]) != decode(base[: cut - 1]))
        rest = await reply(
            made, TokenPrompt(ids + base[:cut]), replace(GREEDY, max_tokens=12 - cut)
        )
        assert rest.token_ids() == base[cut:]

    run_virtual(scenario())


@pytest.mark.parametrize(
    "one",
    [
        Sampling(temperature=0.0),
        Sampling(temperature=1.0),
        Sampling(top_p=1.0),
        Sampling(top_k=0),
        Sampling(min_p=0.0),
        Sampling(presence_penalty=0.0),
        Sampling(frequency_penalty=0.0),
        Sampling(repetition_penalty=1.0),
        Sampling(seed=0),
        Sampling(logit_bias={5: 0.0}),
    ],
)
def test_each_set_field_shows_in_the_output_even_at_its_default(
    run_virtual: Virtual, one: Sampling
) -> None:
    async def scenario() -> None:
        made = await engine()
        unset = (await reply(made, sampling=Sampling(max_tokens=12))).token_ids()
        value = (await reply(made, sampling=replace(one, max_tokens=12))).token_ids()
        assert value != unset

    run_virtual(scenario())


def test_greedy_output_does_not_depend_on_what_draws_from_a_distribution(
    run_virtual: Virtual,
) -> None:
    async def scenario() -> None:
        made = await engine()
        plain = (await reply(made)).token_ids()
        for other in (
            replace(GREEDY, seed=5),
            replace(GREEDY, top_p=0.5),
            replace(GREEDY, top_k=3, min_p=0.1),
        ):
            assert (await reply(made, sampling=other)).token_ids() == plain

    run_virtual(scenario())


def test_other_weights_are_another_fingerprint_and_another_output(run_virtual: Virtual) -> None:
    async def scenario() -> None:
        one, other = await engine(), await engine(replace(PROFILE, weights="b"))
        assert one.describe().fingerprint != other.describe().fingerprint
        assert (await reply(one)).token_ids() != (await reply(other)).token_ids()
        twin = await engine()
        assert twin.describe().fingerprint == one.describe().fingerprint
        assert (await reply(one)).token_ids() == (await reply(twin)).token_ids()

    run_virtual(scenario())


def test_a_mean_length_ends_outputs_with_the_end_token(run_virtual: Virtual) -> None:
    async def scenario() -> None:
        made = await engine(replace(PROFILE, output_tokens_mean=10.0, context_tokens=512))
        long = replace(GREEDY, max_tokens=300)
        runs = [await begin(made, f"hello {index}", long) for index in range(60)]
        sinks = [await run.over() for run in runs]
        lengths = [len(sink.token_ids()) for sink in sinks]
        assert 5.0 < sum(lengths) / len(lengths) < 25.0
        ended = next(sink for sink in sinks if sink.reason() is FinishReason.STOP)
        assert ended.token_ids()[-1] == EOS
        for sink in sinks:
            if sink.reason() is FinishReason.STOP:
                # No character is left open: the bytes are strictly UTF-8.
                data = b"".join(TOKEN_BYTES[token] for token in sink.token_ids())
                assert data.decode() == sink.text()
        short = min(range(60), key=lambda index: lengths[index])
        going_on = await reply(made, f"hello {short}", replace(long, ignore_eos=True))
        assert len(going_on.token_ids()) == 300
        assert going_on.token_ids()[: lengths[short]] == sinks[short].token_ids()
        held = await reply(made, f"hello {short}", replace(long, min_tokens=40))
        assert len(held.token_ids()) > 40
        assert EOS not in held.token_ids()[:40]
        shown = await reply(
            made,
            f"hello {short}",
            replace(long, ignore_eos=True, keep_special_tokens=True, max_tokens=40),
        )
        assert "<eos>" in shown.text()

    run_virtual(scenario())


def test_the_step_loop_and_a_writer_choose_the_same_tokens(run_virtual: Virtual) -> None:
    async def scenario() -> None:
        made = await engine(replace(PROFILE, output_tokens_mean=20.0))
        plain = replace(GREEDY, max_tokens=100)
        for index in range(40):
            by_loop = await reply(made, f"hello {index}", plain)
            by_writer = await reply(made, f"hello {index}", replace(plain, stop=("\x00",)))
            assert by_writer.token_ids() == by_loop.token_ids()
            assert by_writer.text() == by_loop.text()
            assert by_writer.output_end() == by_loop.output_end()

    run_virtual(scenario())


# --- statistics and life ---


def test_rates_are_those_of_the_last_window_and_zero_when_idle(run_virtual: Virtual) -> None:
    async def scenario() -> None:
        made = await engine()
        runs = [await begin(made, sampling=replace(GREEDY, max_tokens=400)) for _ in range(2)]
        await asyncio.sleep(2.0)
        stats = made.stats()
        assert stats.output_tokens_per_s == pytest.approx(200.0, rel=0.05)
        assert stats.step_ms == pytest.approx(10.0, rel=0.01)
        for run in runs:
            await run.over()
        await asyncio.sleep(1.0)
        made.stats()
        await asyncio.sleep(1.0)
        assert made.stats().output_tokens_per_s == 0.0

    run_virtual(scenario())


def test_closing_ends_what_runs_and_refuses_what_comes(run_virtual: Virtual) -> None:
    async def scenario() -> None:
        made = await engine()
        prepared = await made.prepare(await _spec(made))
        run = await begin(made, sampling=replace(GREEDY, max_tokens=400))
        await asyncio.sleep(2.5 * STEP_S)
        await made.close()
        await made.close()
        assert (await run.over()).reason() is FinishReason.CANCELLED
        assert not made.healthy
        with pytest.raises(SluiceError) as caught:
            made.submit(prepared, TimedRecorder())
        assert caught.value.code is Code.UNAVAILABLE
        await made.start()
        assert (await reply(made)).token_ids()

    run_virtual(scenario())


async def _spec(made: Any) -> Any:
    await reply(made)
    return replace(made.last_spec, request_id="again")


def test_loading_takes_its_time(run_virtual: Virtual) -> None:
    async def scenario() -> None:
        start = now()
        made = await engine(replace(PROFILE, start_s=30.0))
        assert now() - start == pytest.approx(30.0)
        assert made.healthy

    run_virtual(scenario())


# --- its profile ---


@pytest.mark.parametrize(
    ("table", "named"),
    [
        ({"decode_step_ms": 0.0}, "decode_step_ms"),
        ({"decode_step_ms": float("nan")}, "decode_step_ms"),
        ({"prefill_tokens_per_s": 0.0}, "prefill_tokens_per_s"),
        ({"kv_tokens": 100, "context_tokens": 128}, "kv_tokens"),
        ({"sequences_max": 0}, "sequences_max"),
        ({"sequences_max": 16, "step_tokens_max": 8}, "step_tokens_max"),
        ({"output_tokens_mean": 0.5}, "output_tokens_mean"),
        ({"context_tokens": "many"}, "context_tokens"),
        ({"prefix_cache": 1}, "prefix_cache"),
        ({"speed": 1}, "speed"),
    ],
)
def test_a_wrong_setting_is_named(table: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=f"simulated.{named}"):
        SimulatedProfile.from_table("m", table)


def test_settings_are_taken_from_a_table() -> None:
    profile = SimulatedProfile.from_table("m", {"decode_step_ms": 5, "prefix_cache": False})
    assert profile.model == "m"
    assert profile.decode_step_ms == 5.0
    assert not profile.prefix_cache
