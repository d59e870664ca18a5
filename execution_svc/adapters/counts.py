"""What a replica counts, as plain integers: once per frame or loss, never per token."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Counts:
    """Counters by label; written by the event loop, read by metrics."""

    frames: Counter[str] = field(default_factory=Counter)  # by direction
    losses: Counter[str] = field(default_factory=Counter)  # instance streams, by kind
    limit_hits: Counter[str] = field(default_factory=Counter)  # by limit
    links_open: int = 0  # instance streams
