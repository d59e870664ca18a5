"""One description of the mesh for this machine and for containers."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from sluice.command.topology import Kind, Target, Topology, build, compose_place, local_place
from sluice.config import ConfigError
from sluice.mesh_config import Device, Engine, read

ROOT = Path(__file__).resolve().parents[3]


def local(**environ: str) -> Topology:
    file = read(ROOT / "sluice.toml", environ)
    return build(file, local_place(file, "envoy", "valkey-server"), Device.CPU)


def compose() -> Topology:
    return build(read(ROOT / "sluice.toml", {}), compose_place(), Device.CPU)


def test_local_and_compose_run_the_same_processes_with_the_same_wiring() -> None:
    here, there = local(), compose()
    assert [one.name for one in here.processes] == [one.name for one in there.processes]
    for left, right in zip(here.processes, there.processes, strict=True):
        own = {"SLUICE_MARK", "SLUICE_MESH_RUNTIME_DIR"}
        if left.kind is Kind.STORE:
            # A container has its own image, address and volume; it keeps data in the same way.
            assert there.process("store").command[1:] == left.command[1 : len(right.command)]
            continue
        if left.kind is not Kind.ENVOY:
            assert left.env.keys() - own == right.env.keys()
            assert left.command[1:] == right.command[1:]
        assert left.depends == right.depends
        assert left.drain_s == right.drain_s
        assert [one.address.port for one in left.ports] == [one.address.port for one in right.ports]


def test_every_address_that_is_dialled_is_one_that_somebody_serves() -> None:
    topology = local()
    served = {str(port.address) for one in topology.processes for port in one.ports}
    scheduler = topology.process("scheduler").env
    dialled = scheduler["SLUICE_SCHEDULER_EXECUTIONS"].split(",")
    dialled += [
        entry.partition("=")[2] for entry in scheduler["SLUICE_SCHEDULER_INSTANCES"].split(",")
    ]
    dialled += topology.envoy.schedulers
    dialled.append(scheduler["SLUICE_SCHEDULER_STATE"])
    agent = topology.process("agent").env
    dialled += [agent["SLUICE_AGENT_STATE"], *agent["SLUICE_AGENT_SCHEDULERS"].split(",")]
    dialled += topology.process("execution").env["SLUICE_EXECUTION_AGENTS"].split(",")
    url = topology.process("state").env["SLUICE_STATE_DURABLE_URL"]
    dialled.append(url.removeprefix("redis://").removesuffix("/0"))
    assert set(dialled) <= served


def test_containers_find_each_other_by_name() -> None:
    topology = compose()
    scheduler = topology.process("scheduler").env
    assert scheduler["SLUICE_SCHEDULER_EXECUTIONS"] == "execution:50061"
    assert "chat-0=chat-0:50081" in scheduler["SLUICE_SCHEDULER_INSTANCES"]
    assert topology.envoy.schedulers == ("scheduler:50051",)
    assert scheduler["SLUICE_SCHEDULER_STATE"] == "state:50091"
    assert topology.process("state").env["SLUICE_STATE_DURABLE_URL"] == "redis://store:6379/0"
    agent = topology.process("agent").env
    assert agent["SLUICE_AGENT_SCHEDULERS"] == "scheduler:50052"
    assert agent["SLUICE_AGENT_STATE"] == "state:50091"
    assert topology.process("execution").env["SLUICE_EXECUTION_AGENTS"] == "agent:50071"
    assert topology.target is Target.COMPOSE


def test_the_store_is_on_loopback_and_acknowledges_what_is_on_the_disk() -> None:
    command = list(local().process("store").command)
    options = dict(zip(command[1::2], command[2::2], strict=True))
    assert options["--bind"] == "127.0.0.1"
    assert options["--appendfsync"] == "always"
    assert options["--maxmemory-policy"] == "noeviction"


@pytest.mark.parametrize(
    ("variable", "value"),
    [("SLUICE_LOCAL_STORE_PORT", "0"), ("SLUICE_STATE_DURABLE_URL", "redis://elsewhere:6379/0")],
)
def test_no_store_is_started_where_another_is_named(variable: str, value: str) -> None:
    topology = local(**{variable: value})
    assert Kind.STORE not in {one.kind for one in topology.processes}
    # Its own configuration and environment say which.
    assert "SLUICE_STATE_DURABLE_URL" not in topology.process("state").env


def test_several_schedulers_differ_in_name_and_ports_only_and_the_edge_knows_all() -> None:
    topology = local(SLUICE_LOCAL_SCHEDULERS="3")
    found = [one for one in topology.processes if one.kind is Kind.SCHEDULER]
    assert [one.name for one in found] == ["scheduler", "scheduler-1", "scheduler-2"]
    ports = [port.address.port for one in topology.processes for port in one.ports]
    assert len(set(ports)) == len(ports)
    assert topology.envoy.schedulers == tuple(str(one.probe.address) for one in found)
    assert set(topology.process("envoy").depends) >= {one.name for one in found}
    own = {"SLUICE_SCHEDULER_NAME", "SLUICE_SCHEDULER_BIND", "SLUICE_SCHEDULER_MESH_BIND"}
    shared = [{key: one.env[key] for key in one.env.keys() - own} for one in found]
    assert shared[0] == shared[1] == shared[2]
    assert topology.fingerprint != local().fingerprint


def test_several_agents_differ_in_name_and_port_only_and_are_told_of_runs() -> None:
    topology = local(SLUICE_LOCAL_AGENTS="3", SLUICE_LOCAL_SCHEDULERS="2")
    found = [one for one in topology.processes if one.kind is Kind.AGENT]
    assert [one.name for one in found] == ["agent", "agent-1", "agent-2"]
    ports = [port.address.port for one in topology.processes for port in one.ports]
    assert len(set(ports)) == len(ports)
    own = {"SLUICE_AGENT_NAME", "SLUICE_AGENT_BIND"}
    shared = [{key: one.env[key] for key in one.env.keys() - own} for one in found]
    assert shared[0] == shared[1] == shared[2]
    assert shared[0]["SLUICE_AGENT_SCHEDULERS"] == "127.0.0.1:50052,127.0.0.1:50152"
    told = topology.process("execution").env["SLUICE_EXECUTION_AGENTS"].split(",")
    assert told == [str(one.probe.address) for one in found]


def test_an_agent_ends_its_step_before_the_schedulers_go() -> None:
    assert Kind.AGENT.stop_order < Kind.SCHEDULER.stop_order


def test_schedulers_whose_ports_do_not_exist_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"local\.schedulers"):
        local(SLUICE_LOCAL_SCHEDULERS="16", SLUICE_SCHEDULER_BIND="127.0.0.1:64500")


def test_every_process_of_this_machine_is_marked_and_none_elsewhere() -> None:
    assert all("SLUICE_MARK" in one.env for one in local().processes)
    assert not any("SLUICE_MARK" in one.env for one in compose().processes)


def test_no_process_loses_what_it_depends_on_while_it_drains() -> None:
    topology = local()
    for process in topology.processes:
        for name in process.depends:
            assert topology.process(name).kind.stop_order > process.kind.stop_order


def test_an_instance_is_given_the_public_keys_only() -> None:
    for topology in (local(), compose()):
        for process in topology.processes:
            if process.kind is Kind.INFERENCE:
                assert process.env["SLUICE_INFERENCE_KEYS_DIR"].endswith("keys/grant-public")
                assert "SLUICE_SCHEDULER_KEYS_DIR" not in process.env


def test_the_effective_configuration_holds_what_runs() -> None:
    document = tomllib.loads(local().config_text)
    assert "local" not in document
    (chat, _) = document["instance"]
    assert chat["dtype"] == "float32"
    assert Path(chat["path"]).is_absolute()
    there = tomllib.loads(compose().config_text)["instance"][0]
    assert there["path"] == "/var/lib/sluice-models/smollm2-135m-instruct"


def test_an_offset_moves_every_port() -> None:
    before = {port.address.port for one in local().processes for port in one.ports}
    moved = local(SLUICE_LOCAL_PORT_OFFSET="1000")
    after = {port.address.port for one in moved.processes for port in one.ports}
    assert after == {port + 1000 for port in before}
    assert moved.endpoint.port == 9080


def test_a_port_from_the_environment_is_taken_as_it_is() -> None:
    topology = local(SLUICE_LOCAL_PORT_OFFSET="1000", SLUICE_ENVOY_PORT="8123")
    assert topology.endpoint.port == 8123


def test_the_drain_of_a_process_covers_what_its_service_grants_itself() -> None:
    slow = local(SLUICE_SCHEDULER_DRAIN_GRACE_S="77")
    assert slow.process("scheduler").drain_s > 77


def test_the_fingerprint_changes_with_what_runs_and_only_then() -> None:
    assert local().fingerprint == local().fingerprint
    assert local(SLUICE_ENVOY_PORT="8123").fingerprint != local().fingerprint


@pytest.mark.parametrize(("engine", "simulated"), [(None, False), (Engine.SIMULATED, True)])
def test_a_topology_says_whether_answers_are_simulated(
    engine: Engine | None, simulated: bool
) -> None:
    file = read(ROOT / "sluice.toml", {})
    topology = build(file, local_place(file, "envoy", "valkey-server"), Device.CPU, engine)
    assert topology.simulated is simulated
