"""The processes of a mesh: one description for this machine and for docker compose.

Owns which processes there are, how each is started, where it serves, how its health is asked, what
it needs first and how long it may drain. The supervisor runs this description and the compose file
is rendered from it, so that the two cannot drift. Pure: everything comes from a `MeshFile` and a
`Place`.

Wiring (addresses, folders) reaches a process through its environment; policy (limits, models)
through the effective configuration file that SLUICE_CONFIG names: `sluice.toml` with engine, device
and paths resolved.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path, PurePath, PurePosixPath

from sluice import edge
from sluice.command import toml_text
from sluice.command.mark import MARK_VARIABLE, mark_of
from sluice.config import ConfigError
from sluice.edge_config import EnvoySettings
from sluice.mesh_config import PORT_MAX, Address, Device, Engine, Instance, MeshFile

GIB = 1 << 30
MIB = 1 << 20
# What a process keeps resident once it serves. vLLM on a CPU: measured with a 135 M model in
# float32, KV cache not counted; on a GPU weights and cache are in the GPU's memory.
SERVICE_MEMORY_BYTES = 100 * MIB
# Valkey with an empty data set keeps 10 MiB.
STORE_MEMORY_BYTES = 32 * MIB
VLLM_MEMORY_BYTES = 3 * GIB
# Longest drains: a scheduler lets streams in flight end, an engine closes within 30 s.
# What a process may take on top of its own limit on draining, to flush and to exit; an engine
# frees its memory within 30 s.
EXIT_S = 5.0
ENGINE_EXIT_S = 35.0
DRAIN_DEFAULT_S = 120.0
# From the ports of one scheduler or agent service to those of the next; the other services lie
# between.
PORT_STEP = 100
SCHEDULER_DEFAULT, MESH_DEFAULT = "127.0.0.1:50051", "127.0.0.1:50052"
EXECUTION_DEFAULT = "127.0.0.1:50061"
AGENT_DEFAULT = "127.0.0.1:50071"
STATE_DEFAULT = "127.0.0.1:50091"
STATE_DRAIN_DEFAULT_S = 5.0
# Where Redis's official image listens.
REDIS_PORT = 6379


class Target(StrEnum):
    """Where the mesh runs."""

    LOCAL = "local"
    COMPOSE = "compose"


class Kind(StrEnum):
    """The programs of a mesh, in the order in which they stop: nothing loses what it depends on
    while it drains. An agent service ends its step, for which it needs a scheduler.
    """

    ENVOY = "envoy"
    AGENT = "agent"
    SCHEDULER = "scheduler"
    EXECUTION = "execution"
    INFERENCE = "inference"
    STATE = "state"
    STORE = "store"

    @property
    def stop_order(self) -> int:
        """0 stops first."""
        return list(Kind).index(self)


@dataclass(frozen=True, slots=True)
class Port:
    """A port that a process listens on."""

    name: str
    address: Address


@dataclass(frozen=True, slots=True)
class Probe:
    """How to ask a process whether it serves: grpc.health.v1 for "", an HTTP GET that answers 200,
    or a PING in Redis's protocol.
    """

    address: Address
    http_path: str = ""
    """Empty: gRPC, or a PING."""
    ping: bool = False


@dataclass(frozen=True, slots=True)
class Process:
    """One process."""

    name: str
    kind: Kind
    command: tuple[str, ...]
    env: Mapping[str, str]
    ports: tuple[Port, ...]
    probe: Probe
    depends: tuple[str, ...]
    """Processes that it calls. A service comes up without them and is ready when they are."""
    drain_s: float
    """From SIGTERM to SIGKILL."""
    memory_bytes: int
    """Expected resident memory."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a target keeps files and how its processes reach each other."""

    target: Target
    config_path: PurePath
    runtime_dir: PurePath
    files_dir: PurePath
    """What relative paths of the configuration count from."""
    models_dir: PurePath
    """Holds what the runtime folder of the configuration holds under models/."""
    python: str
    envoy: str
    envoy_config: PurePath
    store: str
    """The program of the store: a Valkey or Redis server."""
    bind: Callable[[Address], Address]
    reach: Callable[[str, Address], Address]
    """(process, configured address) -> address to dial it at."""


@dataclass(frozen=True, slots=True)
class Topology:
    """All processes of one mesh."""

    target: Target
    engine: Engine
    device: Device
    processes: tuple[Process, ...]
    instances: tuple[Instance, ...]
    config_text: str
    """The effective configuration, as a TOML file."""
    endpoint: Address
    """Envoy's clear-text listener."""
    scheduler: Address
    """The public API behind Envoy, for `sluice status`."""
    envoy: EnvoySettings
    """What Envoy's configuration file is rendered from."""

    @property
    def simulated(self) -> bool:
        """Whether any answer can come from the simulated engine."""
        return any(instance.engine is Engine.SIMULATED for instance in self.instances)

    def process(self, name: str) -> Process:
        """The process `name`. Raises KeyError."""
        for process in self.processes:
            if process.name == name:
                return process
        raise KeyError(name)

    @property
    def fingerprint(self) -> str:
        """Changes when anything that runs would run differently."""
        parts = [self.config_text, repr(self.envoy)]
        parts += [f"{p.name} {p.command} {sorted(p.env.items())}" for p in self.processes]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def local_place(config: MeshFile, envoy: str, store: str) -> Place:
    """This machine: everything at its configured address, files in the runtime folder."""
    runtime = config.runtime_dir
    return Place(
        target=Target.LOCAL,
        config_path=runtime / "run" / "sluice.toml",
        runtime_dir=runtime,
        files_dir=config.root,
        models_dir=runtime / "models",
        python=sys.executable,
        envoy=envoy,
        envoy_config=runtime / "envoy.yaml",
        store=store,
        bind=lambda address: address,
        reach=lambda _name, address: address,
    )


def compose_place() -> Place:
    """Containers: each process listens on all its addresses and is found under its service name."""
    return Place(
        target=Target.COMPOSE,
        config_path=PurePosixPath("/etc/sluice/sluice.toml"),
        runtime_dir=PurePosixPath("/var/lib/sluice"),
        files_dir=PurePosixPath("/opt/sluice"),
        models_dir=PurePosixPath("/var/lib/sluice-models"),
        python="python",
        envoy="envoy",
        envoy_config=PurePosixPath("/tmp/envoy.yaml"),  # noqa: S108 - the container's own
        store="redis-server",
        bind=lambda address: Address("0.0.0.0", address.port),  # noqa: S104 - the container's own network
        reach=lambda name, address: Address(name, address.port),
    )


def build(
    config: MeshFile,
    place: Place,
    device: Device,
    engine: Engine | None = None,
    instance_count: int | None = None,
) -> Topology:
    """The mesh that `config` describes at `place`. Raises ConfigError."""
    instances = config.instances(device, engine, instance_count)
    scheduler_api = config.bind("scheduler", "bind", SCHEDULER_DEFAULT)
    scheduler_mesh = config.bind("scheduler", "mesh_bind", MESH_DEFAULT)
    execution_api = config.bind("execution", "bind", EXECUTION_DEFAULT)
    agent_api = config.bind("agent", "bind", AGENT_DEFAULT)
    state_api = config.bind("state", "bind", STATE_DEFAULT)
    common = {"SLUICE_CONFIG": str(place.config_path), "PYTHONUNBUFFERED": "1"}
    if place.target is Target.LOCAL:
        common |= {
            MARK_VARIABLE: mark_of(config.runtime_dir),
            "SLUICE_MESH_RUNTIME_DIR": str(place.runtime_dir),
        }
    engine_drain_s = config.number("inference", "drain_grace_s", DRAIN_DEFAULT_S)
    inference = [_inference(place, one, engine_drain_s, common) for one in instances]
    relay_drain_s = config.number("execution", "drain_grace_s", DRAIN_DEFAULT_S)
    store = _store(config, place, common)
    state_drain_s = config.number("state", "drain_grace_s", STATE_DRAIN_DEFAULT_S)
    state = _state(place, state_api, store, state_drain_s, common)
    drain_s = config.number("scheduler", "drain_grace_s", DRAIN_DEFAULT_S)
    first = _scheduler(
        place, scheduler_api, scheduler_mesh, execution_api, state_api, instances, drain_s, common
    )
    schedulers = _replicas(place, first, config.local.schedulers)
    agent_drain_s = config.number("agent", "drain_grace_s", DRAIN_DEFAULT_S)
    agent = _agent(place, agent_api, state_api, schedulers, agent_drain_s, common)
    agents = _replicas(place, agent, config.local.agents)
    execution = _execution(place, execution_api, agents, relay_drain_s, common)
    settings = _edge_settings(config, place, schedulers)
    envoy = _envoy(config, settings, place, schedulers, common)
    processes = (envoy, *schedulers, execution, *agents, *inference, state)
    return Topology(
        target=place.target,
        engine=engine or instances[0].engine,
        device=device,
        processes=processes if store is None else (*processes, store),
        instances=instances,
        config_text=toml_text.dumps(_effective(config, place, instances)),
        endpoint=Address(settings.host, settings.port),
        scheduler=scheduler_api,
        envoy=settings,
    )


def _service_command(place: Place, package: str) -> tuple[str, ...]:
    return (place.python, "-m", f"{package}.main")


def _edge_settings(config: MeshFile, place: Place, schedulers: Sequence[Process]) -> EnvoySettings:
    """[envoy] with its ports shifted and the schedulers that the topology knows."""
    target = edge.Target(place.target.value)
    settings = edge.load_settings(config.path, target, config.environ)

    def shifted(field: str, port: int) -> int:
        own = f"SLUICE_ENVOY_{field.upper()}" in config.environ
        return port if own else config.shifted(port, f"envoy.{field}")

    settings = replace(
        settings,
        port=shifted("port", settings.port),
        tls_port=shifted("tls_port", settings.tls_port),
        admin_port=shifted("admin_port", settings.admin_port),
    )
    if "SLUICE_ENVOY_SCHEDULERS" in config.environ:
        return settings
    targets = tuple(str(place.reach(one.name, one.probe.address)) for one in schedulers)
    return replace(settings, schedulers=targets)


def _envoy(
    config: MeshFile,
    settings: EnvoySettings,
    place: Place,
    schedulers: Sequence[Process],
    common: Mapping[str, str],
) -> Process:
    admin = Address("127.0.0.1", settings.admin_port)
    ports = [Port("http", Address(settings.host, settings.port)), Port("admin", admin)]
    if settings.tls_certificate:
        ports.append(Port("https", Address(settings.tls_host, settings.tls_port)))
    arguments = edge.arguments(settings, config.mesh, Path(place.envoy_config))
    return Process(
        name="envoy",
        kind=Kind.ENVOY,
        command=(place.envoy, *arguments),
        env=common if place.target is Target.COMPOSE else {MARK_VARIABLE: common[MARK_VARIABLE]},
        ports=tuple(ports),
        probe=Probe(admin, http_path="/ready"),
        depends=tuple(one.name for one in schedulers),
        drain_s=settings.drain_s + EXIT_S,
        memory_bytes=SERVICE_MEMORY_BYTES,
    )


def _scheduler(
    place: Place,
    api: Address,
    mesh: Address,
    execution: Address,
    state: Address,
    instances: tuple[Instance, ...],
    drain_s: float,
    common: Mapping[str, str],
) -> Process:
    bind, mesh_bind = place.bind(api), place.bind(mesh)
    targets = ",".join(
        f"{instance.name}={place.reach(instance.name, instance.address)}" for instance in instances
    )
    env = {
        **common,
        "SLUICE_SCHEDULER_BIND": str(bind),
        "SLUICE_SCHEDULER_MESH_BIND": str(mesh_bind),
        "SLUICE_SCHEDULER_EXECUTIONS": str(place.reach("execution", execution)),
        "SLUICE_SCHEDULER_STATE": str(place.reach("state", state)),
        "SLUICE_SCHEDULER_INSTANCES": targets,
        "SLUICE_SCHEDULER_TENANTS_FILE": str(place.runtime_dir / "tenants.toml"),
        "SLUICE_SCHEDULER_KEYS_DIR": str(place.runtime_dir / "keys"),
    }
    aliases = dict.fromkeys(f"{alias}={one.model}" for one in instances for alias in one.aliases)
    if aliases:
        env["SLUICE_SCHEDULER_ALIASES"] = ",".join(aliases)
    return Process(
        name="scheduler",
        kind=Kind.SCHEDULER,
        command=_service_command(place, "scheduler_svc"),
        env=env,
        ports=(Port("api", bind), Port("mesh", mesh_bind)),
        probe=Probe(bind),
        depends=("execution", "state", *(instance.name for instance in instances)),
        drain_s=drain_s + EXIT_S,
        memory_bytes=SERVICE_MEMORY_BYTES,
    )


def _replicas(place: Place, first: Process, count: int) -> list[Process]:
    """`count` of `first` on this machine; containers are replicas of one service."""
    if place.target is not Target.LOCAL:
        return [first]
    return [first, *(_further(first, number) for number in range(1, count))]


def _further(first: Process, number: int) -> Process:
    """The replica of that number, 1 or more: like the first, with ports and a name of its own."""
    name = f"{first.name}-{number}"
    ports = tuple(
        Port(port.name, Address(port.address.host, _stepped(first, port, number)))
        for port in first.ports
    )
    section = f"SLUICE_{first.kind.value.upper()}"
    binds = {"api": f"{section}_BIND", "mesh": f"{section}_MESH_BIND"}
    own = {binds[port.name]: str(port.address) for port in ports}
    return replace(
        first,
        name=name,
        env={**first.env, f"{section}_NAME": name, **own},
        ports=ports,
        probe=Probe(ports[0].address),
    )


def _stepped(first: Process, port: Port, number: int) -> int:
    moved = port.address.port + number * PORT_STEP
    if moved > PORT_MAX:
        raise ConfigError(
            f"local.{first.name}s",
            f"the {port.name} port of {first.name}-{number} would be {moved}",
        )
    return moved


def _agent(
    place: Place,
    api: Address,
    state: Address,
    schedulers: Sequence[Process],
    drain_s: float,
    common: Mapping[str, str],
) -> Process:
    bind = place.bind(api)
    meshes = (
        place.reach(one.name, port.address)
        for one in schedulers
        for port in one.ports
        if port.name == "mesh"
    )
    return Process(
        name="agent",
        kind=Kind.AGENT,
        command=_service_command(place, "agent_svc"),
        env={
            **common,
            "SLUICE_AGENT_BIND": str(bind),
            "SLUICE_AGENT_STATE": str(place.reach("state", state)),
            "SLUICE_AGENT_FOLDER": str(place.files_dir),
            "SLUICE_AGENT_SCHEDULERS": ",".join(str(one) for one in meshes),
        },
        ports=(Port("api", bind),),
        probe=Probe(bind),
        depends=("state", *(one.name for one in schedulers)),
        drain_s=drain_s + EXIT_S,
        memory_bytes=SERVICE_MEMORY_BYTES,
    )


def _execution(
    place: Place,
    api: Address,
    agents: Sequence[Process],
    drain_s: float,
    common: Mapping[str, str],
) -> Process:
    """It calls agent services too, but needs none: what it tells them only hastens."""
    bind = place.bind(api)
    told = (str(place.reach(one.name, one.probe.address)) for one in agents)
    return Process(
        name="execution",
        kind=Kind.EXECUTION,
        command=_service_command(place, "execution_svc"),
        env={
            **common,
            "SLUICE_EXECUTION_BIND": str(bind),
            "SLUICE_EXECUTION_AGENTS": ",".join(told),
        },
        ports=(Port("api", bind),),
        probe=Probe(bind),
        depends=(),
        drain_s=drain_s + EXIT_S,
        memory_bytes=SERVICE_MEMORY_BYTES,
    )


def _state(
    place: Place, api: Address, store: Process | None, drain_s: float, common: Mapping[str, str]
) -> Process:
    bind = place.bind(api)
    env = {**common, "SLUICE_STATE_BIND": str(bind)}
    if store is not None:
        at = place.reach(store.name, store.probe.address)
        env["SLUICE_STATE_DURABLE_URL"] = f"redis://{at}/0"
    return Process(
        name="state",
        kind=Kind.STATE,
        command=_service_command(place, "state_svc"),
        env=env,
        ports=(Port("api", bind),),
        probe=Probe(bind),
        depends=(store.name,) if store else (),
        drain_s=drain_s + EXIT_S,
        memory_bytes=SERVICE_MEMORY_BYTES,
    )


def _store(config: MeshFile, place: Place, common: Mapping[str, str]) -> Process | None:
    """The mesh's own Redis-compatible server; None where another is named. What it has acknowledged
    is on the disk (`appendfsync always`); full, it refuses writes and drops nothing.
    """
    named = not config.local.store_port or "SLUICE_STATE_DURABLE_URL" in config.environ
    if named and place.target is Target.LOCAL:
        return None
    command = [place.store, "--appendonly", "yes", "--appendfsync", "always", "--save", ""]
    command += ["--maxmemory", str(config.local.store_memory_max_bytes)]
    command += ["--maxmemory-policy", "noeviction"]
    if place.target is Target.LOCAL:
        variable = "SLUICE_LOCAL_STORE_PORT"
        port = config.local.store_port
        if variable not in config.environ:
            port = config.shifted(port, "local.store_port")
        address = Address("127.0.0.1", port)
        # Nothing but this machine's own processes may reach it: it asks for no password.
        command += ["--bind", address.host, "--port", str(port)]
        command += ["--dir", str(place.runtime_dir / "store")]
        # A title of its own would be written over the environment, by whose mark `down` finds it.
        command += ["--set-proc-title", "no"]
    else:
        address = Address("127.0.0.1", REDIS_PORT)
    return Process(
        name="store",
        kind=Kind.STORE,
        command=tuple(command),
        env=common if place.target is Target.COMPOSE else {MARK_VARIABLE: common[MARK_VARIABLE]},
        ports=(Port("store", address),),
        probe=Probe(address, ping=True),
        depends=(),
        drain_s=EXIT_S,
        memory_bytes=STORE_MEMORY_BYTES,
    )


def _inference(
    place: Place, instance: Instance, drain_s: float, common: Mapping[str, str]
) -> Process:
    bind = place.bind(instance.address)
    env = {
        **common,
        "SLUICE_INFERENCE_INSTANCE": instance.name,
        "SLUICE_INFERENCE_BIND": str(bind),
        # The public halves only: an instance verifies grants and cannot mint one.
        "SLUICE_INFERENCE_KEYS_DIR": str(place.runtime_dir / "keys" / "grant-public"),
    }
    memory, exit_s = SERVICE_MEMORY_BYTES, EXIT_S
    if instance.engine is Engine.VLLM:
        # Models are folders on disk: a look-up in a hub would only delay the start.
        env |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", **instance.env}
        exit_s = ENGINE_EXIT_S
        memory = VLLM_MEMORY_BYTES + _kv_cache_bytes(instance)

    return Process(
        name=instance.name,
        kind=Kind.INFERENCE,
        command=_service_command(place, "inference_svc"),
        env=env,
        ports=(Port("api", bind),),
        probe=Probe(bind),
        depends=(),
        drain_s=drain_s + exit_s,
        memory_bytes=memory,
    )


def _kv_cache_bytes(instance: Instance) -> int:
    """In main memory; on a GPU nothing is set aside there."""
    arguments = instance.table.get("engine_args")
    size = arguments.get("kv_cache_memory_bytes", 0) if isinstance(arguments, Mapping) else 0
    return size if isinstance(size, int) else 0


def _effective(
    config: MeshFile, place: Place, instances: tuple[Instance, ...]
) -> dict[str, object]:
    """The document that services read: the file without what only the supervisor needs, paths at
    `place`.
    """
    document = {
        key: value for key, value in config.document.items() if key not in ("local", "instance")
    }
    mesh = document.get("mesh")
    document["mesh"] = {
        **(mesh if isinstance(mesh, Mapping) else {}),
        "runtime_dir": str(place.runtime_dir),
    }
    document["instance"] = [_placed(config, place, instance) for instance in instances]
    return document


def _placed(config: MeshFile, place: Place, instance: Instance) -> dict[str, object]:
    table = dict(instance.table)
    table["address"] = str(place.reach(instance.name, instance.address))
    models = config.runtime_dir / "models"
    if instance.path is not None and instance.path.is_relative_to(models):
        table["path"] = str(place.models_dir / instance.path.relative_to(models))
    return table
