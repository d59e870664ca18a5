"""Scripted faults of the simulated engine: each kind, and the ways to give them."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from inference_svc.adapters.simulated.faults import Fault
from inference_svc.ports import ChatPrompt, FinishReason, Sampling, TextPrompt
from sluice.errors import Code, SluiceError
from tests.unit.inference.simulated import GREEDY, PROFILE, begin, engine, reply

Virtual = Callable[[Coroutine[Any, Any, Any]], Any]
MIXED = "삼겹살 🫠 龜"
LONG = replace(GREEDY, max_tokens=100)


def test_a_reply_of_single_bytes_arrives_as_whole_characters(run_virtual: Virtual) -> None:
    async def scenario() -> None:
        made = await engine(PROFILE, Fault(reply=MIXED, reply_bytes=True))
        sink = await reply(made, sampling=LONG)
        assert sink.text() == MIXED
        assert sink.token_ids()[:-1] == tuple(MIXED.encode())
        assert all(len(delta.token_ids) == 1 for delta in sink.deltas)
        assert all("\N{REPLACEMENT CHARACTER}" not in delta.text for delta in sink.deltas)
        assert sink.reason() is FinishReason.STOP

    run_virtual(scenario())


def test_a_reply_is_cut_at_chosen_bytes(run_virtual: Virtual) -> None:
    async def scenario() -> None:
        made = await engine(PROFILE, Fault(reply=MIXED, reply_cuts=(1, 8, 11)))
        sink = await reply(made, sampling=LONG)
        assert [len(delta.token_ids) for delta in sink.deltas] == [1, 7, 3, 7, 1]
        assert [delta.text for delta in sink.deltas] == ["", "삼겹", "살 ", "🫠 龜", ""]

    run_virtual(scenario())


@pytest.mark.parametrize("stop", ["겹살", "살 🫠", "🫠"])
def test_a_stop_string_is_found_in_a_reply_however_it_is_cut(
    run_virtual: Virtual, stop: str
) -> None:
    async def scenario() -> None:
        for cuts in ((), (4,), (2, 5, 9, 12, 15), tuple(range(1, 18))):
            made = await engine(PROFILE, Fault(reply=MIXED, reply_cuts=cuts, reply_bytes=True))
            sink = await reply(made, sampling=replace(LONG, stop=(stop,)))
            assert sink.text() == MIXED[: MIXED.index(stop)]
            assert sink.output_end().stop_string == stop

    run_virtual(scenario())


def test_a_stop_token_in_a_reply_counts_after_min_tokens_only(run_virtual: Virtual) -> None:
    async def scenario() -> None:
        made = await engine(PROFILE, Fault(reply="abcabc", reply_bytes=True))
        sampling = replace(LONG, stop_token_ids=(ord("a"),), min_tokens=2)
        sink = await reply(made, sampling=sampling)
        assert sink.text() == "abc"
        assert sink.output_end().stop_token_id == ord("a")

    run_virtual(scenario())


@pytest.mark.parametrize("after", [0, 3])
def test_it_hangs_until_it_is_aborted(run_virtual: Virtual, after: int) -> None:
    async def scenario() -> None:
        made = await engine(PROFILE, Fault(request_id="contract-*", hang_after=after))
        run = await begin(made)
        await asyncio.sleep(600.0)
        assert len(run.sink.token_ids()) == after
        stats = made.stats()
        assert stats.running == 1
        assert stats.kv_tokens_used
        run.running.abort(FinishReason.DEADLINE)
        assert made.stats().running == 0
        assert made.stats().kv_tokens_used == 0
        assert (await run.over()).reason() is FinishReason.DEADLINE

    run_virtual(scenario())


def test_it_hangs_for_a_while_and_goes_on_as_if_nothing_was(run_virtual: Virtual) -> None:
    async def scenario() -> None:
        plain = await reply(await engine())
        sink = await reply(await engine(PROFILE, Fault(hang_after=3, hang_ms=5000.0)))
        assert sink.token_ids() == plain.token_ids()
        assert sink.times[3] - sink.times[2] == pytest.approx(5.0, abs=0.03)
        assert sink.times[4] - sink.times[3] == pytest.approx(0.01, abs=1e-6)

    run_virtual(scenario())


def test_it_keeps_a_pace_beside_others_that_do_not(run_virtual: Virtual) -> None:
    async def scenario() -> None:
        made = await engine(PROFILE, Fault(times=1, pace_ms=100.0))
        slow, fast = await begin(made, "slow"), await begin(made, "fast")
        slow_sink, fast_sink = await slow.over(), await fast.over()
        gaps = [b - a for a, b in zip(slow_sink.times, slow_sink.times[1:], strict=False)]
        assert all(gap == pytest.approx(0.1, abs=0.011) for gap in gaps)
        assert fast_sink.times[-1] < slow_sink.times[1]

    run_virtual(scenario())


@pytest.mark.parametrize("after", [0, 2])
def test_a_request_fails_with_the_scripted_status(run_virtual: Virtual, after: int) -> None:
    async def scenario() -> None:
        fault = Fault(
            times=1,
            fail_after=after,
            status="RESOURCE_EXHAUSTED",
            reason="FULL",
            message="two\nlines",
            retry_after_ms=1500.0,
        )
        made = await engine(PROFILE, fault)
        failing, fine = await begin(made, "fails"), await begin(made, "runs")
        sink = await failing.over()
        assert len(sink.token_ids()) == after
        assert sink.reason() is FinishReason.ERROR
        assert sink.end is not None
        error = sink.end.error
        assert isinstance(error, SluiceError)
        assert (error.code, error.reason, error.message) == (
            Code.RESOURCE_EXHAUSTED,
            "FULL",
            "two\nlines",
        )
        assert error.retry_after_s == 1.5
        assert (await fine.over()).reason() is FinishReason.LENGTH
        assert made.counters().failed == 1
        assert made.stats().kv_tokens_used == 0

    run_virtual(scenario())


def test_a_request_is_refused_before_it_starts(run_virtual: Virtual) -> None:
    async def scenario() -> None:
        made = await engine(PROFILE, Fault(times=1, refuse=True, status="INTERNAL"))
        with pytest.raises(SluiceError) as caught:
            await begin(made)
        assert caught.value.code is Code.INTERNAL
        assert (await reply(made)).reason() is FinishReason.LENGTH

    run_virtual(scenario())


def test_a_crash_fails_all_that_runs_and_a_new_start_serves_again(run_virtual: Virtual) -> None:
    async def scenario() -> None:
        made = await engine(PROFILE, Fault(times=1, crash_after=3))
        runs = [await begin(made, f"hello {index}") for index in range(6)]
        for run in runs:
            sink = await run.over()
            assert sink.reason() is FinishReason.ERROR
            assert sink.end is not None
            assert isinstance(sink.end.error, SluiceError)
            assert sink.end.error.code is Code.UNAVAILABLE
        assert len(runs[0].sink.token_ids()) == 3
        assert not made.healthy
        assert made.stats().running is None
        with pytest.raises(SluiceError) as caught:
            await begin(made)
        assert caught.value.code is Code.UNAVAILABLE
        await made.start()
        assert (await reply(made)).reason() is FinishReason.LENGTH

    run_virtual(scenario())


def test_the_process_vanishes_as_if_killed() -> None:
    script = (
        "import asyncio\n"
        "from inference_svc.adapters.simulated.faults import Fault\n"
        "from tests.unit.inference.simulated import PROFILE, engine, reply\n"
        "async def main():\n"
        "    await reply(await engine(PROFILE, Fault(exit_after=2)))\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", script], timeout=60, check=False)
    assert done.returncode == 137


def test_rules_apply_by_pattern_in_order_and_so_many_times(run_virtual: Virtual) -> None:
    async def scenario() -> None:
        made = await engine(
            PROFILE,
            Fault(model="another-*", refuse=True),
            Fault(request_id="contract-*", times=2, reply="one"),
            Fault(reply="two"),
        )
        texts = [(await reply(made)).text() for _ in range(3)]
        assert texts == ["one", "one", "two"]
        made.faults.add(Fault(reply="three"))
        assert (await reply(made)).text() == "three"
        made.faults.clear()
        assert (await reply(made)).text() not in ("one", "two", "three")

    run_virtual(scenario())


def test_a_faults_file_is_read_again_when_it_changes_and_keeps_the_last_good(
    run_virtual: Virtual, tmp_path: Path
) -> None:
    path = tmp_path / "faults.json"

    async def scenario() -> None:
        made = await engine(replace(PROFILE, faults_file=str(path)))
        plain = (await reply(made, sampling=LONG)).text()
        path.write_text(json.dumps({"rules": [{"reply": "from the file"}]}))
        await asyncio.sleep(0.1)
        assert (await reply(made, sampling=LONG)).text() == "from the file"
        for wrong in ("{", '{"rules": [{"repply": "x"}]}', '{"rules": [{"hang_after": -1}]}', "[]"):
            path.write_text(wrong)
            await asyncio.sleep(0.1)
            assert (await reply(made, sampling=LONG)).text() == "from the file"
        assert made.faults.rejected == 4
        path.write_text(json.dumps({"rules": [{"reply": "another"}]}))
        await asyncio.sleep(0.1)
        assert (await reply(made, sampling=LONG)).text() == "another"
        path.unlink()
        await asyncio.sleep(0.1)
        assert (await reply(made, sampling=LONG)).text() == plain

    run_virtual(scenario())


def test_a_prompt_scripts_faults_only_where_that_is_allowed(run_virtual: Virtual) -> None:
    async def scenario() -> None:
        prompt = TextPrompt('please [[sim: {"reply": "as you wish"}]] now')
        deaf = await engine(replace(PROFILE, prompt_directives=False))
        assert (await reply(deaf, prompt, LONG)).text() != "as you wish"
        made = await engine(replace(PROFILE, prompt_directives=True))
        assert (await reply(made, prompt, LONG)).text() == "as you wish"
        chat = ChatPrompt(({"role": "user", "content": prompt.text},))
        assert (await reply(made, chat, LONG)).text() == "as you wish"
        for wrong in ('{"reply": }', '{"no": 1}', '{"status": "FINE"}', '{"reply": 1}'):
            with pytest.raises(SluiceError) as caught:
                await reply(made, f"[[sim: {wrong}]]")
            assert caught.value.code is Code.INVALID_ARGUMENT

    run_virtual(scenario())


def test_an_echo_shows_the_sampling_as_received(run_virtual: Virtual) -> None:
    async def scenario() -> None:
        made = await engine(replace(PROFILE, prompt_directives=True))
        prompt = '[[sim: {"echo": "sampling"}]]'
        sampling = Sampling(temperature=0.0, seed=0, top_k=0, stop=("never",), max_tokens=400)
        sink = await reply(made, prompt, sampling)
        values = json.loads(sink.text())
        assert values["temperature"] == 0.0
        assert values["seed"] == 0
        assert values["top_k"] == 0
        assert values["stop"] == ["never"]
        assert "top_p" not in values
        assert "min_p" not in values
        unset = json.loads((await reply(made, prompt, Sampling())).text())
        assert set(unset) == {
            "stop", "stop_token_ids", "include_stop", "ignore_eos", "n", "keep_special_tokens",
        }  # fmt: skip
        echoed = await reply(made, 'a [[sim: {"echo": "prompt"}]]', LONG)
        assert echoed.text() == 'a [[sim: {"echo": "prompt"}]]'

    run_virtual(scenario())


def test_embedding_hangs_and_fails_as_scripted(run_virtual: Virtual) -> None:
    async def scenario() -> None:
        made = await engine(replace(PROFILE, embedding_dimensions=8), Fault(times=1, fail_after=0))
        with pytest.raises(SluiceError):
            await made.embed("one", [TextPrompt("a")])
        made.faults.add(Fault(hang_after=0))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(60.0):
                await made.embed("two", [TextPrompt("a")])
        assert made.stats().running == 0

    run_virtual(scenario())
