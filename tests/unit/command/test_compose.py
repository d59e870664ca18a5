"""docker-compose.yml and the Dockerfile.

Goal: what is committed is what the topology says, fits the compose schema and passes the linter.
Seen to fail on mutants: one environment variable changed in the committed file; `_confined` without
`read_only`; a Dockerfile stage that ends as root.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from sluice.command.compose import render
from sluice.mesh_config import read

ROOT = Path(__file__).resolve().parents[3]
COMPOSE = ROOT / "docker-compose.yml"
DOCKERFILE = ROOT / "Dockerfile"


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    loaded = yaml.safe_load(COMPOSE.read_text())
    assert isinstance(loaded, dict)
    return loaded


def tool(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name(name)
    return subprocess.run(
        [str(program), *arguments], capture_output=True, text=True, timeout=60, check=False
    )


def test_the_committed_files_are_what_the_topology_renders() -> None:
    files = render(read(ROOT / "sluice.toml", {}))
    assert COMPOSE.name in files
    for name, text in files.items():
        assert (ROOT / name).read_text() == text, "run `sluice compose render`"


def test_what_the_compose_file_mounts_from_the_repository_exists(document: dict[str, Any]) -> None:
    rendered = render(read(ROOT / "sluice.toml", {}))
    for config in document["configs"].values():
        # Inline content cannot be put into a container that is read-only.
        assert config.keys() == {"file"}
        assert config["file"].removeprefix("./") in rendered


def test_the_compose_file_fits_the_schema() -> None:
    done = tool("check-jsonschema", "--builtin-schema", "vendor.compose-spec", str(COMPOSE))
    assert done.returncode == 0, done.stdout


def test_the_dockerfile_passes_the_linter() -> None:
    done = tool("hadolint", "--no-color", str(DOCKERFILE))
    assert done.returncode == 0, done.stdout


def test_every_container_is_without_privileges_and_cannot_write(document: dict[str, Any]) -> None:
    for name, service in document["services"].items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert "privileged" not in service, name


def test_every_image_runs_as_a_user_without_rights() -> None:
    stages = re.split(r"^FROM ", DOCKERFILE.read_text(), flags=re.M)[1:]
    owners: dict[str, str] = {}
    for stage in stages:
        parent, _, name = stage.split("\n", 1)[0].partition(" AS ")
        users = re.findall(r"^USER (\S+)", stage, flags=re.M)
        owners[name] = users[-1] if users else owners.get(parent, "root")
    assert {owners[name] for name in owners if name != "base"} == {"10001:10001"}
    assert all("HEALTHCHECK" in stage for stage in stages if stage.startswith("base AS service"))


def test_every_image_is_pinned_to_a_version(document: dict[str, Any]) -> None:
    images = {service["image"] for service in document["services"].values()}
    images |= set(re.findall(r"^FROM (\S+:\S+)", DOCKERFILE.read_text(), flags=re.M))
    for image in images:
        if not image.startswith("sluice-"):
            assert re.search(r":\d+\.\d+\.\d+", image), image


def test_every_target_that_is_built_exists(document: dict[str, Any]) -> None:
    stages = set(re.findall(r"^FROM \S+ AS (\S+)", DOCKERFILE.read_text(), flags=re.M))
    for service in document["services"].values():
        if "build" in service:
            assert service["build"]["target"] in stages


def test_what_lasts_is_watched_and_restarted(document: dict[str, Any]) -> None:
    for name, service in document["services"].items():
        if name == "init" or name.startswith("models-"):
            continue
        assert service["restart"] == "unless-stopped", name
        assert "healthcheck" in service, name


def test_only_envoy_and_the_trace_viewer_are_reached_from_this_machine_alone(
    document: dict[str, Any],
) -> None:
    published = {
        name: service["ports"]
        for name, service in document["services"].items()
        if "ports" in service
    }
    assert published.keys() == {"envoy", "jaeger"}
    assert all(port.startswith("127.0.0.1:") for ports in published.values() for port in ports)


def test_the_profiles_hold_the_same_instances_under_the_same_names(
    document: dict[str, Any],
) -> None:
    aliases: dict[str, list[str]] = {"cpu": [], "gpu": []}
    for service in document["services"].values():
        for profile in service.get("profiles", []):
            networks = service.get("networks", {"default": {"aliases": []}})
            aliases[profile] += networks["default"]["aliases"]
    assert aliases["cpu"] == aliases["gpu"] == ["chat-0", "embed-0"]
    assert (ROOT / ".env").read_text().splitlines()[-1] == "COMPOSE_PROFILES=cpu"


def test_an_instance_sees_public_keys_only(document: dict[str, Any]) -> None:
    for name, service in document["services"].items():
        if "inference_svc.main" not in service.get("command", []):
            continue
        state = [one for one in service["volumes"] if "state" in str(one)]
        assert [one["volume"]["subpath"] for one in state] == ["keys/grant-public"], name
        assert all(one["read_only"] for one in state), name


def test_nothing_names_a_registry_of_packages() -> None:
    text = DOCKERFILE.read_text() + COMPOSE.read_text()
    assert not re.search(
        r"index-url|extra-index|find-links|https?://(?!localhost|127|jaeger)", text
    )
