"""What happened in a run: the events, their hash, and the rules that were broken."""

from __future__ import annotations

import asyncio
import traceback
from collections import Counter
from hashlib import blake2b


class Journal:
    """Every event goes into the hash; two runs of a seed have the same."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._hash = blake2b(digest_size=16)
        self.events: list[str] = []
        self._began_s = self._loop.time()
        self.counts: Counter[str] = Counter()
        self.violations: list[str] = []
        self.violated = asyncio.Event()

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
