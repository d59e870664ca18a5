"""What holds for every test: virtual time as a fixture, and searches that repeat themselves."""

from __future__ import annotations

import signal
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
from hypothesis import settings

from sluice.clock import VirtualTimeLoop
from sluice.clock import run_virtual as run_virtual_time

# The same examples on every machine, and no limit of time for one: on a busy machine that limit
# would fail what is right.
settings.register_profile("repeated", deadline=None, derandomize=True, database=None)
settings.load_profile("repeated")

# A shell lets what it starts in the background ignore SIGINT, and that is inherited: what the tests
# start and interrupt would go on.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def run_virtual() -> Callable[[Coroutine[Any, Any, Any]], Any]:
    """``run_virtual(coro)`` runs a scenario to its end in virtual time, without waiting."""
    return run_virtual_time


@pytest.fixture
def virtual_loop() -> Iterator[VirtualTimeLoop]:
    """A virtual-time loop that is not running; ``virtual_loop.run_until_complete(coro)``."""
    loop = VirtualTimeLoop()
    yield loop
    loop.close()
