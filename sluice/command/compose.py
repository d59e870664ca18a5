"""Renders docker-compose.yml from the topology, so that containers and this machine run the same.

Owns what containers add to a process: image, volumes, network names, restart, privileges. Commands,
environments, ports, drain times and dependencies come from `topology`. Pure; the result depends on
`sluice.toml` alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import yaml

from sluice.command.topology import Kind, Process, Topology, build, compose_place
from sluice.mesh_config import Device, Instance, MeshFile

HEADER: Final = """\
# Rendered from sluice.toml by `sluice compose render`; do not edit.
#
#   docker compose up --wait                  vLLM on the CPU (COMPOSE_PROFILES in .env)
#   docker compose --profile gpu up --wait    vLLM on GPUs
#   KEY=$(docker compose exec scheduler cat /var/lib/sluice/api-key)
#   curl -H "authorization: Bearer $KEY" -d '{"prompt":"Hello"}' localhost:8080/chat
#
# SLUICE_SCHEDULERS=2 runs two schedulers, SLUICE_AGENTS=2 two agent services.
# Traces: http://localhost:16686. Needs Docker Compose 2.26 or newer.
"""
CONFIG_HEADER: Final = "# Rendered from sluice.toml by `sluice compose render`; do not edit.\n\n"
COMPOSE_FILE: Final = "docker-compose.yml"
# Exact versions. This is the last line of Redis under a BSD licence.
REDIS_IMAGE: Final = "redis:7.2.4-bookworm"
JAEGER_IMAGE: Final = "jaegertracing/all-in-one:1.62.0"
OTLP_ENDPOINT: Final = "http://jaeger:4317"
CONFIG_PATH: Final = "/etc/sluice/sluice.toml"
STATE_PATH: Final = "/var/lib/sluice"
MODELS_PATH: Final = "/var/lib/sluice-models"
PUBLIC_KEYS_PATH: Final = f"{STATE_PATH}/keys/grant-public"

_IMAGES: Final[Mapping[Kind, str]] = {
    Kind.ENVOY: "envoy",
    Kind.SCHEDULER: "service",
    Kind.EXECUTION: "service",
    Kind.AGENT: "service",
    Kind.STATE: "service",
}
# How many of them run is said in the environment of `docker compose`.
_REPLICAS: Final[Mapping[Kind, str]] = {
    Kind.SCHEDULER: "SLUICE_SCHEDULERS",
    Kind.AGENT: "SLUICE_AGENTS",
}
# A model may load and compile for long before its first healthy answer.
_ENGINE_START: Final = "30m"
_SERVICE_START: Final = "60s"

Table = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Profile:
    device: Device

    @property
    def config(self) -> str:
        """Name of the effective configuration."""
        return f"sluice-{self.device.value}"

    def service_name(self, process: str) -> str:
        """Name of an instance's service; both profiles' instances answer to the process's name."""
        return process if self.device is Device.CPU else f"{process}-{self.device.value}"


def render(file: MeshFile) -> dict[str, str]:
    """The files by path, relative to the repository: docker-compose.yml and, for each kind of
    device, the effective configuration that its containers read. Raises ConfigError."""
    built = {device: build(file, compose_place(), device) for device in Device}
    files = {COMPOSE_FILE: _compose(built, file.tool_secrets)}
    for device, topology in built.items():
        files[config_path(device)] = CONFIG_HEADER + topology.config_text
    return files


def config_path(device: Device) -> str:
    """Where the effective configuration of `device` is."""
    return f"deploy/compose/sluice-{device.value}.toml"


def _compose(built: Mapping[Device, Topology], secrets: Sequence[str]) -> str:
    profiles = [_Profile(device) for device in built]
    common = built[Device.CPU]
    services: Table = {"init": _init()}
    for process in common.processes:
        if process.kind in _IMAGES:
            service = _service(process, _IMAGES[process.kind], common)
            if process.kind is Kind.AGENT:
                # Given by name only: the file holds no secret.
                service["environment"] |= {name: f"${{{name}:-}}" for name in secrets}
            services[process.name] = service
        elif process.kind is Kind.STORE:
            services[process.name] = _redis(process)
    for profile in profiles:
        services[f"models-{profile.device.value}"] = _models(profile)
        for process in built[profile.device].processes:
            if process.kind is Kind.INFERENCE:
                name = profile.service_name(process.name)
                services[name] = _instance(process, profile, built[profile.device])
    services["jaeger"] = _jaeger()
    document: Table = {
        "name": "sluice",
        "services": services,
        # Files, since Compose can put no inline text into a container that cannot be written to.
        "configs": {one.config: {"file": f"./{config_path(one.device)}"} for one in profiles},
        "volumes": {"state": {}, "models": {}, "store": {}},
    }
    return HEADER + yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=120)


def _image(target: str) -> Table:
    return {
        "image": f"sluice-{target}:${{SLUICE_VERSION:-dev}}",
        "build": {"context": ".", "target": target},
    }


def _confined() -> Table:
    """Privileges of every container of ours: none, and nothing to write but what is mounted."""
    return {
        "init": True,
        "read_only": True,
        # Engines load what they compile from here, which Docker's default `noexec` forbids.
        "tmpfs": ["/tmp:mode=1777,exec"],  # noqa: S108
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
    }


def _init() -> Table:
    return {
        **_image("service"),
        **_confined(),
        "command": ["python", "-m", "sluice.command.first_files", STATE_PATH, CONFIG_PATH],
        "configs": [{"source": _Profile(Device.CPU).config, "target": CONFIG_PATH}],
        "volumes": [f"state:{STATE_PATH}"],
        "network_mode": "none",
    }


def _models(profile: _Profile) -> Table:
    return {
        **_image(f"inference-{profile.device.value}"),
        **_confined(),
        "profiles": [profile.device.value],
        "command": ["python", "-m", "sluice.models", "prepare", "--into", MODELS_PATH],
        "volumes": [f"models:{MODELS_PATH}"],
        "network_mode": "none",
    }


def _service(process: Process, image: str, topology: Topology) -> Table:
    service: Table = {
        **_image(image),
        **_confined(),
        **_running(process, _SERVICE_START),
        "command": _command(process),
        "environment": _environment(process),
        "configs": [{"source": _Profile(Device.CPU).config, "target": CONFIG_PATH}],
        "depends_on": _depends(process, topology),
    }
    if process.kind is Kind.ENVOY:
        port = topology.endpoint.port
        service["ports"] = [f"127.0.0.1:{port}:{port}"]
    if process.kind is Kind.SCHEDULER:
        service["volumes"] = [f"state:{STATE_PATH}:ro"]
    if process.kind in _REPLICAS:
        service["deploy"] = {"replicas": f"${{{_REPLICAS[process.kind]}:-1}}"}
    return service


def _instance(process: Process, profile: _Profile, topology: Topology) -> Table:
    instance = next(one for one in topology.instances if one.name == process.name)
    keys = {
        "type": "volume",
        "source": "state",
        "target": PUBLIC_KEYS_PATH,
        "read_only": True,
        # An instance sees no private key and no client's key.
        "volume": {"subpath": "keys/grant-public"},
    }
    service: Table = {
        **_image(f"inference-{profile.device.value}"),
        **_confined(),
        **_running(process, _ENGINE_START),
        "profiles": [profile.device.value],
        "command": _command(process),
        # Engines keep caches below their home.
        "environment": {**_environment(process), "HOME": "/tmp"},  # noqa: S108
        "configs": [{"source": profile.config, "target": CONFIG_PATH}],
        "volumes": [keys, f"models:{MODELS_PATH}:ro"],
        # Its processes hand tensors to each other through shared memory.
        "shm_size": "1gb",
        "networks": {"default": {"aliases": [process.name]}},
        "depends_on": {
            "init": {"condition": "service_completed_successfully"},
            f"models-{profile.device.value}": {"condition": "service_completed_successfully"},
        },
    }
    if profile.device is Device.GPU:
        service["deploy"] = {"resources": {"reservations": {"devices": [_gpus(instance)]}}}
    return service


def _gpus(instance: Instance) -> Table:
    sizes = (instance.table.get(f"{kind}_parallel_size", 1) for kind in ("tensor", "pipeline"))
    count = 1
    for size in sizes:
        count *= size if isinstance(size, int) else 1
    return {"driver": "nvidia", "count": count, "capabilities": ["gpu"]}


def _running(process: Process, start_period: str) -> Table:
    return {
        "restart": "unless-stopped",
        "stop_grace_period": f"{process.drain_s:.0f}s",
        # The question itself is the image's.
        "healthcheck": {
            "interval": "10s",
            "timeout": "5s",
            "retries": 3,
            "start_period": start_period,
            "start_interval": "1s",
        },
    }


def _command(process: Process) -> list[str]:
    """As on this machine, but for what only a container knows."""
    words = " ".join(process.command)
    if process.kind is Kind.ENVOY:
        rendered = f"python -m sluice.edge --target compose --config {CONFIG_PATH} --out"
        path = process.command[process.command.index("--config-path") + 1]
        return ["sh", "-c", f"{rendered} {path} && exec {words}"]
    if process.kind in _REPLICAS:
        # Each replica needs a name of its own.
        name = f"SLUICE_{process.kind.value.upper()}_NAME={process.name}-$$(hostname)"
        return ["sh", "-c", f"{name} exec {words}"]
    return list(process.command)


def _environment(process: Process) -> dict[str, str]:
    probe = process.probe
    local = f"127.0.0.1:{probe.address.port}"
    question = f"http http://{local}{probe.http_path}" if probe.http_path else f"grpc {local}"
    return {
        **process.env,
        "SLUICE_MESH_OTLP_ENDPOINT": OTLP_ENDPOINT,
        "SLUICE_PROBE": question,
    }


def _depends(process: Process, topology: Topology) -> Table:
    """Services only: instances come and go, and a profile may leave them out."""
    services = {one.name for one in topology.processes if one.kind is not Kind.INFERENCE}
    depends: Table = {"init": {"condition": "service_completed_successfully"}}
    for name in process.depends:
        if name in services:
            depends[name] = {"condition": "service_started"}
    return depends


def _redis(process: Process) -> Table:
    return {
        "image": REDIS_IMAGE,
        **_confined(),
        "user": "redis",
        "restart": "unless-stopped",
        "stop_grace_period": f"{process.drain_s:.0f}s",
        "command": list(process.command),
        "volumes": ["store:/data"],
        "healthcheck": {
            "test": ["CMD", "redis-cli", "ping"],
            "interval": "10s",
            "timeout": "3s",
            "retries": 3,
        },
    }


def _jaeger() -> Table:
    return {
        "image": JAEGER_IMAGE,
        **_confined(),
        "restart": "unless-stopped",
        # Bounded: the oldest traces go first.
        "environment": {"COLLECTOR_OTLP_ENABLED": "true", "MEMORY_MAX_TRACES": "20000"},
        "ports": ["127.0.0.1:16686:16686"],
        "healthcheck": {
            "test": ["CMD", "wget", "-q", "--spider", "http://127.0.0.1:14269/"],
            "interval": "10s",
            "timeout": "3s",
            "retries": 3,
        },
    }


class _Dumper(yaml.SafeDumper):
    """Repeats instead of anchors, which are hard to read."""

    def ignore_aliases(self, data: object) -> bool:
        """Always."""
        return True
