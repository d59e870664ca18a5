"""The part of `sluice.toml` that describes which processes make the mesh and where they run.

Owns the sections [mesh] and [local] and the resolution of each [[instance]] for one kind
of machine. What a service does is in that service's own section, which is only carried along here.
Pure apart from reading the file.

Failure modes: a file that is missing, is no TOML, or holds an unknown key or a value out of range
is a `sluice.config.ConfigError` that names section, field, value and range.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path
from urllib.parse import urlsplit

from sluice.config import ConfigError, load, section, setting
from sluice.egress_rules import PrivateRule, parse_private

INSTANCES_MAX = 64
PORT_MAX = 65_535
OTLP_PORT = 4317
# Every table that some process reads. A test holds it against what the services declare.
TABLES = (
    *("mesh", "local", "envoy", "scheduler", "execution", "agent", "inference", "state"),
    *("instance", "tool"),
)
_RUNTIME_LINE = re.compile(r"""^\s*runtime_dir\s*=\s*["']([^"'\n]+)["']""", re.MULTILINE)
# A host name or an IPv4 address; an IPv6 address has lost its brackets by then.
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?|[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*")
NAME_PATTERN = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
# Tables of an [[instance]] that are resolved here and that no service reads.
_DEVICE_TABLES = ("cpu", "gpu")
_RESOLVED_HERE = (*_DEVICE_TABLES, "env")


class Engine(StrEnum):
    """What answers."""

    VLLM = "vllm"
    SIMULATED = "simulated"


class Device(StrEnum):
    """What vLLM computes on."""

    CPU = "cpu"
    GPU = "gpu"


@section("mesh")
@dataclass(frozen=True, slots=True)
class MeshSettings:
    """[mesh]: common to every process."""

    runtime_dir: Path = setting(
        Path(".sluice"), help="Keys, logs, run files and models; relative to the file's folder."
    )
    log_level: str = setting(
        "info", choices=("debug", "info", "warning", "error"), help="Least severe log line written."
    )
    otlp_endpoint: str = setting(
        "",
        help="OTLP/gRPC collector: host:port or http(s)://host:port. Empty: no traces, no metrics.",
    )
    trace_sample_ratio: float = setting(
        0.01, ge=0.0, le=1.0, help="Share of requests traced; Envoy decides for what passes it."
    )
    metric_interval_s: float = setting(
        10.0, unit="s", ge=1.0, le=300.0, help="How often metrics are exported."
    )
    registered_private_allowed: tuple[str, ...] = setting(
        (),
        unit="entries",
        ge=0,
        le=64,
        help="Private addresses that tools registered for tenants may reach: HOST:PORT or a CIDR.",
    )

    def __post_init__(self) -> None:
        otlp_address(self.otlp_endpoint)
        self.registered_private()

    def registered_private(self) -> tuple[PrivateRule, ...]:
        """``registered_private_allowed`` as rules. Raises ConfigError for a wrong entry."""
        rules = []
        for entry in self.registered_private_allowed:
            try:
                rules.append(parse_private(entry))
            except ValueError as error:
                where = "mesh.registered_private_allowed"
                raise ConfigError(where, f"{entry!r} {error}") from None
        return tuple(rules)


@section("local")
@dataclass(frozen=True, slots=True)
class LocalSettings:
    """[local]: how `sluice up` runs the mesh on this machine."""

    device: str = setting(
        "auto",
        choices=("auto", "cpu", "gpu"),
        help="What vLLM computes on. auto: gpu with vLLM's GPU build and a GPU.",
    )
    port_offset: int = setting(0, ge=0, le=20_000, help="Added to every port of the file.")
    schedulers: int = setting(
        1,
        ge=1,
        le=16,
        unit="processes",
        help="Schedulers behind Envoy; each further one serves 100 ports above the one before.",
    )
    agents: int = setting(
        1,
        ge=1,
        le=8,
        unit="processes",
        help="Agent services; each further one serves 100 ports above the one before.",
    )
    store_port: int = setting(
        16_379,
        ge=0,
        le=PORT_MAX,
        help="Loopback port of the Valkey that `sluice up` starts. 0: none; state.durable_url"
        " names one.",
    )
    store_memory_max_bytes: int = setting(
        256 << 20,
        unit="bytes",
        ge=16 << 20,
        le=1 << 40,
        help="Data that it keeps at most; beyond that it refuses writes.",
    )
    ready_timeout_s: float = setting(
        600.0, unit="s", ge=1.0, le=7_200.0, help="Longest wait until every process is ready."
    )
    log_bytes_max: int = setting(
        10 << 20, unit="bytes", ge=1 << 16, le=1 << 30, help="A log file is rotated at this size."
    )
    log_files_kept: int = setting(3, unit="files", ge=1, le=100, help="Rotated files kept.")
    disk_bytes_min: int = setting(
        512 << 20, unit="bytes", ge=0, le=1 << 40, help="With less free, nothing is started."
    )


@dataclass(frozen=True, slots=True)
class Address:
    """Where a process serves."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Instance:
    """One [[instance]], resolved for an engine and a device."""

    name: str
    address: Address
    engine: Engine
    model: str
    path: Path | None
    embeds: bool
    aliases: tuple[str, ...]
    env: Mapping[str, str]
    """Environment of its process."""
    table: Mapping[str, object]
    """What its service reads: the entry without what was resolved here; paths are absolute."""


@dataclass(frozen=True, slots=True)
class MeshFile:
    """The file, read and checked."""

    path: Path
    mesh: MeshSettings
    local: LocalSettings
    document: Mapping[str, object]
    environ: Mapping[str, str]

    @property
    def root(self) -> Path:
        """The folder that relative paths count from."""
        return self.path.parent

    @property
    def runtime_dir(self) -> Path:
        """Absolute."""
        folder: Path = self.root / self.mesh.runtime_dir
        return folder.resolve()

    def bind(self, section: str, field: str, default: str) -> Address:
        """The address in `section.field`: from the environment as it is, else from the file plus
        the offset.
        """
        variable = f"SLUICE_{section.upper()}_{field.upper()}"
        if variable in self.environ:
            return parse_address(self.environ[variable], variable)
        table = _mapping(self.document.get(section, {}), section)
        where = f"{section}.{field}"
        return self._shifted(parse_address(table.get(field, default), where), where)

    def shifted(self, port: int, where: str) -> int:
        """`port`, the value of `where`, plus the offset. Raises ConfigError."""
        moved = port + self.local.port_offset
        if moved > PORT_MAX:
            raise ConfigError(
                "local.port_offset",
                f"{self.local.port_offset} moves {where} from port {port} to {moved};"
                f" permitted: 0 to {PORT_MAX - port}",
            )
        return moved

    def number(self, section: str, field: str, default: float) -> float:
        """A number in a service's section. The service checks its range."""
        variable = f"SLUICE_{section.upper()}_{field.upper()}"
        table = _mapping(self.document.get(section, {}), section)
        value = self.environ.get(variable, table.get(field, default))
        try:
            return float(value) if isinstance(value, int | float | str) else default
        except ValueError:
            raise ConfigError(f"{section}.{field}", f"{value!r} must be a number") from None

    @property
    def tool_names(self) -> tuple[str, ...]:
        """The names of the [[tool]] entries. Raises ConfigError."""
        return tuple(
            _text(entry.get("name"), f"tool[{index}].name")
            for index, entry in enumerate(self._tools())
        )

    @property
    def tool_secrets(self) -> tuple[str, ...]:
        """The environment variables that the [[tool]] entries name. Raises ConfigError."""
        kinds = (kind for entry in self._tools() for kind in entry.values())
        headers = (kind.get("secret_headers") for kind in kinds if isinstance(kind, Mapping))
        named = {name for one in headers if isinstance(one, Mapping) for name in one.values()}
        return tuple(sorted(name for name in named if isinstance(name, str)))

    def _tools(self) -> list[Mapping[str, object]]:
        entries = self.document.get("tool", [])
        if not isinstance(entries, list):
            raise ConfigError("tool", "must be tables: [[tool]]")
        return [_mapping(entry, f"tool[{index}]") for index, entry in enumerate(entries)]

    def instances(
        self, device: Device, engine: Engine | None = None, count: int | None = None
    ) -> tuple[Instance, ...]:
        """Every instance for `device`. `engine` replaces the engine of all of them.

        `count` instances of the first entry are made, on ports after the highest in use; only
        simulated ones, since a real one would need a device of its own.
        """
        entries = [
            self._instance(entry, index, device, engine)
            for index, entry in enumerate(_entries(self.document))
        ]
        if count is not None:
            entries = _multiplied(entries, count)
        _check_unique(entries)
        self._check_defaults(entries)
        return tuple(entries)

    def _check_defaults(self, entries: list[Instance]) -> None:
        """A default that nobody serves would refuse every request that names no model."""
        table = _mapping(self.document.get("scheduler", {}), "scheduler")
        served = {name for one in entries for name in (one.model, *one.aliases)}
        for field in ("default_model", "default_embedding_model"):
            default = self.environ.get(f"SLUICE_SCHEDULER_{field.upper()}", table.get(field))
            if default and default not in served:
                raise ConfigError(
                    f"scheduler.{field}",
                    f"{default!r} is served by no [[instance]]; served: "
                    + ", ".join(sorted(served)),
                )

    def _instance(
        self, entry: Mapping[str, object], index: int, device: Device, engine: Engine | None
    ) -> Instance:
        where = f"instance[{index}]"
        merged = _merge(
            {key: value for key, value in entry.items() if key not in _DEVICE_TABLES},
            _mapping(entry.get(device.value, {}), f"{where}.{device.value}"),
        )
        name = _text(merged.get("name"), f"{where}.name")
        if not NAME_PATTERN.fullmatch(name):
            raise ConfigError(f"{where}.name", f"{name!r} must be [a-z0-9-], 1 to 63 characters")
        chosen = engine or _engine(merged.get("engine", "vllm"), f"{where}.engine")
        path = merged.get("path")
        folder = (
            (self.root / _text(path, f"{where}.path")).absolute()
            if path not in (None, "")
            else None
        )
        arguments = _mapping(merged.get("engine_args", {}), f"{where}.engine_args")
        address = self._instance_address(name, merged, where)
        table = {key: value for key, value in merged.items() if key not in _RESOLVED_HERE}
        table |= {"engine": chosen.value, "address": str(address)}
        # The other engine's settings mean nothing to the chosen one.
        table.pop("simulated" if chosen is Engine.VLLM else "engine_args", None)
        if folder is not None:
            table["path"] = str(folder)
        env = _mapping(merged.get("env", {}), f"{where}.env")
        return Instance(
            name=name,
            address=address,
            engine=chosen,
            model=_text(merged.get("model"), f"{where}.model"),
            path=folder,
            embeds=arguments.get("runner") == "pooling",
            aliases=_names(merged.get("aliases", []), f"{where}.aliases"),
            env={key: str(value) for key, value in env.items()} if chosen is Engine.VLLM else {},
            table=table,
        )

    def _instance_address(self, name: str, table: Mapping[str, object], where: str) -> Address:
        variable = f"SLUICE_ADDRESS_{name.upper().replace('-', '_')}"
        if variable in self.environ:
            return parse_address(self.environ[variable], variable)
        where = f"{where}.address"
        return self._shifted(parse_address(table.get("address"), where), where)

    def _shifted(self, address: Address, where: str) -> Address:
        return Address(address.host, self.shifted(address.port, where))


def read(path: Path, environ: Mapping[str, str]) -> MeshFile:
    """Reads and checks the file at `path`. Raises ConfigError."""
    path = path.absolute()
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(str(path), "there is no such file; --config names another") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(str(path), str(error)) from None
    _check_tables(document)
    return MeshFile(
        path=path,
        mesh=load(MeshSettings, "mesh", path=path, environ=environ),
        local=load(LocalSettings, "local", path=path, environ=environ),
        document=document,
        environ=dict(environ),
    )


def runtime_folder(path: Path, environ: Mapping[str, str]) -> Path:
    """Where the runtime folder is, also of a file that is wrong elsewhere. Raises ConfigError when
    there is no file."""
    path = path.absolute()
    named = environ.get("SLUICE_MESH_RUNTIME_DIR")
    if not named:
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise ConfigError(str(path), f"cannot be read ({error.strerror})") from None
        named = _runtime_dir(text) or str(MeshSettings().runtime_dir)
    return (path.parent / Path(named).expanduser()).resolve()


def _runtime_dir(text: str) -> str | None:
    try:
        mesh = tomllib.loads(text).get("mesh")
    except tomllib.TOMLDecodeError:
        # No other section has a setting of this name.
        found = _RUNTIME_LINE.search(text)
        return found.group(1) if found else None
    named = mesh.get("runtime_dir") if isinstance(mesh, Mapping) else None
    return named if isinstance(named, str) else None


def parse_address(value: object, where: str) -> Address:
    """`host:port` as an Address; an IPv6 host stands in brackets. Raises ConfigError naming
    `where`.
    """
    text = _text(value, where)
    host, separator, port = text.rpartition(":")
    if not separator or not host or not port.isdecimal() or not 1 <= int(port) <= PORT_MAX:
        raise ConfigError(where, f"{text!r} must be host:port with a port of 1 to {PORT_MAX}")
    return Address(host, int(port))


def otlp_address(endpoint: str) -> Address | None:
    """The collector of `mesh.otlp_endpoint`; None when it is empty. Raises ConfigError."""
    if not endpoint:
        return None
    try:
        parts = urlsplit(endpoint if "//" in endpoint else f"//{endpoint}")
        address = Address(parts.hostname or "", parts.port or OTLP_PORT)
        plain = not (parts.username or parts.path.strip("/") or parts.query or parts.fragment)
        good = plain and parts.scheme in ("", "http", "https") and _HOST.fullmatch(address.host)
    except ValueError:  # a port that is no number, a bracket that is not closed
        good = None
    if not good:
        raise ConfigError(
            "mesh.otlp_endpoint", f"{endpoint!r} must be host:port or http(s)://host:port"
        )
    return address


def _check_tables(document: Mapping[str, object]) -> None:
    for name in document:
        if name not in TABLES:
            near = get_close_matches(name, TABLES, n=1, cutoff=0.0)[0]
            raise ConfigError(name, f"there is no such section; did you mean [{near}]?")


def _entries(document: Mapping[str, object]) -> list[Mapping[str, object]]:
    entries = document.get("instance")
    if not isinstance(entries, list) or not entries:
        raise ConfigError("instance", "at least one [[instance]] is needed")
    if len(entries) > INSTANCES_MAX:
        raise ConfigError("instance", f"{len(entries)} entries; at most {INSTANCES_MAX}")
    return [_mapping(entry, f"instance[{index}]") for index, entry in enumerate(entries)]


def _multiplied(entries: list[Instance], count: int) -> list[Instance]:
    first = entries[0]
    if first.engine is not Engine.SIMULATED:
        raise ConfigError("instances", "several instances of one entry can only be simulated ones")
    if not 1 <= count <= INSTANCES_MAX - len(entries) + 1:
        most = INSTANCES_MAX - len(entries) + 1
        raise ConfigError("instances", f"{count} is out of range; permitted: 1 to {most}")
    stem = re.sub(r"-\d+$", "", first.name)
    port = max(entry.address.port for entry in entries)
    if port + count - 1 > PORT_MAX:
        raise ConfigError("instances", f"{count} need ports up to {port + count - 1}")
    copies = []
    for number in range(1, count):
        name, address = f"{stem}-{number}", Address(first.address.host, port + number)
        table = {**first.table, "name": name, "address": str(address)}
        copies.append(
            Instance(
                name=name,
                address=address,
                engine=first.engine,
                model=first.model,
                path=first.path,
                embeds=first.embeds,
                aliases=first.aliases,
                env=first.env,
                table=table,
            )
        )
    return [first, *copies, *entries[1:]]


def _check_unique(entries: list[Instance]) -> None:
    for what, values in (
        ("name", [entry.name for entry in entries]),
        ("address", [str(entry.address) for entry in entries]),
    ):
        for value in values:
            if values.count(value) > 1:
                raise ConfigError(f"instance.{what}", f"two instances have {value!r}")


def _merge(base: Mapping[str, object], over: Mapping[str, object]) -> dict[str, object]:
    """`over` on top of `base`, table by table."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            merged[key] = _merge(below, value)
        else:
            merged[key] = value
    return merged


def _engine(value: object, where: str) -> Engine:
    try:
        return Engine(_text(value, where))
    except ValueError:
        raise ConfigError(
            where, f"{value!r} is out of range; permitted: one of vllm, simulated"
        ) from None


def _text(value: object, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigError(where, f"{value!r} must be a string of at least one character")
    return value


def _names(value: object, where: str) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ConfigError(where, f"{value!r} must be a list of strings")
    return tuple(_text(item, where) for item in value)


def _mapping(value: object, where: str) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise ConfigError(where, f"{value!r} must be a table")
    return value
