"""What happened in a run: the events, their hash, and the rules that were broken."""

from __future__ import annotations

import asyncio
import traceback
from collections import Counter
from hashlib import blake2b
from typing import Final

ABORT_S: Final = 0.1  # from a client's leave to the end in the engine


class Journal:
    """Every event goes into the hash; two runs of a seed have the same."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._hash = blake2b(digest_size=16)
        self.events: list[str] = []
        self.state: list[str] = []  # how everything stood at the first violation
        self._began_s = self._loop.time()
        self.counts: Counter[str] = Counter()
        self.violations: list[str] = []
        self.violated = asyncio.Event()
        self._left: dict[str, float] = {}

    def note(self, kind: str, *what: object) -> None:
        """An event."""
        self.counts[kind] += 1
        line = f"{self._loop.time() - self._began_s:9.4f} {kind} {' '.join(map(str, what))}"
        self.events.append(line)
        self._hash.update(line.encode())

    def check(self, holds: bool, rule: str) -> None:
        """A rule that has to hold now."""
        if not holds:
            self.violation(rule)

    def left(self, request_id: str) -> None:
        """A client went away."""
        if not self.counts["fault"]:
            self._left[request_id] = self._loop.time()

    def check_stopped(self, request_id: str) -> None:
        """Called when an engine begins or ends a request: not long after its client went away. Only
        those who left before the first fault are looked at, since a fault may hold up a cancel."""
        left_s = self._left.get(request_id, float("inf"))
        self.check(
            self.counts["fault"] > 0 or self._loop.time() - left_s <= ABORT_S,
            f"an engine runs {request_id} though its client left",
        )

    def violation(self, what: str, error: BaseException | None = None) -> None:
        """A rule is broken. Kept and not raised: services turn what is raised in them into errors
        for their clients."""
        if error is not None:
            what += "\n" + "".join(traceback.format_exception(error)).rstrip()
        self.note("VIOLATION", what)
        self.violations.append(what)
        self.violated.set()

    @property
    def digest(self) -> str:
        """The hash of all events so far."""
        return self._hash.hexdigest()
