"""What an instance counts, as plain integers: once per start, end or frame, never per token."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Counts:
    """Counters by label; written by the event loop, read by metrics."""

    starts: Counter[str] = field(default_factory=Counter)  # by result
    aborts: Counter[str] = field(default_factory=Counter)  # by reason
    tokens: Counter[str] = field(default_factory=Counter)  # by direction: input, output
    frames: Counter[str] = field(default_factory=Counter)  # by direction: in, out
    losses: Counter[str] = field(default_factory=Counter)  # streams, by kind
