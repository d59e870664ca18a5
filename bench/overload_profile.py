"""The load of ``make bench-overload``: engines, classes, tenants and arrivals of a profile file.

Pure: the same file gives the same arrivals, request by request. Each tenant has a stream of its own
from the seed, so that what one asks for does not change what another does. Capacity is what the
engines of the profile serve in all when they never lack work, found with the engine model of
``sluice simulate`` in virtual time.
"""

from __future__ import annotations

import csv
import heapq
import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

from bench.harness import ROOT
from scheduler_svc.config import SchedulerConfig, class_times, domain_limits
from scheduler_svc.domain.model import PriorityClass
from scheduler_svc.simulation.arrivals import Arrival
from scheduler_svc.simulation.engine_model import EngineModel
from scheduler_svc.simulation.engine_model import Sequence as EngineSequence
from scheduler_svc.simulation.kinds import GpuKind
from scheduler_svc.simulation.record import Slo
from scheduler_svc.simulation.run import Options

PROFILE = ROOT / "bench" / "profiles" / "overload.toml"
CAPACITY_REQUESTS = 4_000
CAPACITY_QUEUE = 64  # requests that wait in each engine while its capacity is taken


@dataclass(frozen=True)
class ClassLoad:
    """``share`` of the requests; ``slo``: what it promises; ``limit_s``: what gateways are told of
    it, a little less; ``client_s``: a client leaves then; ``guaranteed``: share of our dispatches;
    ``reserved``: share of smg's slots."""

    share: float
    slo: Slo
    limit_s: float
    client_s: float
    guaranteed: float
    reserved: float


@dataclass(frozen=True)
class Profile:
    """A profile file. ``lengths``: pairs of prompt and output tokens to draw from."""

    seed: int
    instances: int
    kind: GpuKind
    engine: Mapping[str, object]  # as under [instance.simulated]
    lengths: Sequence[tuple[int, int]]
    tenants: Sequence[str]
    noisy_share: float
    rates: Sequence[float]
    classes: Mapping[PriorityClass, ClassLoad]

    def capacity_per_s(self) -> float:
        """Requests a second that all instances together serve when their queues are never empty,
        without the first and the last tenth of the time."""
        engine = EngineModel(self.kind)
        random = Random(f"{self.seed}/capacity")
        ends: list[float] = []
        now, key = 0.0, 0
        while len(ends) < CAPACITY_REQUESTS:
            while engine.waiting < CAPACITY_QUEUE:
                key += 1
                engine.start(EngineSequence(key, *self.draw_lengths(random)), now)
            now = engine.due_s
            ends += [now] * len(engine.advance(now)[1])
        first, last = len(ends) // 10, len(ends) * 9 // 10
        return self.instances * (last - first) / (ends[last] - ends[first])

    def draw_lengths(self, random: Random) -> tuple[int, int]:
        """Prompt and output tokens of one request."""
        return self.lengths[random.randrange(len(self.lengths))]

    def arrivals(self, rates_per_s: Mapping[str, float], seconds: float) -> Iterator[Arrival]:
        """Arrivals in order of time, by tenant's rate: each a Poisson process of its own."""
        streams = [self._tenant(name, rate, seconds) for name, rate in rates_per_s.items()]
        return heapq.merge(*streams, key=lambda arrival: arrival.at_s)

    def equal_rates(self, rate_per_s: float) -> dict[str, float]:
        """Every tenant's part of a rate."""
        return dict.fromkeys(self.tenants, rate_per_s / len(self.tenants))

    def noisy_rates(self, capacity_per_s: float) -> dict[str, float]:
        """The first tenant at ``noisy_share`` times its equal part of capacity, the others at half
        of theirs."""
        part = capacity_per_s / len(self.tenants)
        rates = dict.fromkeys(self.tenants, part / 2)
        rates[self.tenants[0]] = part * self.noisy_share
        return rates

    def _tenant(self, name: str, rate_per_s: float, seconds: float) -> Iterator[Arrival]:
        random = Random(f"{self.seed}/{name}")
        classes = list(self.classes)
        edges = list(accumulate(self.classes[cls].share for cls in classes))
        at_s = 0.0
        while (at_s := at_s + random.expovariate(rate_per_s)) < seconds:
            drawn = random.random() * edges[-1]
            cls = next(cls for cls, edge in zip(classes, edges, strict=True) if drawn < edge)
            yield Arrival(at_s, name, cls, *self.draw_lengths(random))


def read_profile(path: Path = PROFILE) -> Profile:
    """Reads a profile file; KeyError names what is missing."""
    document: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    engine, load = document["engine"], document["load"]
    instances = engine.pop("instances")
    return Profile(
        seed=document["seed"],
        instances=instances,
        kind=GpuKind("profile", **engine),
        engine=engine,
        lengths=_lengths(load),
        tenants=[f"tenant-{number}" for number in range(load["tenants"])],
        noisy_share=load["noisy_share"],
        rates=load["rates"],
        classes={
            PriorityClass[name.upper()]: ClassLoad(
                table["share"],
                Slo(table["ttft_s"] or math.inf, table["tpot_factor"] or math.inf),
                round(load["limit_share"] * table["ttft_s"], 3) or table["client_s"],
                table["client_s"],
                table["guaranteed"],
                table["reserved"],
            )
            for name, table in document["class"].items()
        },
    )


def class_settings(profile: Profile) -> dict[str, float]:
    """The scheduler's settings that say what the profile's classes promise: first-token limits and
    guaranteed shares."""
    found: dict[str, float] = {}
    for cls, load in profile.classes.items():
        name = cls.name.lower()
        found[f"first_token_{name}_s"] = load.limit_s
        if cls is not PriorityClass.CRITICAL:
            found[f"share_{name}"] = load.guaranteed
    return found


def scheduler_options(profile: Profile) -> Options:
    """A simulation of the profile's engines behind a scheduler with its settings."""
    settings = class_settings(profile)
    deadlines = {
        f"deadline_{cls.name.lower()}_s": load.client_s for cls, load in profile.classes.items()
    }
    config = replace(SchedulerConfig(), **settings, **deadlines)  # type: ignore[arg-type]
    return Options(
        fleet=[(profile.kind, profile.instances)],
        limits=domain_limits(config),
        times=class_times(config),
        slos={cls: load.slo for cls, load in profile.classes.items()},
    )


def _lengths(load: Mapping[str, Any]) -> list[tuple[int, int]]:
    prompt_scale, output_scale = load["prompt_scale"], load["output_scale"]
    with (ROOT / load["lengths"]).open(encoding="utf-8", newline="") as file:
        return [
            (
                max(1, round(int(row["ContextTokens"]) * prompt_scale)),
                max(load["output_tokens_min"], round(int(row["GeneratedTokens"]) * output_scale)),
            )
            for row in csv.DictReader(file)
        ]
