"""`sluice up` and `sluice down` with a real supervisor, a real Envoy and stand-in services.

Goal: whatever happens around them, both say what is the case and leave no mess.
Method: the real command line in a folder and on ports of its own; processes are killed, made to
misbehave, or put in its way. Oracle: exit status, one clear line, run files, and the processes of
the machine read without the product's own search. No seed: nothing here is random but the ports.

Seen to fail on mutants of `sluice/command`: `processes._family` without groups (a child that lost
its parent survives `down`), `Service.end_group` doing nothing (one that hides survives a crash),
`startup._start` without its `except BaseException` (Ctrl-C leaves processes), `supervisor._keep`
without its loop (a killed service stays down), `preflight._ports` returning nothing (the busy port
is not named).
"""

from __future__ import annotations

import os
import signal
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from redis import Redis

from sluice.command import log_files, processes
from sluice.command.probe import Health, check_grpc
from tests.hermetic.local_mesh import LocalMesh, kill, local_mesh, plain, until

UP = ("up", "--engine", "simulated", "--no-question", "--ready-timeout", "90")
NAMES = ("envoy", "scheduler", "execution", "agent", "chat-0", "embed-0", "state", "store")


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[LocalMesh]:
    with local_mesh(tmp_path, stand_ins=True) as made:
        yield made


def up(mesh: LocalMesh, *more: str) -> str:
    done = mesh.run(*UP, *more)
    assert done.returncode == 0, done.stdout + done.stderr
    return plain(done.stdout)


def serves(mesh: LocalMesh, name: str) -> bool:
    return check_grpc(mesh.record(name).ports["api"]) is Health.SERVING


def has_ended(process: psutil.Process) -> bool:
    # A zombie that its new parent has not reaped yet has ended.
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_up_starts_everything_and_says_how_to_call_it(mesh: LocalMesh) -> None:
    said = up(mesh)
    for name in NAMES:
        assert processes.is_alive(mesh.record(name).identity), name
    assert "SIMULATED" in said
    for how in ("grpcurl", "curl", "import grpc", "api-key", "logs"):
        assert how in said
    assert "Traceback" not in said


def test_the_first_start_makes_keys_that_only_their_owner_can_read(mesh: LocalMesh) -> None:
    up(mesh)
    for name in ("api-key", "admin-key", "tenants.toml", "keys/grant-private.pem"):
        mode = stat.S_IMODE((mesh.runtime / name).stat().st_mode)
        assert mode == 0o600, name
    key = (mesh.runtime / "api-key").read_text()
    mesh.run("down")
    up(mesh)
    assert (mesh.runtime / "api-key").read_text() == key


def test_down_leaves_no_process_and_a_second_down_says_so(mesh: LocalMesh) -> None:
    up(mesh)
    down = mesh.run("down")
    assert down.returncode == 0
    assert "no process is left" in down.stdout
    assert mesh.living() == []
    again = mesh.run("down")
    assert again.returncode == 0
    assert "No mesh is running" in again.stdout


def test_down_before_any_up_is_harmless(mesh: LocalMesh) -> None:
    down = mesh.run("down")
    assert (down.returncode, down.stdout.strip()) == (0, "No mesh is running.")


def test_a_second_up_changes_nothing_and_says_that_it_runs(mesh: LocalMesh) -> None:
    up(mesh)
    before = {name: mesh.record(name).pid for name in NAMES}
    said = up(mesh)
    assert "already running" in said
    assert {name: mesh.record(name).pid for name in NAMES} == before


def test_up_for_another_engine_refuses_to_touch_the_running_mesh(mesh: LocalMesh) -> None:
    up(mesh)
    other = mesh.run("up", "--engine", "vllm", "--no-question")
    assert other.returncode == 1
    assert "make down" in other.stderr
    assert processes.is_alive(mesh.record("chat-0").identity)


def test_up_for_other_processes_refuses_at_once_and_leaves_the_running_mesh(
    mesh: LocalMesh,
) -> None:
    up(mesh)
    mesh.environ["SLUICE_LOCAL_SCHEDULERS"] = "2"
    other = mesh.run(*UP)  # would wait for a scheduler that nobody starts
    assert other.returncode == 1
    assert "other processes or ports" in other.stderr
    assert processes.is_alive(mesh.record("chat-0").identity)


def test_a_busy_port_is_named_with_its_owner_and_nothing_is_started(mesh: LocalMesh) -> None:
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", mesh.port))
        taken.listen()
        done = mesh.run(*UP)
    assert done.returncode == 1
    assert f"port {mesh.port} (envoy, http)" in done.stderr
    assert f"pid {psutil.Process().pid}" in done.stderr
    assert mesh.living() == []
    up(mesh)


def test_a_killed_service_is_started_again(mesh: LocalMesh) -> None:
    up(mesh)
    killed = mesh.record("execution").pid
    kill(killed)
    until(lambda: mesh.record("execution").pid not in (0, killed), "a new execution process")
    until(lambda: serves(mesh, "execution"), "execution serves")
    assert mesh.record("execution").restarts == 1
    assert mesh.record("execution").last_exit == "SIGKILL"


def test_after_sigkill_of_the_supervisor_up_ends_the_orphans_and_starts_afresh(
    mesh: LocalMesh,
) -> None:
    up(mesh)
    orphans = {name: mesh.record(name).identity for name in NAMES}
    kill(mesh.record("supervisor").pid)
    until(lambda: not processes.is_alive(mesh.record("supervisor").identity), "it is dead")
    assert all(processes.is_alive(one) for one in orphans.values()), "the mesh goes on"
    said = up(mesh)
    assert "not stopped in order" in said
    assert not any(processes.is_alive(one) for one in orphans.values())


def test_down_finds_orphans_whose_records_are_lost(mesh: LocalMesh) -> None:
    up(mesh)
    store = psutil.Process(mesh.record("store").pid)
    kill(mesh.record("supervisor").pid)
    for path in mesh.paths.run.glob("*.json"):
        path.unlink()
    down = mesh.run("down")
    assert down.returncode == 0
    assert mesh.living() == []
    assert has_ended(store)


def test_down_ends_a_child_that_hides_its_mark_and_ignores_sigterm(mesh: LocalMesh) -> None:
    mesh.behave(chat_0={"stray": True})
    up(mesh)
    (stray,) = psutil.Process(mesh.record("chat-0").pid).children()
    assert mesh.run("down").returncode == 0
    until(lambda: has_ended(stray), "the child has ended", limit_s=2)


def test_down_finds_a_hidden_child_that_has_lost_parent_and_supervisor(mesh: LocalMesh) -> None:
    mesh.behave(chat_0={"stray": True})
    up(mesh)
    leader = mesh.record("chat-0").identity
    (stray,) = psutil.Process(leader.pid).children()
    kill(mesh.record("supervisor").pid)
    until(lambda: not processes.is_alive(mesh.record("supervisor").identity), "it is dead")
    kill(leader.pid)
    until(lambda: not processes.is_alive(leader), "the parent is dead")
    assert stray.is_running()
    assert mesh.run("down").returncode == 0
    until(lambda: has_ended(stray), "the child has ended", limit_s=2)


def test_what_a_crashed_service_leaves_is_ended_before_it_starts_again(mesh: LocalMesh) -> None:
    mesh.behave(chat_0={"stray": True})
    up(mesh)
    first = mesh.record("chat-0").pid
    (stray,) = psutil.Process(first).children()
    kill(first)
    until(lambda: mesh.record("chat-0").pid not in (0, first), "a new process")
    assert has_ended(stray)


def test_down_kills_a_service_that_does_not_stop_within_its_drain_time(mesh: LocalMesh) -> None:
    mesh.behave(execution={"ignore_term": True})
    up(mesh)
    down = mesh.run("down")
    assert down.returncode == 0
    assert mesh.living() == []


def test_a_service_that_keeps_crashing_fails_the_start_and_shows_its_log(mesh: LocalMesh) -> None:
    mesh.behave(scheduler={"exit_code": 3})
    done = mesh.run(*UP)
    assert done.returncode == 1
    assert "scheduler ended" in done.stderr
    assert "scheduler ends as it was told" in done.stderr
    assert mesh.living() == []


def test_a_wrong_configuration_of_a_service_fails_the_start_at_once(mesh: LocalMesh) -> None:
    mesh.behave(embed_0={"exit_code": 78})
    done = mesh.run(*UP)
    assert done.returncode == 1
    assert "embed-0: its configuration is wrong" in done.stderr
    assert mesh.living() == []


def test_a_service_that_is_never_ready_fails_the_start_at_the_limit(mesh: LocalMesh) -> None:
    mesh.behave(chat_0={"serving_after_s": 300})
    done = mesh.run("up", "--engine", "simulated", "--no-question", "--ready-timeout", "3")
    assert done.returncode == 1
    assert "chat-0 was not ready after 3 s" in done.stderr
    assert mesh.living() == []


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["ctrl-c", "sigterm"]
)
def test_interrupting_up_cleans_up(mesh: LocalMesh, number: signal.Signals, status: int) -> None:
    mesh.behave(chat_0={"serving_after_s": 300})
    starting = mesh.start(*UP)
    until(lambda: len(mesh.living()) >= len(NAMES), "all processes are started")
    starting.send_signal(number)
    said, _ = starting.communicate(timeout=60)
    assert starting.returncode == status, said
    assert "Nothing is left running" in said
    assert "Traceback" not in said
    assert mesh.living() == []


def test_a_second_up_at_the_same_time_is_refused(mesh: LocalMesh) -> None:
    mesh.behave(chat_0={"serving_after_s": 300})
    starting = mesh.start(*UP)
    until(lambda: bool(mesh.living()), "the first one has started something")
    second = mesh.run(*UP)
    assert second.returncode == 1
    assert "another `sluice up`" in second.stderr
    starting.send_signal(signal.SIGINT)
    starting.communicate(timeout=60)


def test_down_during_up_stops_both(mesh: LocalMesh) -> None:
    mesh.behave(chat_0={"serving_after_s": 300})
    starting = mesh.start(*UP)
    until(lambda: len(mesh.living()) >= len(NAMES), "all processes are started")
    assert mesh.run("down").returncode == 0
    said, _ = starting.communicate(timeout=60)
    assert starting.returncode == 1
    assert "the mesh was stopped while it started" in said
    assert mesh.living() == []


def test_logs_are_bounded_and_shown(mesh: LocalMesh) -> None:
    mesh.environ["SLUICE_LOCAL_LOG_BYTES_MAX"] = "65536"
    up(mesh)
    log = mesh.paths.log("execution")
    with log.open("a") as file:
        file.write(("x" * 99 + "\n") * 1_000)
    until(lambda: log.stat().st_size < 65_536, "the log is rotated")
    assert log.with_name("execution.log.1").stat().st_size >= 99_000
    shown = mesh.run("logs", "chat-0")
    assert "stand-in started" in shown.stdout


def test_logs_follow_a_log_through_its_rotation(mesh: LocalMesh) -> None:
    log = mesh.paths.log("execution")
    up(mesh)
    following = mesh.start("logs", "execution", "--follow", "--raw", "--lines", "1")
    assert following.stdout is not None
    assert "stand-in started" in following.stdout.readline()
    for text in ("before", "after"):
        with log.open("a") as file:
            file.write(f"{text}\n")
        assert following.stdout.readline() == f"{text}\n"
        log_files.rotate(log, 0, kept=2)
        # The reader looks every 0.3 s; a shorter file tells it that the log was rotated.
        until(lambda: following.poll() is None, "it goes on")
    following.send_signal(signal.SIGINT)
    following.communicate(timeout=10)
    assert following.returncode == 130


def test_status_shows_every_process_and_its_health(mesh: LocalMesh) -> None:
    assert mesh.run("status").returncode == 3
    up(mesh)
    shown = mesh.run("status")
    assert shown.returncode == 0, shown.stderr
    for name in NAMES:
        (line,) = [line for line in shown.stdout.splitlines() if line.startswith(f"{name} ")][:1]
        assert str(mesh.record(name).pid) in line
        assert "serving" in line


def test_several_schedulers_are_started_and_each_comes_back(mesh: LocalMesh) -> None:
    mesh.environ["SLUICE_LOCAL_SCHEDULERS"] = "2"
    up(mesh)
    assert all(serves(mesh, name) for name in ("scheduler", "scheduler-1"))
    first = mesh.record("scheduler-1").pid
    kill(first)
    until(lambda: mesh.record("scheduler-1").pid not in (0, first), "a new process")
    until(lambda: serves(mesh, "scheduler-1"), "it serves")


def test_what_the_store_was_given_is_there_after_down_and_up(mesh: LocalMesh) -> None:
    up(mesh)
    with Redis(port=int(mesh.record("store").ports["store"].rpartition(":")[2])) as store:
        store.set("sluice:test", "kept")
    assert mesh.run("down").returncode == 0
    assert stat.S_IMODE(mesh.paths.store.stat().st_mode) == 0o700
    up(mesh)
    with Redis(port=int(mesh.record("store").ports["store"].rpartition(":")[2])) as store:
        assert store.get("sluice:test") == b"kept"


def test_two_meshes_run_side_by_side(mesh: LocalMesh, tmp_path: Path) -> None:
    up(mesh)
    with local_mesh(tmp_path / "other", stand_ins=True) as other:
        up(other)
        assert other.run("down").returncode == 0
    assert processes.is_alive(mesh.record("scheduler").identity)


def test_the_mesh_survives_the_terminal_that_started_it(mesh: LocalMesh) -> None:
    starting = mesh.start(*UP)
    starting.communicate(timeout=60)
    supervisor = psutil.Process(mesh.record("supervisor").pid)
    assert supervisor.terminal() is None
    groups = {os.getpgid(mesh.record(name).pid) for name in NAMES}
    assert len(groups) == len(NAMES)
