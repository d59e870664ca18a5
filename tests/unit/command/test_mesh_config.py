"""How `sluice.toml` becomes instances for a machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluice.config import ConfigError
from sluice.mesh_config import Address, Device, Engine, MeshFile, parse_address, read

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
