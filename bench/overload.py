"""``make bench-overload``: more work than the engines can do, ours beside public gateways.

Open loop: the arrivals of ``bench/profiles/overload.toml`` are fixed in advance, the same for every
subject, and nobody who is refused asks again. Subjects: our mesh before four simulated instances,
and vllm-router and smg before four OpenAI-shaped fronts of the same simulated engine
(``bench/openai_engine.py``). All are up at the same time and take each load in turn; client,
engines and gateways share the machine's cores, and what limits them is the engines' slots.

Every subject is told what it can be told: ours the classes' SLOs as first-token limits and
guaranteed shares, and each tenant's key; smg the same as priorities, reservations and queue
timeouts of its priority scheduler; vllm-router the number of slots, and one queue timeout.

Keys: ``goodput_ratio_4x`` (goodput at 4 times capacity over the best of all rates),
``critical_slo_2x``, ``jain_index`` (the worse of those above capacity), ``noisy_neighbour_cost``
(one tenant at ``noisy_share`` times its share, the others at half of theirs, against the same
requests without it), the same with each peer's name before them, every run's figures, and
``engine_busy_ratio``: tokens/s of one instance under a full queue through the mesh over the same
instance driven directly over frames.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from bench.harness import ROOT, Mesh, mesh, quantile, table, write_results
from bench.mesh import otlp_sink
from bench.overload_client import Ask, Row
from bench.overload_figures import Run, class_figures, goodput, headline
from bench.overload_profile import PROFILE, Profile, class_settings, read_profile
from bench.peer_gateways import Gateway, Running, figures, gateway, process, version
from bench.peers import leave_by_signal
from scheduler_svc.domain.model import PriorityClass

BUDGET_S = 900
SETTLE_S = 1.5  # engines hear of clients that left
PORT_OFFSET = 8000
BUSY_TOKENS = 96


@dataclass(frozen=True)
class Times:
    """Seconds of each load: before what is measured, measured, and after the last arrival, when
    what is open is given up; and of the engine under a full queue, measured."""

    warmup_s: float = 6.0
    measured_s: float = 24.0
    tail_s: float = 7.0
    busy_s: float = 10.0

    @property
    def load_s(self) -> float:
        """From the first arrival to the last."""
        return self.warmup_s + self.measured_s


QUICK = Times(1.5, 4.0, 2.5, 2.0)
QUICK_RATES = (2.0,)


@dataclass(frozen=True)
class Subject:
    """Something that takes the load."""

    name: str  # in the results' keys; ours has no prefix
    title: str
    protocol: str
    target: str
    cpu_s: Callable[[], dict[str, float]]
    keys: Path | None = None

    @property
    def prefix(self) -> str:
        """Of its keys in the results."""
        return f"{self.name}_" if self.name else ""


def peers(profile: Profile, scratch: Path) -> list[Gateway]:
    """The public gateways, told what they can be told of the profile."""
    slots = profile.instances * profile.kind.sequences_max
    order = list(profile.classes)
    names = ("system", "interactive", "default", "bulk")
    lines = ["classes:"]
    for cls, name in zip(order, names, strict=True):
        load = profile.classes[cls]
        lines += [
            f"  {name}:",
            f"    reserved_floor: {int(slots * load.reserved)}",
            "    reserved_per_slot: 0.0",
            "    queue_size: 10000",
            f"    queue_timeout_secs: {max(1, int(load.limit_s))}",
            f"    starvation_threshold_secs: {max(1, int(load.client_s))}",
            f"    can_preempt: {'true' if cls is PriorityClass.CRITICAL else 'false'}",
        ]
    config = scratch / "smg-priorities.yaml"
    config.write_text("\n".join(lines) + "\n")
    queue_s = max(1, int(profile.classes[PriorityClass.INTERACTIVE].limit_s))
    limits = ("--max-concurrent-requests", str(slots))
    return [
        Gateway(
            "vllm_router",
            "vllm-router",
            ("vllm_router.launch_router",),
            (*limits, "--queue-size", "10000", "--queue-timeout-secs", str(queue_s)),
            policy="power_of_two",
        ),
        Gateway(
            "smg",
            "smg",
            ("smg", "launch"),
            (
                *(*limits, "--shutdown-grace-period-secs", "1", "--trust-tenant-header"),
                *("--priority-scheduler-enabled", "--priority-scheduler-config", str(config)),
                *("--priority-scheduler-default-max-class", "system"),
                *("--power-of-two-load-metric", "least_requests"),
            ),
            policy="power_of_two",
            # Its scheduler counts slots by engine, and an engine that says nothing as 64.
            labels=(("max_running_requests", str(profile.kind.sequences_max)),),
        ),
    ]


@contextmanager
def engines(profile: Profile, path: Path, scratch: Path) -> Iterator[list[Running]]:
    """The OpenAI-shaped fronts of the simulated engine, one process each."""
    with ExitStack() as stack:
        running = []
        for number in range(profile.instances):
            command = [sys.executable, "-m", "bench.openai_engine", "--profile", str(path)]
            log = scratch / f"engine-{number}.log"
            child = stack.enter_context(process(command, log, piped=True))
            assert child.stdout is not None
            port = json.loads(child.stdout.readline())["port"]
            running.append(Running(f"127.0.0.1:{port}", child.pid))
        yield running


def mesh_config(profile: Profile) -> str:
    """Our configuration for a profile: every setting that is not here at its default."""
    lines = ["[mesh]", "trace_sample_ratio = 0.01", "", "[scheduler]"]
    lines += [f"{name} = {value}" for name, value in class_settings(profile).items()]
    for number in range(profile.instances):
        lines += [
            "",
            "[[instance]]",
            f'name = "sim-{number}"',
            f'address = "127.0.0.1:{50081 + number}"',
            'engine = "simulated"',
            'model = "simulated"',
            "",
            "[instance.simulated]",
            *(f"{name} = {value}" for name, value in profile.engine.items()),
        ]
    return "\n".join(lines) + "\n"


@contextmanager
def our_mesh(profile: Profile, scratch: Path, port_offset: int) -> Iterator[tuple[Mesh, Path]]:
    """The mesh with a key for each tenant; yields it and the file with the keys."""
    config = scratch / "overload.toml"
    config.write_text(mesh_config(profile))
    runtime = scratch / "run"
    with otlp_sink() as endpoint:
        environ = {"SLUICE_MESH_OTLP_ENDPOINT": endpoint}
        with mesh(runtime, config=config, port_offset=port_offset, environ=environ) as running:
            env = {
                **os.environ,
                "SLUICE_CONFIG": str(config),
                "SLUICE_MESH_RUNTIME_DIR": str(runtime),
                "SLUICE_LOCAL_PORT_OFFSET": str(port_offset),
            }
            keys = {}
            for tenant in profile.tenants:
                command = [sys.executable, "-m", "sluice.command.cli", "tenants", "add", tenant]
                subprocess.run(command, env=env, cwd=ROOT, check=True, capture_output=True)
                keys[tenant] = (runtime / f"api-key-{tenant}").read_text().strip()
            file = scratch / "keys.json"
            file.write_text(json.dumps(keys))
            time.sleep(3.0)  # the scheduler reads its tenants every 2 s
            yield running, file


def send(
    subject: Subject, profile: Profile, rates: Mapping[str, float], times: Times, scratch: Path
) -> Run:
    """Sends the arrivals of tenants' rates (requests/s)."""
    arrivals, out = scratch / "arrivals.jsonl", scratch / "rows.jsonl"
    until_s = times.load_s + times.tail_s
    with arrivals.open("w") as file:
        for one in profile.arrivals(rates, times.load_s):
            client_s = profile.classes[one.priority_class].client_s
            ask = Ask(
                one.at_s,
                one.tenant,
                int(one.priority_class),
                one.prompt_tokens,
                one.output_tokens,
                client_s,
            )
            file.write(json.dumps(ask) + "\n")
    command = [sys.executable, "-m", "bench.overload_client", "--target", subject.target]
    command += ["--protocol", subject.protocol, "--arrivals", str(arrivals), "--out", str(out)]
    command += ["--warmup", str(times.warmup_s), "--until", str(until_s)]
    if subject.keys is not None:
        command += ["--keys", str(subject.keys)]
    marks: dict[bool, dict[str, float]] = {}
    client_s = 0.0
    with process(["nice", "-n", "5", *command], scratch / "client.log", piped=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            message = json.loads(line)
            if "measuring" in message:
                marks[message["measuring"]] = subject.cpu_s()
            else:
                client_s = message["cpu_s"]
        if child.wait(30) != 0:
            raise SystemExit(f"the client failed:\n{(scratch / 'client.log').read_text()[-2000:]}")
    rows = [Row(*json.loads(line)) for line in out.read_text().splitlines()]
    used = sum(marks[False].values()) - sum(marks[True].values())
    time.sleep(SETTLE_S)
    shares = used / times.measured_s, client_s / until_s
    return Run(rows, times.warmup_s, times.load_s, *shares)


def engine_busy(running: Mesh, profile: Profile, times: Times, scratch: Path) -> dict[str, float]:
    """Output of the instances under a full queue: through the mesh, and one of them driven
    directly over frames."""
    slots = profile.kind.sequences_max
    keys = str(running.runtime / "keys")
    found = {}
    for name, arguments in (
        ("direct", ["--target", running.instance(), "--streams", str(slots)]),
        ("mesh", ["--target", running.envoy, "--streams", str(2 * slots * profile.instances)]),
    ):
        command = [sys.executable, "-m", "bench.load", *arguments, "--key", running.key]
        command += ["--tokens", str(BUSY_TOKENS), "--seconds", str(times.busy_s)]
        command += ["--warmup", str(min(4.0, times.busy_s))]
        if name == "direct":
            command += ["--direct", "sim-0", "--keys", keys]
        with process(["nice", "-n", "5", *command], scratch / "busy.log", piped=True) as child:
            assert child.stdout is not None
            tally = [json.loads(line) for line in child.stdout][-1]
            if child.wait(60) != 0:
                raise SystemExit(f"the load failed:\n{(scratch / 'busy.log').read_text()[-2000:]}")
        found[name] = figures(tally, {})["tokens_per_s"]
    most = slots / (profile.kind.decode_step_ms + profile.kind.decode_step_ms_per_sequence * slots)
    return {
        "engine_busy_ratio": found["mesh"] / (found["direct"] * profile.instances),
        "engine_direct_tokens_per_s": found["direct"],
        "engine_mesh_tokens_per_s": found["mesh"],
        "engine_direct_of_steps": found["direct"] / (most * 1_000.0),
    }


def report(
    profile: Profile,
    subjects: Sequence[Subject],
    runs: Mapping[str, dict[str, Run]],
    capacity: float,
) -> str:
    """The tables."""
    rows = [["", "load", "goodput", "SLO met: crit", "inter", "stand", "batch", "crit TTFT p99"]]
    rows[0] += ["refused", "left", "Jain", "CPU", "client"]
    for subject in subjects:
        for name, run in runs[subject.name].items():
            found = class_figures(run, profile)
            rows.append(
                [
                    subject.title,
                    name,
                    f"{found['goodput_tokens_per_s']:,.0f}",
                    *(f"{found[f'{cls.name.lower()}_slo']:.3f}" for cls in profile.classes),
                    f"{found.get('critical_ttft_ms_p99', 0.0):,.0f} ms",
                    f"{found.get('refused_count', 0):.0f}",
                    f"{found.get('left_count', 0):.0f}",
                    f"{found['jain']:.3f}",
                    f"{found['cpu_share']:.2f}",
                    f"{found['client_cpu_share']:.2f}",
                ]
            )
    return f"capacity {capacity:.1f} requests/s\n{table(rows)}"


def say(text: str) -> None:
    """One line of progress."""
    print(f"  {text}", flush=True)


def measure(
    profile: Profile, subjects: Sequence[Subject], times: Times, scratch: Path
) -> tuple[dict[str, dict[str, Run]], float]:
    """Every load on every subject in turn; loads by name: a rate, or "noisy"."""
    capacity = profile.capacity_per_s()
    loads = {f"{rate:g}x": profile.equal_rates(capacity * rate) for rate in profile.rates}
    loads["noisy"] = profile.noisy_rates(capacity)
    runs: dict[str, dict[str, Run]] = {subject.name: {} for subject in subjects}
    for name, rates in loads.items():
        for subject in subjects:
            run = runs[subject.name][name] = send(subject, profile, rates, times, scratch)
            late = quantile([row.late_s for row in run.rows], 0.99) * 1_000
            speed = goodput(run, profile)
            say(f"{name} {subject.title}: {speed:,.0f} tokens/s good, client late {late:.0f} ms")
    return runs, capacity


def results(
    profile: Profile, subjects: Sequence[Subject], runs: Mapping[str, dict[str, Run]]
) -> dict[str, float]:
    """One flat object of every figure."""
    found: dict[str, float] = {}
    for subject in subjects:
        mine = runs[subject.name]
        rates = {rate: mine[f"{rate:g}x"] for rate in profile.rates}
        for key, value in headline(rates, mine["noisy"], profile).items():
            found[f"{subject.prefix}{key}"] = value
    for subject in subjects:
        for name, run in runs[subject.name].items():
            for key, value in class_figures(run, profile).items():
                found[f"{subject.prefix}{name}_{key}"] = value
    return found


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", type=Path, default=PROFILE)
    parser.add_argument("--seconds", type=float, default=Times.measured_s, help="of each load")
    parser.add_argument(
        "--quick", action="store_true", help="a fraction of it, to see that it runs"
    )
    parser.add_argument("--without-peers", action="store_true", help="measure ours alone")
    parser.add_argument("--port-offset", type=int, default=PORT_OFFSET, help="of the mesh's ports")
    parser.add_argument("--plot", type=Path, help="write a picture (PNG)")
    parser.add_argument(
        "--peers-python", type=Path, default=Path(sys.prefix) / "peers" / "bin" / "python"
    )
    arguments = parser.parse_args()
    profile, times = read_profile(arguments.profile), Times(measured_s=arguments.seconds)
    if arguments.quick:
        profile, times = replace(profile, rates=QUICK_RATES), QUICK
    python: Path = arguments.peers_python.absolute()
    if not arguments.without_peers and not python.exists():
        raise SystemExit(f"no gateways in {python}: `make bench-overload` installs them")
    leave_by_signal(BUDGET_S)
    load_before = os.getloadavg()[0]
    subjects: list[Subject] = []
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        running, keys = stack.enter_context(our_mesh(profile, scratch, arguments.port_offset))
        subjects.append(Subject("", "sluice", "grpc", running.envoy, running.cpu_s, keys))
        if not arguments.without_peers:
            fronts = stack.enter_context(engines(profile, arguments.profile, scratch))
            targets = [front.target for front in fronts]
            for kind in peers(profile, scratch):
                title = f"{kind.package} {version(python, kind.package)}"
                peer = stack.enter_context(gateway(kind, python, targets, scratch))
                subjects.append(Subject(kind.name, title, "sse", peer.target, peer.cpu_s))
        busy = engine_busy(running, profile, times, scratch)
        say(f"engine busy: {busy['engine_busy_ratio']:.3f} of direct")
        runs, capacity = measure(profile, subjects, times, scratch)
    print(report(profile, subjects, runs, capacity))
    found = {**results(profile, subjects, runs), **busy}
    found |= {"capacity_requests_per_s": capacity, "load_average_before": load_before}
    if arguments.plot is not None:
        from bench.overload_plot import plot

        plot(profile, {one.name: one.title for one in subjects}, runs, arguments.plot)
    name = "bench-overload-quick" if arguments.quick else "bench-overload"
    print(f"written: {write_results(name, found).relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
