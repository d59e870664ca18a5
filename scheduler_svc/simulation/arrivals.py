"""Arrivals: what comes, when, from whom. A generated mix, or a trace file.

Every source is an iterator of :class:`Arrival` in order of time, made from a seed: the same file,
mix and seed give the same arrivals. Traces say nothing of classes and tenants (and some nothing of
lengths): those are drawn from the mix. A malformed line is a ValueError with file and line.
"""

from __future__ import annotations

import csv
import json
import math
from bisect import bisect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from heapq import merge
from itertools import accumulate, islice
from pathlib import Path
from random import Random

from scheduler_svc.domain.model import PriorityClass

# Mooncake's times are rounded to this; its blocks have so many tokens.
MOONCAKE_QUANTUM_S = 3.0
MOONCAKE_BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request. ``prefix``: ids of the prompt's whole blocks, where the source knows them."""

    at_s: float
    tenant: str
    priority_class: PriorityClass
    prompt_tokens: int
    output_tokens: int
    prefix: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Lengths:
    """Log-normal token counts: a median, the standard deviation of the logarithm, a limit."""

    median: float
    sigma: float
    most: int

    def draw(self, random: Random) -> int:
        drawn = self.median * math.exp(random.gauss(0.0, self.sigma))
        return max(1, min(self.most, round(drawn)))


@dataclass(frozen=True, slots=True)
class Mix:
    """Who asks for what. ``classes`` and ``tenants`` are relative weights. ``prompts`` and
    ``outputs`` are used where a trace does not say lengths."""

    classes: dict[PriorityClass, float] = field(
        default_factory=lambda: {
            PriorityClass.CRITICAL: 0.1,
            PriorityClass.INTERACTIVE: 0.5,
            PriorityClass.STANDARD: 0.2,
            PriorityClass.BATCH: 0.2,
        }
    )
    tenants: dict[str, float] = field(
        default_factory=lambda: {f"tenant-{number}": 1.0 for number in range(4)}
    )
    # About the lengths of the Azure conversation trace of 2023: medians 1,020 and 129.
    prompts: Lengths = Lengths(1_000.0, 0.8, 7_000)
    outputs: Lengths = Lengths(130.0, 0.8, 1_000)


class _Draw:
    """Draws classes, tenants and lengths of a mix."""

    def __init__(self, mix: Mix, seed: int, stream: str) -> None:
        self.random = Random(f"{seed}/{stream}")
        self._mix = mix
        self._classes = list(mix.classes)
        self._class_edges = _edges(list(mix.classes.values()))
        self._tenants = list(mix.tenants)
        self._tenant_edges = _edges(list(mix.tenants.values()))

    def priority_class(self) -> PriorityClass:
        return self._classes[bisect(self._class_edges, self.random.random())]

    def tenant(self) -> str:
        return self._tenants[bisect(self._tenant_edges, self.random.random())]

    def prompt_tokens(self) -> int:
        return self._mix.prompts.draw(self.random)

    def output_tokens(self) -> int:
        return self._mix.outputs.draw(self.random)

    def arrival(self, at_s: float) -> Arrival:
        return Arrival(
            at_s,
            self.tenant(),
            self.priority_class(),
            self.prompt_tokens(),
            self.output_tokens(),
        )


def generated(mix: Mix, rate_per_s: float, cv: float, seed: int) -> Iterator[Arrival]:
    """Without end. Gaps are Gamma with the coefficient of variation ``cv``: 1 is a Poisson
    process, more comes in bursts, 0 is a metronome."""
    draw = _Draw(mix, seed, "generated")
    at_s = 0.0
    while True:
        at_s += _gap(draw.random, rate_per_s, cv)
        yield draw.arrival(at_s)


def azure(path: Path, mix: Mix, seed: int) -> Iterator[Arrival]:
    """Azure's LLM inference trace: TIMESTAMP, ContextTokens, GeneratedTokens."""
    draw = _Draw(mix, seed, "azure")
    start: datetime | None = None
    with path.open(encoding="utf-8", newline="") as file:
        for number, row in enumerate(csv.DictReader(file), start=2):
            try:
                # Seven digits of a second are one more than a datetime takes.
                at = datetime.fromisoformat(row["TIMESTAMP"][:26])
                prompt, output = int(row["ContextTokens"]), int(row["GeneratedTokens"])
            except (KeyError, TypeError, ValueError):
                raise ValueError(f"{path}:{number}: not a line of an Azure LLM trace") from None
            start = at if start is None else start
            yield Arrival(
                (at - start).total_seconds(),
                draw.tenant(),
                draw.priority_class(),
                max(1, prompt),
                max(1, output),
            )


def mooncake(path: Path, mix: Mix, seed: int) -> Iterator[Arrival]:
    """Mooncake's trace: one JSON object a line. Its times are multiples of 3 s: requests of one
    time are spread evenly at random over the 3 s that follow, in their order."""
    draw = _Draw(mix, seed, "mooncake")
    group: list[dict[str, object]] = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                row = json.loads(line)
                _ = (row["timestamp"] + 0, row["input_length"] + 0, row["output_length"] + 0)
            except (KeyError, TypeError, ValueError):
                raise ValueError(f"{path}:{number}: not a line of a Mooncake trace") from None
            if group and row["timestamp"] != group[0]["timestamp"]:
                yield from _mooncake_group(group, draw)
                group = []
            group.append(row)
    yield from _mooncake_group(group, draw)


def _mooncake_group(group: list[dict[str, object]], draw: _Draw) -> Iterator[Arrival]:
    offsets = sorted(draw.random.random() * MOONCAKE_QUANTUM_S for _ in group)
    for row, offset in zip(group, offsets, strict=True):
        hashes = row.get("hash_ids")
        prompt = max(1, int(row["input_length"]))  # type: ignore[call-overload]
        whole = prompt // MOONCAKE_BLOCK_TOKENS  # what is left is in no cache
        yield Arrival(
            float(row["timestamp"]) / 1_000.0 + offset,  # type: ignore[arg-type]
            draw.tenant(),
            draw.priority_class(),
            prompt,
            max(1, int(row["output_length"])),  # type: ignore[call-overload]
            tuple(hashes[:whole]) if isinstance(hashes, list) else (),
        )


@dataclass(frozen=True, slots=True)
class _Window:
    """Arrivals of one client in a stretch of time: a rate, and how it bursts."""

    start_s: float
    end_s: float
    rate_per_s: float
    family: str
    shape: float
    scale: float


def servegen(folder: Path, mix: Mix, seed: int) -> Iterator[Arrival]:
    """ServeGen's windows: a file ``chunk-N-trace.csv`` for each client, with lines of start (s),
    rate (1/s), coefficient of variation, family (Gamma or Weibull), shape, scale (s). A client is
    a tenant; classes and lengths are of the mix. Times count from the first window with arrivals.
    """
    files = sorted(folder.glob("chunk-*-trace.csv"), key=lambda path: (len(path.name), path.name))
    if not files:
        raise ValueError(f"{folder}: holds no chunk-N-trace.csv")
    clients = {path.name.split("-")[1]: list(_windows(path)) for path in files}
    starts = [window.start_s for windows in clients.values() for window in windows]
    if not starts:
        raise ValueError(f"{folder}: no window has arrivals")
    streams = (
        _client(f"client-{name}", windows, min(starts), mix, seed)
        for name, windows in clients.items()
    )
    yield from merge(*streams, key=lambda arrival: arrival.at_s)


def _windows(path: Path) -> Iterator[_Window]:
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file))
    starts = [float(row[0]) for row in rows]
    width = starts[1] - starts[0] if len(starts) > 1 else 600.0
    for number, row in enumerate(rows, start=1):
        try:
            rate, family, shape, scale = float(row[1]), row[3], float(row[4]), float(row[5])
            if rate > 0.0 and (family not in ("Gamma", "Weibull") or shape <= 0.0 or scale <= 0.0):
                raise ValueError
        except (IndexError, ValueError):
            raise ValueError(f"{path}:{number}: not a line of a ServeGen trace") from None
        if rate > 0.0:
            start = starts[number - 1]
            yield _Window(start, start + width, rate, family, shape, scale)


def _client(
    tenant: str, windows: list[_Window], start_s: float, mix: Mix, seed: int
) -> Iterator[Arrival]:
    draw = _Draw(mix, seed, tenant)
    random = draw.random
    for window in windows:
        if window.family == "Gamma":
            mean = window.shape * window.scale
        else:
            mean = window.scale * math.gamma(1.0 + 1.0 / window.shape)
        # The shape of the family at the rate of the window.
        stretch = 1.0 / (window.rate_per_s * mean)
        at_s = window.start_s
        while True:
            if window.family == "Gamma":
                gap = random.gammavariate(window.shape, window.scale)
            else:
                gap = random.weibullvariate(window.scale, window.shape)
            at_s += gap * stretch
            if at_s >= window.end_s:
                break
            yield replace(draw.arrival(at_s - start_s), tenant=tenant)


class Trace(StrEnum):
    """Forms of trace files."""

    AZURE = "azure"
    MOONCAKE = "mooncake"
    SERVEGEN = "servegen"


READERS: dict[Trace, Callable[[Path, Mix, int], Iterator[Arrival]]] = {
    Trace.AZURE: azure,
    Trace.MOONCAKE: mooncake,
    Trace.SERVEGEN: servegen,
}


def scaled(
    arrivals: Iterator[Arrival],
    *,
    speed: float = 1.0,
    requests_max: int | None = None,
    duration_s: float | None = None,
    context_tokens: int | None = None,
) -> Iterator[Arrival]:
    """Arrivals ``speed`` times as fast, up to a number or a time. ``context_tokens`` cuts prompts
    that no instance could take, so that a trace of a larger model can be used."""
    for arrival in islice(arrivals, requests_max):
        at_s = arrival.at_s / speed
        if duration_s is not None and at_s > duration_s:
            return
        prompt = arrival.prompt_tokens
        if context_tokens is not None:
            prompt = min(prompt, context_tokens - 1)
        if at_s != arrival.at_s or prompt != arrival.prompt_tokens:
            arrival = replace(arrival, at_s=at_s, prompt_tokens=prompt)
        yield arrival


def _gap(random: Random, rate_per_s: float, cv: float) -> float:
    if cv == 0.0:
        return 1.0 / rate_per_s
    if cv == 1.0:
        return random.expovariate(rate_per_s)
    shape = 1.0 / (cv * cv)
    return random.gammavariate(shape, 1.0 / (rate_per_s * shape))


def _edges(weights: list[float]) -> list[float]:
    """Upper edges of the parts of 0 to 1; the last is open, so that rounding loses nothing."""
    total = sum(weights)
    return [edge / total for edge in accumulate(weights)][:-1]
