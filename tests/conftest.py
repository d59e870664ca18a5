"""Fixtures that every test may use: virtual time."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from sluice.clock import VirtualTimeLoop
from sluice.clock import run_virtual as run_virtual_time


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
