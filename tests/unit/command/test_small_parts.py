"""Backoff, logs, records and first-time files."""

from __future__ import annotations

import hashlib
import os
import stat
import tomllib
from pathlib import Path

import pytest

from sluice.command import first_files, log_files
from sluice.command.backoff import CAP_S, FIRST_S, STABLE_S, Backoff
from sluice.command.failures import StartError
from sluice.command.log_lines import readable
from sluice.command.run_files import (
    Plan,
    Record,
    ServicePlan,
    read_plan,
    read_record,
    read_records,
    write_plan,
    write_record,
)


def test_the_delay_doubles_from_100_ms_to_10_s_and_stays_there() -> None:
    backoff = Backoff()
    delays = [backoff.crashed(0.5) for _ in range(1_000)]
    assert delays[:8] == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0]
    assert set(delays[7:]) == {CAP_S}


def test_a_minute_without_a_crash_starts_the_delay_anew() -> None:
    backoff = Backoff()
    for _ in range(9):
        backoff.crashed(STABLE_S - 0.1)
    assert backoff.crashed(STABLE_S) == FIRST_S


def test_a_log_is_rotated_in_place_and_old_ones_go(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    with path.open("a") as writer:
        for number in range(4):
            writer.write(f"{number}" * 10)
            writer.flush()
            assert log_files.rotate(path, 9, kept=2)
            assert path.stat().st_size == 0
        writer.write("new")
    assert path.read_text() == "new"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["a.log", "a.log.1", "a.log.2"]
    assert (tmp_path / "a.log.1").read_text() == "3" * 10
    assert (tmp_path / "a.log.2").read_text() == "2" * 10


def test_a_log_at_its_limit_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("x" * 10)
    assert not log_files.rotate(path, 10, kept=2)
    assert not log_files.rotate(tmp_path / "none.log", 10, kept=2)


def test_the_tail_reads_the_end_of_a_large_log_only(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("".join(f"{number}\n" for number in range(200_000)))
    assert log_files.tail(path, 2) == ["199998", "199999"]
    assert log_files.tail(tmp_path / "none.log", 2) == []


def test_a_terminal_cannot_be_steered_by_what_is_printed() -> None:
    assert log_files.printable("a\x1b[31mb\x07\r\nc\td\u202e") == "a[31mb\nc\td"


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("plain", "plain"),
        ("{not json", "{not json"),
        ('{"a": 1}', '{"a": 1}'),
        (
            '{"time": "T", "level": "info", "service": "s", "message": "m", "ports": "1"}',
            "T INFO    m  ports=1",
        ),
    ],
)
def test_a_structured_line_is_shown_readably_and_any_other_as_it_is(line: str, shown: str) -> None:
    assert readable(line) == shown


PLAN = Plan(
    mark="m",
    fingerprint="f",
    engine="vllm",
    runtime="/r",
    root="/",
    log_bytes_max=1,
    log_files_kept=1,
    services=(
        ServicePlan("a", ("x", "y"), {"K": "V"}, {"api": "h:1"}, 0, 5.0),
        ServicePlan("b", ("x",), {}, {}, 1, 7.0),
        ServicePlan("c", ("x",), {}, {}, 1, 9.0),
    ),
)


def test_plans_and_records_read_back_equal(tmp_path: Path) -> None:
    write_plan(tmp_path / "plan.json", PLAN)
    assert read_plan(tmp_path / "plan.json") == PLAN
    record = Record("a", 1, 2.0, "running", ("x",), {"api": "h:1"}, 3, "SIGKILL")
    write_record(tmp_path / "a.json", record)
    assert read_records(tmp_path) == {"a": record}


def test_a_stop_takes_at_most_the_longest_drain_of_each_order() -> None:
    assert PLAN.stop_limit_s == 14.0


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"name": 1, "command": null}'])
def test_a_damaged_file_reads_as_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    assert read_record(path) is None
    assert read_plan(path) is None


def test_first_files_are_made_once_and_secrets_are_private(tmp_path: Path) -> None:
    os.umask(0o022)
    secrets = first_files.prepare(tmp_path)
    assert first_files.prepare(tmp_path) == secrets
    assert secrets.api_key != secrets.admin_key
    for name in ("api-key", "admin-key", "tenants.toml"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600


def test_the_tenants_file_knows_both_keys_as_hashes_only(tmp_path: Path) -> None:
    secrets = first_files.prepare(tmp_path)
    text = (tmp_path / "tenants.toml").read_text()
    document = tomllib.loads(text)
    (tenant,) = document["tenant"]
    assert tenant["name"] == "dev"
    assert tenant["key_sha256"] == [hashlib.sha256(secrets.api_key.encode()).hexdigest()]
    assert document["admin_key_sha256"] == [hashlib.sha256(secrets.admin_key.encode()).hexdigest()]
    assert secrets.api_key not in text


def test_the_first_tenant_may_use_agents_with_the_tools_of_the_configuration(
    tmp_path: Path,
) -> None:
    def tenant(folder: Path) -> dict[str, object]:
        document = tomllib.loads((folder / "tenants.toml").read_text())
        found: dict[str, object] = document["tenant"][0]
        return found

    first_files.prepare(tmp_path / "plain")
    assert (tenant(tmp_path / "plain")["agents"], tenant(tmp_path / "plain")["tools"]) == (
        False,
        [],
    )
    config = tmp_path / "sluice.toml"
    config.write_text('[[tool]]\nname = "clock"\n[[tool]]\nname = "desk"\n')
    assert first_files.main([str(tmp_path / "made"), str(config)]) == 0
    made = tenant(tmp_path / "made")
    assert (made["agents"], made["tools"]) == (True, ["clock", "desk"])
    config.write_text("tool = 3\n")
    assert first_files.main([str(tmp_path / "wrong"), str(config)]) == 1


def test_a_secret_that_others_can_read_is_closed(tmp_path: Path) -> None:
    first_files.prepare(tmp_path)
    (tmp_path / "api-key").chmod(0o644)
    first_files.prepare(tmp_path)
    assert stat.S_IMODE((tmp_path / "api-key").stat().st_mode) == 0o600


def test_a_tenants_file_that_does_not_know_the_key_is_not_started_with(tmp_path: Path) -> None:
    first_files.prepare(tmp_path)
    (tmp_path / "api-key").unlink()
    with pytest.raises(StartError, match=r"tenants\.toml does not know the key"):
        first_files.prepare(tmp_path)
