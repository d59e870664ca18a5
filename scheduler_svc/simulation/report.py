"""What a simulation found: one value, as JSON and as a table.

Definitions. TTFT: from arrival to the first token. TPOT: from the first token to the end, by
output tokens less one. SLO: see ``record.SLOS``; attainment counts every request that was offered,
refused ones too. Goodput: output tokens of requests that met their SLO. Rates are over the whole
time, until the last request ended; utilisation is over the time in which requests came.
Jain's index of x is (sum x)^2 / (n * sum x^2): 1 is even, 1/n is one tenant alone. It is given for
what tenants got, in tokens, and for what they got of what they asked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TypedDict

import numpy as np
from rich.console import Console
from rich.table import Table

from scheduler_svc.domain.model import Outcome, PriorityClass
from scheduler_svc.simulation.record import Group
from scheduler_svc.simulation.run import EngineUse, Outcomes

TENANTS_SHOWN = 20


class Spread(TypedDict):
    """Of a set of times, in seconds."""

    mean: float
    p50: float
    p90: float
    p99: float


class Row(TypedDict):
    """Requests of a class, of a tenant, or all."""

    offered: int
    finished: int
    outcomes: dict[str, int]
    slo_attainment: float
    output_tokens_per_s: float
    goodput_tokens_per_s: float
    ttft_s: Spread | None
    tpot_s: Spread | None


class FleetRow(TypedDict):
    """All instances of a kind. ``busy``: share of time in steps; ``filled``: share of batches."""

    kind: str
    instances: int
    busy: float
    filled: float
    preemptions: int
    price_per_hour: float


class Cost(TypedDict):
    """In the currency of the kinds' prices; per million tokens, None without any."""

    total: float
    per_million_output_tokens: float | None
    per_million_goodput_tokens: float | None


class Report(TypedDict):
    """Everything; this is what ``--json`` prints."""

    seed: int
    load_s: float
    duration_s: float
    offered_tokens_per_s: float
    prompt_tokens_per_s: float
    totals: Row
    classes: dict[str, Row]
    tenants: dict[str, Row]
    fleet: list[FleetRow]
    prefix_hit_rate: float | None
    jain_tokens: float
    jain_share: float
    cost: Cost
    events: int
    event_hash: str


def make_report(outcomes: Outcomes) -> Report:
    """The report of a finished simulation."""
    recorder = outcomes.recorder
    duration_s = max(outcomes.duration_s, 1e-9)
    load_s = max(outcomes.load_s, 1e-9)
    groups = recorder.groups
    tenants = sorted({tenant for _, tenant in groups})
    totals = _row(groups.values(), duration_s)
    by_tenant = [list(recorder.of_tenant(tenant)) for tenant in tenants]
    served = [sum(group.served_tokens for group in of) for of in by_tenant]
    asked = [sum(group.offered_tokens for group in of) for of in by_tenant]
    looked = sum(use.looked_tokens for use in outcomes.uses)
    return Report(
        seed=outcomes.options.seed,
        load_s=outcomes.load_s,
        duration_s=outcomes.duration_s,
        offered_tokens_per_s=sum(asked) / load_s,
        prompt_tokens_per_s=sum(group.prompt_tokens for group in groups.values()) / duration_s,
        totals=totals,
        classes={
            cls.name.lower(): _row(recorder.of_class(cls), duration_s)
            for cls in PriorityClass
            if any(True for _ in recorder.of_class(cls))
        },
        tenants={
            tenant: _row(of, duration_s) for tenant, of in zip(tenants, by_tenant, strict=True)
        },
        fleet=_fleet(outcomes),
        prefix_hit_rate=sum(use.hit_tokens for use in outcomes.uses) / looked if looked else None,
        jain_tokens=jain(served),
        jain_share=jain([got / want for got, want in zip(served, asked, strict=True)]),
        cost=_cost(outcomes, duration_s),
        events=recorder.events,
        event_hash=recorder.event_hash,
    )


def jain(shares: Sequence[float]) -> float:
    """Jain's fairness index; 1 when there is nothing to divide."""
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else 1.0


def _row(of: Iterable[Group], duration_s: float) -> Row:
    groups = list(of)
    offered = sum(group.offered for group in groups)
    outcomes: Counter[Outcome] = Counter()
    for group in groups:
        outcomes.update(group.outcomes)
    return Row(
        offered=offered,
        finished=outcomes[Outcome.FINISHED],
        outcomes={outcome.value: outcomes[outcome] for outcome in Outcome if outcomes[outcome]},
        slo_attainment=sum(group.met for group in groups) / offered if offered else 1.0,
        output_tokens_per_s=sum(group.served_tokens for group in groups) / duration_s,
        goodput_tokens_per_s=sum(group.goodput_tokens for group in groups) / duration_s,
        ttft_s=_spread([np.frombuffer(group.ttft_s) for group in groups if group.ttft_s]),
        tpot_s=_spread([np.frombuffer(group.tpot_s) for group in groups if group.tpot_s]),
    )


def _spread(parts: list[np.ndarray[tuple[int], np.dtype[np.float64]]]) -> Spread | None:
    if not parts:
        return None
    times = np.concatenate(parts)
    p50, p90, p99 = np.percentile(times, (50, 90, 99))
    return Spread(mean=float(times.mean()), p50=float(p50), p90=float(p90), p99=float(p99))


def _fleet(outcomes: Outcomes) -> list[FleetRow]:
    rows = []
    for kind, count in outcomes.options.fleet:
        uses: list[EngineUse] = [use for use in outcomes.uses if use.kind == kind.name]
        if count:
            rows.append(
                FleetRow(
                    kind=kind.name,
                    instances=count,
                    busy=sum(use.busy for use in uses) / count,
                    filled=sum(use.filled for use in uses) / count,
                    preemptions=sum(use.preemptions for use in uses),
                    price_per_hour=kind.price_per_hour,
                )
            )
    return rows


def _cost(outcomes: Outcomes, duration_s: float) -> Cost:
    hours = duration_s / 3_600.0
    total = sum(kind.price_per_hour * count for kind, count in outcomes.options.fleet) * hours
    groups = outcomes.recorder.groups.values()
    served = sum(group.served_tokens for group in groups)
    good = sum(group.goodput_tokens for group in groups)
    return Cost(
        total=total,
        per_million_output_tokens=total / served * 1e6 if served else None,
        per_million_goodput_tokens=total / good * 1e6 if good else None,
    )


# --- the table -----------------------------------------------------------------------------------


def show(report: Report, console: Console) -> None:
    """Prints the report for people."""
    fleet = ", ".join(f"{row['instances']} x {row['kind']}" for row in report["fleet"])
    console.print(
        f"{report['totals']['offered']} requests in {report['load_s']:.1f} s on {fleet};"
        f" the last ended at {report['duration_s']:.1f} s. SIMULATED: no engine ran."
    )
    console.print(_rows_table("class", report["classes"] | {"all": report["totals"]}))
    tenants = dict(list(report["tenants"].items())[:TENANTS_SHOWN])
    if len(tenants) > 1:
        console.print(_rows_table("tenant", tenants))
    if len(report["tenants"]) > TENANTS_SHOWN:
        console.print(f"... {len(report['tenants']) - TENANTS_SHOWN} more tenants with --json")
    console.print(_fleet_table(report["fleet"]))
    for line in _lines(report):
        console.print(line)


def _rows_table(title: str, rows: dict[str, Row]) -> Table:
    table = Table(title=None, box=None, pad_edge=False)
    table.add_column(title)
    for name in ("offered", "finished", "SLO met", "goodput", "output"):
        table.add_column(name, justify="right")
    for name in ("TTFT p50", "p90", "p99", "TPOT p50", "p99"):
        table.add_column(name, justify="right")
    table.add_column("not finished")
    for name, row in rows.items():
        ttft, tpot = row["ttft_s"], row["tpot_s"]
        refused = [f"{key} {n}" for key, n in row["outcomes"].items() if key != "finished"]
        table.add_row(
            name,
            str(row["offered"]),
            str(row["finished"]),
            f"{row['slo_attainment']:.2%}",
            f"{row['goodput_tokens_per_s']:.0f}/s",
            f"{row['output_tokens_per_s']:.0f}/s",
            *([_time(ttft["p50"]), _time(ttft["p90"]), _time(ttft["p99"])] if ttft else ["-"] * 3),
            *([_time(tpot["p50"]), _time(tpot["p99"])] if tpot else ["-"] * 2),
            ", ".join(refused) or "-",
        )
    return table


def _fleet_table(rows: list[FleetRow]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("kind")
    for name in ("instances", "busy", "batch filled", "preemptions", "price/h each"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row["kind"],
            str(row["instances"]),
            f"{row['busy']:.1%}",
            f"{row['filled']:.1%}",
            str(row["preemptions"]),
            f"{row['price_per_hour']:.2f}",
        )
    return table


def _lines(report: Report) -> list[str]:
    cost = report["cost"]
    spent = _per_million("output", cost["per_million_output_tokens"])
    spent += _per_million("goodput", cost["per_million_goodput_tokens"])
    by_tokens, by_share = report["jain_tokens"], report["jain_share"]
    lines = [
        f"fairness between tenants (Jain): {by_tokens:.3f} by tokens, {by_share:.3f} by share",
        f"cost: {cost['total']:.2f}{spent}",
    ]
    if report["prefix_hit_rate"] is not None:
        lines.append(f"prefix cache: {report['prefix_hit_rate']:.1%} of looked-up tokens found")
    lines.append(f"events: {report['events']}, hash {report['event_hash']}")
    return lines


def _per_million(what: str, cost: float | None) -> str:
    return "" if cost is None else f", {cost:.3f} per million {what} tokens"


def _time(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 10.0 else f"{seconds:.1f} s"
