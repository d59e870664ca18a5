"""The engine's keeper, in virtual time: loading, failure, replacement, giving up."""

from __future__ import annotations

import asyncio

import pytest

from inference_svc.adapters.engine_host import (
    FAILURES_MAX,
    REFUSAL_CHARS_MAX,
    SOUND_S,
    EngineFailedError,
    EngineHost,
    EngineRefusedError,
    refusal,
)
from inference_svc.domain.credit import Room
from sluice.clock import run_virtual
from sluice.errors import Code, SluiceError
from tests.fakes import FakeEngine


def is_serving(host: EngineHost) -> bool:
    return host.serving  # by a call, so that the type checker expects it to change


def test_while_the_engine_loads_nothing_is_served_and_there_is_no_room() -> None:
    class Slow(FakeEngine):
        async def start(self) -> None:
            await asyncio.sleep(100.0)
            await super().start()

    async def body() -> None:
        host = EngineHost(Slow)
        keeper = asyncio.create_task(host.run())
        await asyncio.sleep(99.0)
        assert not is_serving(host)
        assert host.epoch == 0
        assert host.capacity == Room(0, 0)
        for ask in (host.engine, host.model):
            with pytest.raises(SluiceError) as caught:
                ask()
            assert caught.value.code is Code.UNAVAILABLE
        await asyncio.sleep(2.0)
        assert is_serving(host)
        assert host.epoch != 0
        assert host.capacity == Room(8, 8192)
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)
        await host.close()

    run_virtual(body())


def test_a_failed_engine_is_closed_and_replaced_with_a_new_epoch() -> None:
    async def body() -> None:
        made: list[FakeEngine] = []

        def make() -> FakeEngine:
            made.append(FakeEngine())
            return made[-1]

        host = EngineHost(make)
        epochs: list[tuple[int, bool]] = []
        host.watch(lambda: epochs.append((host.epoch, host.serving)))
        keeper = asyncio.create_task(host.run())
        await asyncio.sleep(1.0)
        first = host.epoch
        made[0].crash()
        await asyncio.sleep(0.2)
        assert not is_serving(host)
        assert made[0].closed == 1
        await asyncio.sleep(2.0)
        assert is_serving(host)
        assert host.epoch not in (0, first)
        assert epochs[0] == (first, True)
        assert epochs[-1] == (host.epoch, True)
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)
        await host.close()
        assert made[1].closed == 1
        await host.close()  # idempotent

    run_virtual(body())


def test_an_engine_that_fails_again_and_again_ends_the_process() -> None:
    async def body() -> None:
        made: list[FakeEngine] = []

        def make() -> FakeEngine:
            made.append(FakeEngine(start_error=RuntimeError("no memory")))
            return made[-1]

        with pytest.raises(EngineFailedError):
            await EngineHost(make).run()
        assert len(made) == FAILURES_MAX
        assert all(engine.closed for engine in made)

    run_virtual(body())


def test_failures_far_apart_are_not_added_up() -> None:
    async def body() -> None:
        made: list[FakeEngine] = []

        def make() -> FakeEngine:
            made.append(FakeEngine())
            return made[-1]

        host = EngineHost(make)
        keeper = asyncio.create_task(host.run())
        for count in range(1, FAILURES_MAX + 3):
            await asyncio.sleep(SOUND_S + 10.0)
            assert len(made) == count
            made[-1].crash()
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)
        await host.close()

    run_virtual(body())


def test_settings_that_the_engine_refuses_are_not_tried_again() -> None:
    async def body() -> None:
        made: list[FakeEngine] = []

        def make() -> FakeEngine:
            made.append(FakeEngine(start_error=ValueError("max_model_len is too long")))
            return made[-1]

        with pytest.raises(EngineRefusedError, match="max_model_len is too long"):
            await EngineHost(make).run()
        assert [engine.closed for engine in made] == [1]

    run_virtual(body())


def test_a_value_error_after_the_engine_has_served_is_tried_again() -> None:
    async def body() -> None:
        engines = [FakeEngine(), FakeEngine(start_error=ValueError("odd")), FakeEngine()]
        made = list(engines)
        host = EngineHost(lambda: made.pop(0))
        keeper = asyncio.create_task(host.run())
        await asyncio.sleep(1.0)
        engines[0].crash()
        await asyncio.sleep(10.0)
        assert is_serving(host)
        assert not made
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)
        await host.close()

    run_virtual(body())


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("no such model", "no such model"),
        ("", "ValueError"),
        (
            (
                "1 validation error for ModelConfig\n  Value error, Invalid folder: '/x'"
                " [type=value_error, input_value=ArgsKwargs((), {...}), input_type=ArgsKwargs]\n"
                "    For further information visit https://example.org"
            ),
            "Invalid folder: '/x'",
        ),
        (
            (
                "1 validation error for CacheConfig\nblock_size\n  Input should be 8, 16 or 32"
                " [type=literal_error, input_value=7, input_type=int]"
            ),
            "block_size: Input should be 8, 16 or 32",
        ),
        ("x" * 3_000, "x" * REFUSAL_CHARS_MAX),
    ],
)
def test_what_the_engine_found_wrong_is_one_line(said: str, shown: str) -> None:
    assert refusal(ValueError(said)) == shown
