"""What the texts of options mean. A wrong one is a :class:`UsageError` that names it."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from pathlib import Path

from scheduler_svc.domain.model import PriorityClass
from scheduler_svc.simulation.arrivals import Trace
from scheduler_svc.simulation.kinds import GpuKind
from scheduler_svc.simulation.record import SLOS, Slo


class UsageError(ValueError):
    """Says which option is wrong and what it may be."""


def weights(option: str, text: str) -> dict[str, float]:
    """``a=1,b=2`` as numbers by name."""
    found: dict[str, float] = {}
    for part in text.split(","):
        name, equals, number = part.strip().partition("=")
        try:
            found[name] = float(number)
        except ValueError:
            raise UsageError(f"{option}: {part!r} is not NAME=NUMBER") from None
        if not (name and equals and 0.0 <= found[name] < inf):
            raise UsageError(f"{option}: {part!r} is not NAME=NUMBER")
    if not sum(found.values()) > 0.0:
        raise UsageError(f"{option}: at least one number must be above 0")
    return found


def priority_class(name: str) -> PriorityClass:
    try:
        return PriorityClass[name.upper()]
    except KeyError:
        names = ", ".join(cls.name.lower() for cls in PriorityClass)
        raise UsageError(f"{name!r} is not a class: {names}") from None


def tenant_weights(text: str) -> dict[str, float]:
    if text.isdecimal() and int(text) > 0:
        return {f"tenant-{number}": 1.0 for number in range(int(text))}
    return weights("--tenants", text)


def fleet_counts(text: str, known: dict[str, GpuKind], *, plan: bool) -> list[tuple[GpuKind, int]]:
    counts: list[tuple[GpuKind, int]] = []
    for part in text.split(","):
        name, equals, number = part.strip().partition("=")
        if name not in known:
            raise UsageError(f"--fleet: {name!r} is not a kind: {', '.join(known)}")
        if plan and equals:
            raise UsageError(f"--fleet: {part!r}: --plan finds the counts; name the kind alone")
        if plan:
            number = "1"
        if not number.isdecimal():
            raise UsageError(f"--fleet: {part!r} is not KIND=COUNT")
        counts.append((known[name], int(number)))
    if not any(count for _, count in counts):
        raise UsageError("--fleet: at least one instance is needed")
    if len({kind.name for kind, _ in counts}) < len(counts):
        raise UsageError("--fleet: a kind is named twice")
    if plan and len(counts) > 2:
        raise UsageError("--plan: one kind or two")
    return counts


def class_slos(texts: Sequence[str]) -> dict[PriorityClass, Slo]:
    slos = dict(SLOS)
    for text in texts:
        name, _, limits = text.partition("=")
        ttft, _, tpot = limits.partition(":")
        cls = priority_class(name)
        try:
            if tpot.endswith("ms"):
                slos[cls] = Slo(float(ttft), tpot_s=float(tpot.removesuffix("ms")) / 1_000.0)
            else:
                slos[cls] = Slo(float(ttft), float(tpot) if tpot else inf)
        except ValueError:
            raise UsageError(
                f"--slo: {text!r} is not CLASS=TTFT_S:TPOT_FACTOR or CLASS=TTFT_S:TPOTms"
            ) from None
    return slos


def class_goals(texts: Sequence[str]) -> dict[PriorityClass, float]:
    goals: dict[PriorityClass, float] = {}
    for text in texts:
        for name, share in weights("--goal", text).items():
            if share > 1.0:
                raise UsageError("--goal: a share is between 0 and 1")
            goals[priority_class(name)] = share
    return goals


def trace_form(trace: Path) -> Trace:
    if trace.is_dir():
        return Trace.SERVEGEN
    if trace.suffix == ".jsonl":
        return Trace.MOONCAKE
    if trace.suffix == ".csv":
        return Trace.AZURE
    raise UsageError(f"{trace}: say its form with --format")
