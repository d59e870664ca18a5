"""Text of a running model call reaches the state service whole, in order, at its interval; virtual
time.

Oracle: the text that one who applies each message sees. Seen to fail on the mutant
live_text_gives_up.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

from agent_svc.adapters.live_text import AWAY_S, LiveText
from sluice.clock import run_virtual
from sluice.errors import Code, SluiceError, unavailable

INTERVAL_S = 0.04


class Sink:
    """What arrived, and what it shows."""

    def __init__(self) -> None:
        self.messages: list[tuple[float, str, bool]] = []
        self.shown = ""
        self.fails: Callable[[], SluiceError] | None = None
        self.lost = False

    async def publish(self, text: str, replaces: bool) -> bool:
        if self.fails is not None:
            raise self.fails()
        self.messages.append((asyncio.get_running_loop().time(), text, replaces))
        self.shown = text if replaces else self.shown + text
        lost, self.lost = self.lost and not replaces, False
        return lost


def test_pieces_leave_at_the_interval_and_none_is_lost() -> None:
    async def scenario() -> None:
        sink = Sink()
        async with LiveText(sink.publish, lambda: INTERVAL_S) as live:
            for n in range(100):
                live.push(f"{n} ")
                await asyncio.sleep(INTERVAL_S / 4)
            await asyncio.sleep(2 * INTERVAL_S)
            assert sink.shown == "".join(f"{n} " for n in range(100))
        assert [replaces for _, _, replaces in sink.messages].count(True) == 1
        times = [time for time, _, _ in sink.messages]
        gaps = [later - sooner for sooner, later in itertools.pairwise(times)]
        assert min(gaps) >= INTERVAL_S - 1e-9

    run_virtual(scenario())


def test_what_the_other_side_lost_is_sent_again_from_the_beginning() -> None:
    async def scenario() -> None:
        sink = Sink()
        async with LiveText(sink.publish, lambda: INTERVAL_S) as live:
            live.push("one ")
            await asyncio.sleep(2 * INTERVAL_S)
            sink.shown, sink.lost = "", True  # it began anew
            live.push("two ")
            await asyncio.sleep(3 * INTERVAL_S)  # also without another piece
            assert sink.shown == "one two "
            live.push("three")
            await asyncio.sleep(2 * INTERVAL_S)
            assert sink.shown == "one two three"

    run_virtual(scenario())


def test_a_side_that_is_away_for_a_while_hears_all_of_it_afterwards() -> None:
    async def scenario() -> None:
        sink = Sink()
        async with LiveText(sink.publish, lambda: INTERVAL_S) as live:
            live.push("one ")
            await asyncio.sleep(2 * INTERVAL_S)
            sink.fails = lambda: unavailable("STORE_UNAVAILABLE", "away", 0.5)
            live.push("two ")
            await asyncio.sleep(5.0)
            sink.fails = None
            live.push("three")
            await asyncio.sleep(AWAY_S + INTERVAL_S)
            assert sink.shown == "one two three"

    run_virtual(scenario())


def test_what_is_refused_for_good_is_not_tried_again() -> None:
    async def scenario() -> None:
        sink = Sink()
        sink.fails = lambda: SluiceError(Code.ABORTED, "LEASE_LOST", "gone")
        async with LiveText(sink.publish, lambda: INTERVAL_S) as live:
            live.push("one ")
            await asyncio.sleep(1.0)
            sink.fails = None
            live.push("two")
            await asyncio.sleep(1.0)
            assert not sink.messages

    run_virtual(scenario())
