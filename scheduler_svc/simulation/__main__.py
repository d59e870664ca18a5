"""The command line of the simulation: `sluice simulate`, or `python -m scheduler_svc.simulation`.

Options become a load, a fleet and a seed; everything else is done by ``run``, ``report``, ``plot``
and ``plan``. Exit status: 0 done; 1 a plan that no fleet fulfils, or a file that cannot be read; 2
wrong use.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from scheduler_svc.domain.placement import POLICIES
from scheduler_svc.simulation import arrivals as sources
from scheduler_svc.simulation import option_texts as texts
from scheduler_svc.simulation.arrivals import Arrival, Lengths, Mix, Trace
from scheduler_svc.simulation.kinds import GpuKind, load_kinds
from scheduler_svc.simulation.plan import Goals, Planner, Trial, plan_table, simulate_fleet
from scheduler_svc.simulation.report import make_report, show
from scheduler_svc.simulation.run import DEFAULT_POLICY, Options, Simulation

REQUESTS = 20_000
SIGMA = 0.8
TABLE_COLUMNS_MIN = 150  # of a table that is not written to a terminal
EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command(name="simulate")
def simulate(
    trace: Annotated[
        Path | None,
        typer.Argument(
            help="Trace: an Azure LLM CSV, a Mooncake JSONL, or a folder of ServeGen windows."
            " Default: a generated mix."
        ),
    ] = None,
    form: Annotated[
        Trace | None, typer.Option("--format", help="Form of the trace. Default: by its name.")
    ] = None,
    rate: Annotated[
        float, typer.Option(help="Generated mix: requests/s.", min=0.001, max=1e6)
    ] = 20.0,
    burst: Annotated[
        float,
        typer.Option(help="Generated mix: coefficient of variation; 1 Poisson.", min=0, max=20),
    ] = 1.0,
    prompt_tokens: Annotated[
        int, typer.Option(help="Median prompt where no trace says it.", min=1)
    ] = 1_000,
    output_tokens: Annotated[
        int, typer.Option(help="Median output where no trace says it.", min=1)
    ] = 130,
    classes: Annotated[
        str, typer.Option(help="Weights of classes.")
    ] = "critical=1,interactive=5,standard=2,batch=2",
    tenants: Annotated[
        str, typer.Option(help="Weights of tenants, as a=1,b=10; or how many equal ones.")
    ] = "4",
    requests: Annotated[
        int | None,
        typer.Option(help=f"Most requests. Default: {REQUESTS} generated, or all.", min=1),
    ] = None,
    duration: Annotated[
        float | None, typer.Option(help="Longest time in which requests come, in s.", min=0.001)
    ] = None,
    speed: Annotated[
        float, typer.Option(help="The trace so many times as fast.", min=1e-6, max=1e6)
    ] = 1.0,
    fleet: Annotated[
        str,
        typer.Option(
            help="Instances of each kind, as default=8,small=2; with --plan the kinds alone."
            " Default: default=4; with --plan: default."
        ),
    ] = "",
    kinds: Annotated[Path | None, typer.Option(help="TOML file with further kinds of GPU.")] = None,
    slo: Annotated[
        list[str] | None,
        typer.Option(help="CLASS=TTFT_S:TPOT_FACTOR, or a TPOT as in 2:30ms; may be repeated."),
    ] = None,
    policy: Annotated[
        str, typer.Option(help=f"Placement: {', '.join(sorted(POLICIES))}.")
    ] = DEFAULT_POLICY,
    prefix_cache: Annotated[
        bool, typer.Option(help="Simulate prefix caches (Mooncake traces).")
    ] = True,
    progress: Annotated[
        bool, typer.Option(help="Instances report output while it is written.")
    ] = True,
    seed: Annotated[int, typer.Option(help="Of everything that is drawn.")] = 1,
    plan: Annotated[
        bool,
        typer.Option(help="Search the cheapest fleet of one or two kinds (--fleet default,small)."),
    ] = False,
    goal: Annotated[
        list[str] | None,
        typer.Option(help="Plan: CLASS=SHARE that must meet its SLO. Default: interactive=0.99."),
    ] = None,
    instances_max: Annotated[
        int, typer.Option(help="Plan: most instances of a kind.", min=1, max=4_096)
    ] = 256,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Write a picture (PNG).")] = None,
) -> None:
    """Simulate a fleet behind the real scheduler, in virtual time; or plan one (--plan)."""
    if policy not in POLICIES:
        raise texts.UsageError(f"--policy: {policy!r} is not one of {', '.join(sorted(POLICIES))}")
    known = load_kinds(kinds)
    mix = Mix(
        classes={
            texts.priority_class(name): weight
            for name, weight in texts.weights("--classes", classes).items()
        },
        tenants=texts.tenant_weights(tenants),
        prompts=Lengths(float(prompt_tokens), SIGMA, 7 * prompt_tokens),
        outputs=Lengths(float(output_tokens), SIGMA, 8 * output_tokens),
    )
    fleet = fleet or ("default" if plan else "default=4")
    counts = texts.fleet_counts(fleet, known, plan=plan)
    form = form or (None if trace is None else texts.trace_form(trace))

    def come() -> Iterator[Arrival]:
        if trace is None or form is None:
            made = sources.generated(mix, rate, burst, seed)
        else:
            made = sources.READERS[form](trace, mix, seed)
        most = REQUESTS if trace is None and requests is None and duration is None else requests
        return sources.scaled(made, speed=speed, requests_max=most, duration_s=duration)

    cached = prefix_cache and form is Trace.MOONCAKE
    options = Options(
        fleet=counts,
        seed=seed,
        policy=policy,
        slos=texts.class_slos(slo or []),
        progress=progress,
        prefix_block_tokens=sources.MOONCAKE_BLOCK_TOKENS if cached else 0,
    )
    if plan:
        if plot is not None:
            raise texts.UsageError(
                "--plot: a plan has no picture; simulate the fleet that it finds"
            )
        goals = texts.class_goals(goal or ["interactive=0.99"])
        _plan([kind for kind, _ in counts], goals, options, come, instances_max, as_json)
        return
    outcomes = Simulation(options).run(come())
    if not outcomes.recorder.groups:
        raise texts.UsageError("no request came")
    if plot is not None:
        from scheduler_svc.simulation.plot import plot as draw  # brings matplotlib

        draw(outcomes, plot)
    report = make_report(outcomes)
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        show(report, _console())


def _plan(
    kinds: Sequence[GpuKind],
    goals: Goals,
    options: Options,
    come: Callable[[], Iterator[Arrival]],
    instances_max: int,
    as_json: bool,
) -> None:
    planner = Planner(kinds, goals, simulate_fleet(options, kinds, come), instances_max)
    best = planner.search()
    if as_json:
        found = {
            "best": None if best is None else _trial(kinds, best),
            "trials": [_trial(kinds, trial) for trial in planner.trials],
        }
        typer.echo(json.dumps(found, indent=2))
    else:
        console = _console()
        console.print(plan_table(kinds, goals, planner.trials))
        if best is None:
            console.print(f"no fleet of up to {instances_max} instances of a kind reaches the goal")
        else:
            console.print(
                f"cheapest of {len(planner.trials)} fleets tried: {_names(kinds, best)},"
                f" {best.price_per_hour:.2f} per hour"
            )
    if best is None:
        raise typer.Exit(EXIT_FAILED)


def _trial(kinds: Sequence[GpuKind], trial: Trial) -> dict[str, object]:
    return {
        "fleet": {kind.name: n for kind, n in zip(kinds, trial.counts, strict=True)},
        "price_per_hour": trial.price_per_hour,
        "attained": {cls.name.lower(): share for cls, share in trial.attained.items()},
        "busy": trial.busy,
        "reached": trial.reached,
    }


def _names(kinds: Sequence[GpuKind], trial: Trial) -> str:
    pairs = zip(kinds, trial.counts, strict=True)
    return ", ".join(f"{count} x {kind.name}" for kind, count in pairs if count)


def _console() -> Console:
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = max(console.width, TABLE_COLUMNS_MIN)
    return console


def main() -> None:
    """The entry point; ends the process."""
    sys.exit(_status())


def _status() -> int:
    try:
        status = app(prog_name="sluice simulate", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED
    except texts.UsageError as error:
        return _fail(str(error), EXIT_USAGE)
    except ValueError as error:
        return _fail(str(error), EXIT_FAILED)
    except OSError as error:
        return _fail(f"{error.filename}: {error.strerror}", EXIT_FAILED)
    except Exception as error:
        # Of the command-line library, which words wrong usage well; its class is not public.
        words = getattr(error, "format_message", None)
        if words is None:
            raise
        return _fail(words(), EXIT_USAGE)
    return status if isinstance(status, int) else 0


def _fail(text: str, status: int) -> int:
    typer.echo(f"error: {text}", err=True)
    return status


if __name__ == "__main__":
    main()
