"""What the rows of ``make bench-overload`` say. Pure.

Goodput: output tokens a second of requests that ended inside the measured time and met their
class's SLO. Attainment: the share of a class's requests that met it, of those that arrived early
enough to be decided before the run ends. A request that was refused, given up or failed met
nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bench.harness import quantile
from bench.overload_client import FINISHED, REFUSED, Row
from bench.overload_profile import Profile
from scheduler_svc.domain.model import PriorityClass
from scheduler_svc.simulation.report import jain

# The last part of the measured time: what arrives in it may not have ended when the run does.
LATE_SHARE = 0.15


@dataclass(frozen=True)
class Run:
    """One load on one subject: rows, and the measured time between warm-up and last arrival."""

    rows: Sequence[Row]
    from_s: float
    to_s: float
    cpu_share: float = 0.0  # of one core, the subject's processes
    client_share: float = 0.0  # of one core, the client's

    @property
    def measured(self) -> list[Row]:
        """Requests that arrived in the measured time."""
        return [row for row in self.rows if self.from_s <= row.at_s < self.to_s]


def met(row: Row, profile: Profile) -> bool:
    """Whether a request met its class's SLO."""
    if row.outcome != FINISHED:
        return False
    slo = profile.classes[PriorityClass(row.priority_class)].slo
    if row.first_s - row.at_s > slo.ttft_s:
        return False
    return tpot_s(row) <= slo.tpot_factor * profile.kind.unloaded_tpot_s


def tpot_s(row: Row) -> float:
    """Time per output token after the first; 0 for one token."""
    return (row.end_s - row.first_s) / (row.tokens - 1) if row.tokens > 1 else 0.0


def goodput(run: Run, profile: Profile) -> float:
    """Tokens a second of requests that ended in the measured time and met their SLO."""
    ended = (row for row in run.rows if run.from_s <= row.end_s < run.to_s)
    return sum(row.tokens for row in ended if met(row, profile)) / (run.to_s - run.from_s)


def attainment(run: Run, profile: Profile, cls: PriorityClass) -> float:
    """Share of a class's decided requests that met their SLO; 1 when there are none."""
    decided = _decided(run, profile, cls)
    return sum(met(row, profile) for row in decided) / len(decided) if decided else 1.0


def fairness(run: Run, profile: Profile) -> float:
    """Jain's index of the tenants' goodput, equal tenants asking for equal parts."""
    ended = [row for row in run.rows if run.from_s <= row.end_s < run.to_s]
    return jain([_good_tokens(_of(ended, tenant), profile) for tenant in profile.tenants])


def neighbours_cost(alone: Run, noisy: Run, profile: Profile) -> float:
    """Part of their goodput that the others lose by the noisy tenant (the first): the same
    requests without and with it, those that arrived early enough to end in the run."""
    others = profile.tenants[1:]
    tokens = []
    for run in (alone, noisy):
        last_s = run.to_s - LATE_SHARE * (run.to_s - run.from_s)
        decided = [row for row in run.measured if row.at_s < last_s]
        tokens.append(sum(_good_tokens(_of(decided, tenant), profile) for tenant in others))
    return 1.0 - tokens[1] / tokens[0] if tokens[0] else 0.0


def class_figures(run: Run, profile: Profile) -> dict[str, float]:
    """Every figure of one run, names with units."""
    found = {
        "goodput_tokens_per_s": goodput(run, profile),
        "jain": fairness(run, profile),
        "offered": len(run.measured),
        "cpu_share": run.cpu_share,
        "client_cpu_share": run.client_share,
        "late_ms_p99": quantile([row.late_s * 1_000.0 for row in run.rows], 0.99),
    }
    outcomes = Counter(row.outcome for row in run.measured)
    found |= {f"{outcome}_count": outcomes[outcome] for outcome in sorted(outcomes)}
    reasons = Counter(row.reason for row in run.measured if row.reason)
    found |= {f"reason_{reason.lower()}": reasons[reason] for reason in sorted(reasons)}
    for cls in profile.classes:
        name = cls.name.lower()
        found[f"{name}_slo"] = attainment(run, profile, cls)
        rows = _decided(run, profile, cls)
        served = [row for row in rows if row.first_s]
        # A request without a first token waited at least as long as it was there.
        waits = [(row.first_s or row.end_s) - row.at_s for row in rows if row.outcome != REFUSED]
        found[f"{name}_refused"] = sum(row.outcome == REFUSED for row in rows)
        found[f"{name}_count"] = len(rows)
        if waits:
            found[f"{name}_ttft_ms_p50"] = quantile(waits, 0.5) * 1_000.0
            found[f"{name}_ttft_ms_p99"] = quantile(waits, 0.99) * 1_000.0
        finished = [tpot_s(row) for row in served if row.outcome == FINISHED]
        if finished:
            unloaded_s = profile.kind.unloaded_tpot_s
            found[f"{name}_tpot_factor_p99"] = quantile(finished, 0.99) / unloaded_s
    return found


def headline(rates: dict[float, Run], noisy: Run, profile: Profile) -> dict[str, float]:
    """The figures that are promised: at 2x, at 4x, and beside a noisy neighbour."""
    by_rate = {rate: goodput(run, profile) for rate, run in rates.items()}
    overloaded = [run for rate, run in rates.items() if rate > 1.0]
    found = {
        "jain_index": min((fairness(run, profile) for run in overloaded), default=1.0),
        "noisy_neighbour_cost": neighbours_cost(rates[min(rates)], noisy, profile),
    }
    if 4.0 in rates:
        found["goodput_ratio_4x"] = by_rate[4.0] / max(by_rate.values())
        found["goodput_tokens_per_s_4x"] = by_rate[4.0]
    if 2.0 in rates:
        critical = class_figures(rates[2.0], profile)
        found["critical_slo_2x"] = critical["critical_slo"]
        found["critical_ttft_ms_p99_2x"] = critical.get("critical_ttft_ms_p99", 0.0)
        found["refused_2x"] = critical.get("refused_count", 0)
    return found


def _decided(run: Run, profile: Profile, cls: PriorityClass) -> list[Row]:
    """Requests of a class that the run is long enough for, whatever becomes of them: their SLO's
    longest wait is over before the end."""
    wait_s = profile.classes[cls].slo.ttft_s
    last_s = run.to_s - min(wait_s if wait_s < 1e6 else 0.0, (run.to_s - run.from_s) / 2)
    return [row for row in run.measured if row.priority_class == cls and row.at_s < last_s]


def _of(rows: Iterable[Row], tenant: str) -> list[Row]:
    return [row for row in rows if row.tenant == tenant]


def _good_tokens(rows: Iterable[Row], profile: Profile) -> int:
    return sum(row.tokens for row in rows if met(row, profile))
