"""The rendering of Envoy's file: targets, refusals, and limits that fit those of the services."""

from __future__ import annotations

import base64
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from google.protobuf import descriptor_pb2
from hypothesis import given
from hypothesis import strategies as st

from sluice import edge
from sluice.config import ConfigError
from sluice.edge_config import EnvoySettings
from sluice.mesh_config import MeshSettings
from sluice.server_limits import ServerLimits

ENVOY = Path(sys.executable).with_name("envoy")
UNITS = {"n": 1e-9, "u": 1e-6, "m": 1e-3, "S": 1.0, "M": 60.0, "H": 3_600.0}


def rendered(settings: EnvoySettings, **mesh: Any) -> Any:
    return yaml.safe_load(edge.render(settings, MeshSettings(**mesh)))


def listeners(document: Any) -> dict[str, tuple[str, int]]:
    found = {}
    for each in document["static_resources"]["listeners"]:
        address = each["address"]["socket_address"]
        found[each["name"]] = (address["address"], address["port_value"])
    return found


def manager(document: Any, index: int = 0) -> Any:
    listener = document["static_resources"]["listeners"][index]
    return listener["filter_chains"][0]["filters"][0]["typed_config"]


@pytest.mark.parametrize("target", list(edge.Target))
@pytest.mark.parametrize("otlp", ["", "http://collector:4317"])
def test_envoy_accepts_the_file_of_every_target(
    target: edge.Target, otlp: str, tmp_path: Path
) -> None:
    settings = edge.load_settings(None, target, {})
    if settings.tls_certificate:
        certificate, key = self_signed(tmp_path)
        settings = replace(settings, tls_certificate=certificate, tls_private_key=key)
    mesh = MeshSettings(otlp_endpoint=otlp)
    path = tmp_path / "envoy.yaml"
    path.write_text(edge.render(settings, mesh))
    command = [str(ENVOY), "--mode", "validate", *edge.arguments(settings, mesh, path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-2_000:]
    assert "eprecated field" not in done.stderr.replace("RegexMatcher.google_re2", "")


def self_signed(folder: Path) -> tuple[str, str]:
    chain, key = str(folder / "tls.crt"), str(folder / "tls.key")
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt"),
            *("ec_paramgen_curve:prime256v1", "-nodes", "-subj", "/CN=localhost"),
            *("-days", "1", "-keyout", key, "-out", chain),
        ],
        check=True,
        capture_output=True,
    )
    return chain, key


def test_clear_text_listens_on_loopback_outside_containers() -> None:
    local = rendered(edge.load_settings(None, edge.Target.LOCAL, {}))
    assert listeners(local) == {"clear": ("127.0.0.1", 8080)}
    kubernetes = rendered(edge.load_settings(None, edge.Target.KUBERNETES, {}))
    assert listeners(kubernetes) == {"clear": ("127.0.0.1", 8080), "tls": ("0.0.0.0", 8443)}
    with pytest.raises(ConfigError, match=r"envoy\.host"):
        edge.load_settings(None, edge.Target.LOCAL, {"SLUICE_ENVOY_HOST": "0.0.0.0"})
    # A container's own network; the port is published on loopback.
    compose = rendered(edge.load_settings(None, edge.Target.COMPOSE, {}))
    assert listeners(compose) == {"clear": ("0.0.0.0", 8080)}


def test_the_admin_interface_listens_on_loopback_for_every_target() -> None:
    for target in edge.Target:
        document = rendered(edge.load_settings(None, target, {}))
        assert document["admin"]["address"]["socket_address"]["address"] == "127.0.0.1"


def test_the_only_clusters_are_the_public_scheduler_and_the_collector() -> None:
    for target in edge.Target:
        document = rendered(edge.load_settings(None, target, {}), otlp_endpoint="collector:1234")
        clusters = {each["name"]: each for each in document["static_resources"]["clusters"]}
        assert set(clusters) == {"scheduler", "otlp"}
        assert ":50052" not in str(document).replace(" ", "")
    document = rendered(EnvoySettings())
    assert [each["name"] for each in document["static_resources"]["clusters"]] == ["scheduler"]
    assert "tracing" not in manager(document)


def test_the_environment_goes_before_a_targets_values() -> None:
    environ = {"SLUICE_ENVOY_SCHEDULERS": "s1:1,s2:2"}
    settings = edge.load_settings(None, edge.Target.COMPOSE, environ)
    assert settings.schedulers == ("s1:1", "s2:2")
    assert settings.host == "0.0.0.0"


def test_addresses_make_a_static_cluster_and_names_one_by_dns() -> None:
    def cluster(*schedulers: str) -> Any:
        document = rendered(replace(EnvoySettings(), schedulers=schedulers))
        return document["static_resources"]["clusters"][0]

    assert cluster("127.0.0.1:1", "[::1]:2")["type"] == "STATIC"
    named = cluster("127.0.0.1:1", "scheduler:2")
    assert named["cluster_type"]["name"] == "envoy.cluster.dns"


@pytest.mark.parametrize("value", ["", "host", "host:", ":1", "host:0", "host:70000", "host:x"])
def test_a_scheduler_that_is_no_address_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=r"envoy\.schedulers"):
        rendered(replace(EnvoySettings(), schedulers=(value,)))


def test_half_a_certificate_is_refused() -> None:
    with pytest.raises(ConfigError, match="tls_private_key"):
        rendered(replace(EnvoySettings(), tls_certificate="x.crt"))


def test_strings_cannot_break_out_of_the_template() -> None:
    hostile = 'x"\n- name: evil\n  y: {{ 7 * 7 }} %}'
    settings = replace(
        EnvoySettings(),
        access_log=hostile,
        cors_origins=(hostile,),
        tls_certificate=hostile,
        tls_private_key=hostile,
    )
    document = rendered(settings)
    assert manager(document)["access_log"][0]["typed_config"]["path"] == hostile
    policy = manager(document)["route_config"]["virtual_hosts"][0]["typed_per_filter_config"]
    assert policy["envoy.filters.http.cors"]["allow_origin_string_match"] == [{"exact": hostile}]


def test_the_transcoder_knows_the_public_service_and_error_details_only() -> None:
    filters = {each["name"]: each for each in manager(rendered(EnvoySettings()))["http_filters"]}
    transcoder = filters["envoy.filters.http.grpc_json_transcoder"]["typed_config"]
    image = descriptor_pb2.FileDescriptorSet.FromString(
        base64.b64decode(transcoder["proto_descriptor_bin"])
    )
    names = {file.name for file in image.file}
    assert {"sluice/scheduler/v1/scheduler.proto", "google/rpc/error_details.proto"} <= names
    assert not [n for n in names if re.search("inference|execution|mesh|admin", n)]
    assert not any(file.HasField("source_code_info") for file in image.file)


def test_every_http_annotation_has_a_route() -> None:
    routes = manager(rendered(EnvoySettings()))["route_config"]["virtual_hosts"][0]["routes"]
    names = {route["name"] for route in routes}
    assert {"POST /v1/generate", "POST /chat", "POST /v1/embed", "GET /v1/models"} <= names


def test_what_the_edge_lets_through_the_scheduler_takes() -> None:
    envoy, server = EnvoySettings(), ServerLimits()
    own_bytes = 1_024  # what Envoy adds: request id, trace context, addresses
    overhead = 32 * envoy.headers_max  # how HTTP/2 counts a field
    assert envoy.header_kib_max * 1_024 + overhead + own_bytes < server.metadata_bytes
    assert envoy.body_bytes_max < server.message_bytes <= envoy.response_bytes_max
    assert envoy.keepalive_s >= 2 * server.ping_min_s
    assert envoy.upstream_connection_window_bytes >= 4_096 * envoy.stream_window_bytes


@given(
    value=st.integers(0, 99_999_999),
    unit=st.sampled_from(sorted(UNITS)),
    cap_s=st.integers(1, 86_400),
)
def test_a_deadline_matches_the_pattern_exactly_when_it_is_within_the_cap(
    value: int, unit: str, cap_s: int
) -> None:
    within = value * UNITS[unit] <= cap_s * (1 + 1e-12)
    assert bool(re.fullmatch(edge.grpc_timeout_pattern(cap_s), f"{value}{unit}")) == within


@pytest.mark.parametrize("text", ["", "1", "S", "1s", "-1S", "1.5S", "123456789n", "1S ", "x1S"])
def test_what_is_no_deadline_does_not_match(text: str) -> None:
    assert not re.fullmatch(edge.grpc_timeout_pattern(3_600), text)


def test_the_command_writes_the_file_or_says_why_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "deep" / "envoy.yaml"
    assert edge.main(["--target", "compose", "--out", str(out)]) == 0
    assert listeners(yaml.safe_load(out.read_text()))["clear"] == ("0.0.0.0", 8080)
    monkeypatch.setenv("SLUICE_ENVOY_PORT", "0")
    assert edge.main(["--out", str(out)]) == 2
    assert "envoy.port" in capsys.readouterr().err
