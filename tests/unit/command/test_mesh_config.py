"""How `sluice.toml` becomes instances for a machine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from sluice.command import settings_page
from sluice.command.cli import run
from sluice.command.cli_support import EXIT_USAGE
from sluice.command.compose import COMPOSE_FILE, render
from sluice.config import ConfigError
from sluice.mesh_config import (
    TABLES,
    Address,
    Device,
    Engine,
    MeshFile,
    otlp_address,
    parse_address,
    read,
)

COMMITTED = Path(__file__).resolve().parents[3] / "sluice.toml"
ENTRY = """
[[instance]]
name = "chat-0"
address = "127.0.0.1:1000"
model = "m"
path = "models/m"
engine_args = { max_model_len = 64 }
simulated = { context_tokens = 64 }
[instance.cpu]
dtype = "float32"
env = { THREADS = 2 }
engine_args = { enforce_eager = true }
[instance.gpu]
dtype = "auto"
"""


def made(tmp_path: Path, text: str = ENTRY, **environ: str) -> MeshFile:
    path = tmp_path / "sluice.toml"
    path.write_text(text)
    return read(path, environ)


def test_the_values_of_the_machines_kind_are_laid_over_the_common_ones(tmp_path: Path) -> None:
    file = made(tmp_path)
    (cpu,) = file.instances(Device.CPU)
    assert cpu.table["dtype"] == "float32"
    assert cpu.table["engine_args"] == {"max_model_len": 64, "enforce_eager": True}
    assert cpu.env == {"THREADS": "2"}
    (gpu,) = file.instances(Device.GPU)
    assert gpu.table["dtype"] == "auto"
    assert gpu.table["engine_args"] == {"max_model_len": 64}
    assert gpu.env == {}


def test_services_are_not_shown_what_was_resolved_for_them(tmp_path: Path) -> None:
    (one,) = made(tmp_path).instances(Device.CPU)
    assert not {"cpu", "gpu", "env", "simulated"} & one.table.keys()
    assert one.table["path"] == str(tmp_path / "models" / "m")


def test_another_engine_takes_its_own_settings_and_no_environment(tmp_path: Path) -> None:
    (one,) = made(tmp_path).instances(Device.CPU, Engine.SIMULATED)
    assert one.engine is Engine.SIMULATED
    assert one.table["simulated"] == {"context_tokens": 64}
    assert "engine_args" not in one.table
    assert one.env == {}


def test_simulated_instances_multiply_on_ports_of_their_own(tmp_path: Path) -> None:
    other = ENTRY.replace("chat-0", "embed-0").replace(":1000", ":1001")
    file = made(tmp_path, ENTRY + other)
    found = file.instances(Device.CPU, Engine.SIMULATED, 3)
    names = [(one.name, one.address.port) for one in found]
    assert names == [("chat-0", 1000), ("chat-1", 1002), ("chat-2", 1003), ("embed-0", 1001)]


def test_real_instances_do_not_multiply(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="simulated"):
        made(tmp_path).instances(Device.CPU, None, 2)


def test_addresses_come_from_the_environment_or_are_shifted(tmp_path: Path) -> None:
    (shifted,) = made(tmp_path, SLUICE_LOCAL_PORT_OFFSET="50").instances(Device.CPU)
    assert shifted.address == Address("127.0.0.1", 1050)
    environ = {"SLUICE_LOCAL_PORT_OFFSET": "50", "SLUICE_ADDRESS_CHAT_0": "127.0.0.1:7"}
    (named,) = made(tmp_path, ENTRY, **environ).instances(Device.CPU)
    assert named.address == Address("127.0.0.1", 7)


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (('name = "chat-0"', 'name = "Chat 0"'), r"instance\[0\]\.name"),
        (('model = "m"', ""), r"instance\[0\]\.model"),
        (('"127.0.0.1:1000"', '"127.0.0.1"'), r"instance\[0\]\.address"),
        (('"127.0.0.1:1000"', '"127.0.0.1:65536"'), r"instance\[0\]\.address"),
        (('model = "m"', 'model = "m"\nengine = "none"'), r"instance\[0\]\.engine"),
        (('model = "m"', 'model = "m"\naliases = "a"'), r"instance\[0\]\.aliases"),
        (('dtype = "float32"\n', 'dtype = "float32"\nenv = 3\n#'), r"instance\[0\]\.env"),
    ],
)
def test_a_wrong_entry_is_named(tmp_path: Path, change: tuple[str, str], where: str) -> None:
    with pytest.raises(ConfigError, match=where):
        made(tmp_path, ENTRY.replace(*change)).instances(Device.CPU)


def test_two_instances_cannot_share_a_name_or_an_address(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"instance\.name"):
        made(tmp_path, ENTRY + ENTRY).instances(Device.CPU)
    with pytest.raises(ConfigError, match=r"instance\.address"):
        made(tmp_path, ENTRY + ENTRY.replace("chat-0", "chat-1")).instances(Device.CPU)


def test_a_file_without_instances_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least one"):
        made(tmp_path, "").instances(Device.CPU)


@pytest.mark.parametrize("text", ["[mesh]\nunknown = 1", "[local]\nport_offset = -1", "no toml"])
def test_a_wrong_file_is_refused_when_it_is_read(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError):
        made(tmp_path, text)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such file"):
        read(tmp_path / "none.toml", {})


@pytest.mark.parametrize("text", ["", "x", ":1", "x:", "x:0", "x:99999", "x:-1", "x:1a"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_address(text, "here")


def test_an_ipv6_address_keeps_its_brackets() -> None:
    assert str(parse_address("[::1]:5", "here")) == "[::1]:5"


@pytest.mark.parametrize("device", list(Device))
def test_the_committed_file_is_good_on_every_device(device: Device) -> None:
    chat, embed = read(COMMITTED, {}).instances(device)
    assert (chat.name, chat.embeds) == ("chat-0", False)
    assert (embed.name, embed.embeds) == ("embed-0", True)
    assert chat.table["dtype"] == ("float32" if device is Device.CPU else "auto")


def test_every_line_of_the_committed_file_that_sets_something_is_commented() -> None:
    lines = COMMITTED.read_text().splitlines()
    start = lines.index('name = "embed-0"                 # each line as above')
    for line in lines[:start]:
        if "=" in line and not line.startswith("#"):
            assert "#" in line, line


def test_ranges_in_the_committed_file_are_those_of_the_settings() -> None:
    """Mutant seen to fail: another upper end of a range in the file."""
    declared = {info.where: info for info in settings_page.declared()}
    section, compared = "", 0
    for line in COMMITTED.read_text().splitlines():
        if header := re.match(r"\[(\w+)\]", line):
            section = header[1]
        said = re.match(r"(\w+) *=.*# [^;]*?([\d.]+) to ([\d.]+)", line)
        info = declared.get(f"{section}.{said[1]}") if said else None
        if said is not None and info is not None and None not in (info.ge, info.le):
            assert (float(said[2]), float(said[3])) == (info.ge, info.le), line
            compared += 1
    assert compared >= 15


@pytest.mark.parametrize(
    ("name", "near"),
    [("evnoy", "envoy"), ("meshes", "mesh"), ("instances", "instance"), ("Local", "local")],
)
def test_a_section_that_nobody_reads_is_refused_and_the_nearest_is_named(
    tmp_path: Path, name: str, near: str
) -> None:
    with pytest.raises(ConfigError, match=rf"{name}: .*\[{near}\]"):
        made(tmp_path, f"{ENTRY}\n[{name}]\nport = 1\n")


def test_every_section_that_a_process_declares_is_known() -> None:
    declared = {info.section.split(".")[0] for info in settings_page.declared()}
    assert declared <= set(TABLES)


TOOLS = """
[[tool]]
name = "orders"
[tool.http]
url = "https://orders.example.org"
secret_headers = { authorization = "TOOL_SECRET_ORDERS" }
[[tool]]
name = "clock"
clock = {}
"""


def test_tools_are_named_and_so_are_their_secrets(tmp_path: Path) -> None:
    file = made(tmp_path, ENTRY + TOOLS)
    assert file.tool_names == ("orders", "clock")
    assert file.tool_secrets == ("TOOL_SECRET_ORDERS",)
    compose = yaml.safe_load(render(file)[COMPOSE_FILE])["services"]
    assert compose["agent"]["environment"]["TOOL_SECRET_ORDERS"] == "${TOOL_SECRET_ORDERS:-}"
    assert "TOOL_SECRET_ORDERS" not in compose["execution"]["environment"]


def test_a_tool_without_a_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tool\[0\]\.name"):
        _ = made(tmp_path, f"{ENTRY}\n[[tool]]\nclock = {{}}\n").tool_names


def test_an_offset_that_moves_a_port_out_of_range_is_refused(tmp_path: Path) -> None:
    entry = ENTRY.replace(":1000", ":50082")
    with pytest.raises(ConfigError, match=r"local\.port_offset.*instance\[0\].*50082.*70082"):
        made(tmp_path, entry, SLUICE_LOCAL_PORT_OFFSET="20000").instances(Device.CPU)
    file = made(tmp_path, entry, SLUICE_LOCAL_PORT_OFFSET="20000")
    with pytest.raises(ConfigError, match=r"local\.port_offset.*scheduler\.bind"):
        file.bind("scheduler", "bind", "127.0.0.1:50051")


def test_copies_of_an_instance_get_no_port_that_does_not_exist(tmp_path: Path) -> None:
    entry = ENTRY.replace(":1000", ":65535")
    with pytest.raises(ConfigError, match="65536"):
        made(tmp_path, entry).instances(Device.CPU, Engine.SIMULATED, 2)


@pytest.mark.parametrize("field", ["default_model", "default_embedding_model"])
def test_a_default_that_no_instance_serves_is_refused(tmp_path: Path, field: str) -> None:
    entry = ENTRY.replace('model = "m"', 'model = "m"\naliases = ["n"]')
    for name in ("m", "n", ""):
        made(tmp_path, f'{entry}\n[scheduler]\n{field} = "{name}"\n').instances(Device.CPU)
    with pytest.raises(ConfigError, match=rf"scheduler\.{field}: 'x'.*served: m, n"):
        made(tmp_path, f'{entry}\n[scheduler]\n{field} = "x"\n').instances(Device.CPU)


@pytest.mark.parametrize(
    ("endpoint", "address"),
    [
        ("", None),
        ("collector:1234", Address("collector", 1234)),
        ("http://127.0.0.1:4317", Address("127.0.0.1", 4317)),
        ("https://otel.example.org", Address("otel.example.org", 4317)),
        ("[::1]:5", Address("::1", 5)),
    ],
)
def test_a_collector_is_an_address_or_a_url(endpoint: str, address: Address | None) -> None:
    assert otlp_address(endpoint) == address


@pytest.mark.parametrize(
    "endpoint",
    ["not a url", "ftp://x:1", "x:y", "http://x:1/path", "http://", "[::1", "a b:1", "x:99999"],
)
def test_what_names_no_collector_is_refused_when_the_file_is_read(
    tmp_path: Path, endpoint: str
) -> None:
    with pytest.raises(ConfigError, match=r"mesh\.otlp_endpoint"):
        made(tmp_path, f'[mesh]\notlp_endpoint = "{endpoint}"\n')


@pytest.mark.parametrize("command", ["config", "up"])
@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("SLUICE_SCHEDULER_PLACEMENT", "random", "scheduler.placement: 'random'"),
        ("SLUICE_SCHEDULER_PLACEMNT", "weighted", "no setting scheduler.placemnt"),
        ("SLUICE_SCHEDULER_ALIASES", "chat", "scheduler.aliases: 'chat'"),
        ("SLUICE_SCHEDULER_TENANT_WEIGHTS", "dev=0", "scheduler.tenant_weights: 'dev=0'"),
        ("SLUICE_SCHEDULER_PRICES", "m=1", "scheduler.prices: 'm=1'"),
        ("SLUICE_EXECUTION_DRAIN_GRACE_S", "-1", "execution.drain_grace_s"),
        ("SLUICE_INFERENCE_REQUIRE_GRANTS", "false", "inference.require_grants"),
        ("SLUICE_STATE_PROBE_LAG_S", "soon", "state.probe_lag_s"),
    ],
)
def test_what_a_service_would_refuse_is_refused_before_any_starts(
    command: str,
    variable: str,
    value: str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "sluice.toml"
    path.write_text(ENTRY)
    monkeypatch.setenv(variable, value)
    arguments = ["--engine", "simulated"] if command == "up" else []
    assert run([command, "--config", str(path), *arguments], {}) == EXIT_USAGE
    said = capsys.readouterr()
    assert words in said.err
    assert not said.out
    assert list(tmp_path.iterdir()) == [path]


def test_a_setting_in_the_file_that_no_service_has_is_refused(tmp_path: Path) -> None:
    settings_page.check(made(tmp_path))
    with pytest.raises(ConfigError, match=r"scheduler\.placemnt: there is no such setting"):
        settings_page.check(made(tmp_path, f'[scheduler]\nplacemnt = "weighted"\n{ENTRY}'))


@pytest.mark.parametrize("entry", ["10.0.0.1", "10.0.0.1/8", "crm.internal", "", "crm:0"])
def test_a_network_of_registered_tools_that_is_none_is_refused(tmp_path: Path, entry: str) -> None:
    with pytest.raises(ConfigError, match=r"mesh\.registered_private_allowed"):
        made(tmp_path, f'[mesh]\nregistered_private_allowed = ["10.0.0.0/8", "{entry}"]\n')


def test_networks_of_registered_tools_are_networks_and_hosts(tmp_path: Path) -> None:
    text = '[mesh]\nregistered_private_allowed = ["10.0.0.0/8", "crm.internal:8443"]\n'
    first, second = made(tmp_path, text).mesh.registered_private()
    assert str(first.network) == "10.0.0.0/8"
    assert (second.host, second.port) == ("crm.internal", 8443)
