"""A bad configuration refuses the start by name; a bad reload changes nothing and is counted.

Goal: whatever is wrong in file or environment, a service says which setting it is, what may stand
there, and ends with the status that tells a supervisor not to start it again; a running scheduler
whose tenants file becomes garbage goes on with the last good one. Method: the real processes, one
kind of fault each (every setting of every section in both directions is
tests/unit/sluice/test_config.py, an [[instance]]'s tests/unit/inference/test_config.py); then one
scheduler under changing tenants files; then 600 random tenants files in process. Oracle: exit
status 78, one line on stderr; who is let in; the counter as exported. Seed: fixed by
`derandomize`.

Seen to fail on mutants: `load` ignoring unknown keys; `run` not knowing ConfigError; `TenantsFile`
taking `tenant = 3` (the scheduler ended); `refresh` emptying the table when a file is bad;
`reloads_failed` not exported.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import subprocess
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.adapters.tenants_file import TenantsFileError, parse
from sluice.command.toml_text import dumps
from sluice.process import EXIT_CONFIG
from sluice.scheduler.v1 import generate_pb2, scheduler_pb2_grpc
from sluice.telemetry_names import CONFIG_RELOADS
from tests.hermetic.mesh import Mesh, Shape, prepare
from tests.otlp_receiver import otlp_receiver

LIMIT_S = 60.0


@dataclass(frozen=True)
class Case:
    """One fault: the process that has it, what is wrong, and the words of the refusal."""

    process: str
    where: str
    words: tuple[str, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    shape: Shape = field(default_factory=Shape)
    spoil: Callable[[Mesh], object] = bool
    """Applied to the files of the mesh before the start."""


def _append(text: str) -> Callable[[Mesh], object]:
    def spoil(mesh: Mesh) -> None:
        path = mesh.folder / "sluice.toml"
        path.write_text(path.read_text() + text)

    return spoil


def _inside(section: str, line: str) -> Callable[[Mesh], object]:
    def spoil(mesh: Mesh) -> None:
        path = mesh.folder / "sluice.toml"
        text = path.read_text()
        assert text.count(f"[{section}]\n") == 1
        path.write_text(text.replace(f"[{section}]\n", f"[{section}]\n{line}\n"))

    return spoil


CASES = {
    "a number above its range, in the environment": Case(
        "scheduler-0",
        "scheduler.write_share",
        ("1.5", "0.05 to 1"),
        {"SLUICE_SCHEDULER_WRITE_SHARE": "1.5"},
    ),
    "a number below its range, in the file": Case(
        "execution-0",
        "execution.drain_grace_s",
        ("-1.0", "0 to 3600 s"),
        spoil=_inside("execution", "drain_grace_s = -1"),
    ),
    "a text where a number belongs": Case(
        "sim-0",
        "inference.drain_grace_s",
        ("'soon'", "number"),
        {"SLUICE_INFERENCE_DRAIN_GRACE_S": "soon"},
    ),
    "a setting that is not one, in the file": Case(
        "execution-0",
        "execution.bindd",
        ("no such setting",),
        spoil=_inside("execution", "bindd=1"),
    ),
    "a setting that is not one, in the environment": Case(
        "sim-0",
        "SLUICE_INFERENCE_REQUIRE_GRANTS",
        ("inference.require_grants",),
        {"SLUICE_INFERENCE_REQUIRE_GRANTS": "false"},
    ),
    "a word that is no choice": Case(
        "execution-0",
        "mesh.log_level",
        ("'loud'", "one of debug, info, warning, error"),
        {"SLUICE_MESH_LOG_LEVEL": "loud"},
    ),
    "a list that is too short": Case(
        "scheduler-0",
        "scheduler.executions",
        ("1 to 64",),
        {"SLUICE_SCHEDULER_EXECUTIONS": ""},
    ),
    "an entry of a list that has another form": Case(
        "scheduler-0", "scheduler.aliases", ("'fast'",), {"SLUICE_SCHEDULER_ALIASES": "fast"}
    ),
    "an instance that is not in the file": Case(
        "sim-0", "inference.instance", ("'sim-7'", "sim-0"), {"SLUICE_INFERENCE_INSTANCE": "sim-7"}
    ),
    "a setting of the engine": Case(
        "sim-0",
        "instance.sim-0",
        ("decode_step_ms", "0.01"),
        shape=Shape(instances={"sim-0": {"decode_step_ms": 0.0}}),
    ),
    "a file that is not TOML": Case(
        "execution-0", "sluice.toml", ("is not TOML",), spoil=_append("\n= =\n")
    ),
    "a file that is not there": Case(
        "scheduler-0", "sluice.toml", ("cannot be read",), spoil=lambda m: _gone(m, "sluice.toml")
    ),
    "tenants that are none": Case(
        "scheduler-0",
        "scheduler.tenants_file",
        ("tenant[1].ceiling", "critical"),
        shape=Shape(tenants='[[tenant]]\nname = "x"\nceiling = "urgent"\n'),
    ),
    "a state service at no address": Case(
        "scheduler-0",
        "scheduler.state",
        ("'unix:/x'", "host:port"),
        {"SLUICE_SCHEDULER_STATE": "unix:/x"},
    ),
    "a store of another kind": Case(
        "state-0",
        "state.durable_url",
        ("redis://",),
        {"SLUICE_STATE_DURABLE_URL": "http://:secret@x"},
        shape=Shape(state={}),
    ),
    "a key that is not there": Case(
        "scheduler-0",
        "scheduler.keys_dir",
        ("grant-private.pem",),
        spoil=lambda m: _gone(m, "runtime/keys/grant-private.pem"),
    ),
}


def _gone(mesh: Mesh, name: str) -> None:
    (mesh.folder / name).unlink()


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """Exit status and stderr of every case; a few run at a time, each of them is mostly start."""
    found: dict[str, tuple[int, str]] = {}
    waiting = list(CASES.items())
    while waiting:
        batch, waiting = waiting[:4], waiting[4:]
        running = []
        for name, case in batch:
            made = prepare(tmp_path_factory.mktemp("case"), case.shape)
            case.spoil(made)
            process = made[case.process]
            process.environ = {**process.environ, **case.environ}
            process.start()
            running.append((name, process))
        for name, process in running:
            try:
                found[name] = (process.ended(LIMIT_S), process.text())
            except subprocess.TimeoutExpired:
                found[name] = (-1, process.text())
                process.kill()
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_service_refuses_to_start_and_names_the_setting(
    refusals: dict[str, tuple[int, str]], name: str
) -> None:
    case = CASES[name]
    status, text = refusals[name]
    assert status == EXIT_CONFIG, text
    (line,) = text.splitlines()
    assert line.startswith("configuration: ")
    for word in (case.where, *case.words):
        assert word in line


def _equal(read: Callable[[], float], value: float) -> bool:
    return read() == value


def _key_hash(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


GOOD: Mapping[str, Any] = {
    "admin_key_sha256": [_key_hash("root")],
    "tenant": [
        {
            "name": "dev",
            "key_sha256": [_key_hash("first"), _key_hash("second")],
            "ceiling": "interactive",
            "default_class": "standard",
            "models": ["m"],
            "agents": False,
            "sessions": True,
        },
        {"name": "other", "key_sha256": []},
    ],
}
GARBAGE = (b"not toml [", b"\xff\x00\xfe", b"tenant = 3\n")


def test_a_running_scheduler_keeps_the_last_good_tenants_and_counts(tmp_path: Path) -> None:
    with otlp_receiver() as receiver:
        telemetry = {"otlp_endpoint": receiver.endpoint, "metric_interval_s": 1.0}
        made = prepare(tmp_path, Shape(mesh=telemetry))
        tenants = made.runtime / "tenants.toml"
        good = tenants.read_text()
        scheduler = made["scheduler-0"]
        scheduler.start()
        try:
            stub = scheduler_pb2_grpc.SchedulerServiceStub(made.channel("scheduler-0"))

            def status(key: str) -> grpc.StatusCode:
                metadata = (("authorization", f"Bearer {key}"),)
                try:
                    stub.ListModels(
                        generate_pb2.ListModelsRequest(),
                        metadata=metadata,
                        timeout=20,
                        wait_for_ready=True,
                    )
                except grpc.RpcError as error:
                    return error.code()
                return grpc.StatusCode.OK

            def counted(result: str) -> float:
                return receiver.sum("scheduler", CONFIG_RELOADS.name, result=result).value

            assert status(made.api_key) is grpc.StatusCode.OK
            for number, garbage in enumerate(GARBAGE, 1):
                tenants.write_bytes(garbage)
                refused = partial(counted, "refused")
                receiver.until(partial(_equal, refused, number), f"{number} are refused")
                assert status(made.api_key) is grpc.StatusCode.OK
                assert status("unknown") is grpc.StatusCode.UNAUTHENTICATED
            assert counted("ok") == 0
            tenants.write_text(good.replace(_key_hash(made.api_key), _key_hash("fresh")))
            receiver.until(lambda: counted("ok") == 1, "the good one is read")
            assert status("fresh") is grpc.StatusCode.OK
            assert status(made.api_key) is grpc.StatusCode.UNAUTHENTICATED
            assert counted("refused") == len(GARBAGE)
            assert scheduler.alive
        finally:
            made.channel("scheduler-0").close()
            if scheduler.alive:
                scheduler.kill()


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 2**40) | st.floats() | st.text(max_size=70),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text("abcdenmty_", min_size=1, max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)


def _places(value: object, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value)  # type: ignore[arg-type]
    for key, item in inner:
        yield (*path, key)
        if isinstance(item, dict | list):
            yield from _places(item, (*path, key))


PLACES = list(_places(GOOD))


@settings(max_examples=400, deadline=None, derandomize=True)
@given(place=st.sampled_from(PLACES), value=VALUES)
def test_one_wrong_value_anywhere_is_taken_or_refused_by_name(
    place: tuple[Any, ...], value: object
) -> None:
    document = copy.deepcopy(dict(GOOD))
    holder: Any = document
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = value
    try:
        text = dumps(document)
        tomllib.loads(text)
    except (TypeError, ValueError):
        text = f"{place[0]} = @"  # what TOML cannot hold
    with contextlib.suppress(TenantsFileError):
        parse(text)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(text=st.text(max_size=200))
def test_any_text_is_taken_or_refused(text: str) -> None:
    with contextlib.suppress(TenantsFileError):
        parse(text)
