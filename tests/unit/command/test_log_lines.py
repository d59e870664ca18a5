"""Log lines for a person, and why a process ended."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sluice.command.log_files import tail
from sluice.command.log_lines import CAUSE_CHARS_MAX, cause, is_noise, merged, readable

TRACEBACK = (
    'Traceback (most recent call last):\n  File "x.py", line 1, in <module>\n'
    "package.OddError: no room\nmore of its text\n"
)
FAILED = json.dumps({"time": "T", "level": "error", "message": "m", "error": TRACEBACK})
ACCESS = json.dumps(
    {
        "time": "T",
        "service": "envoy",
        "listener": "http",
        "method": "POST",
        "path": "/chat",
        "status": 200,
        "grpc_status": "0",
        "duration_ms": 12,
        "upstream": "127.0.0.1:1",
        "request_id": "r",
    }
)


def test_a_traceback_is_shown_by_the_line_that_says_what_happened() -> None:
    assert readable(FAILED) == "T ERROR   m  error=package.OddError: no room"


def test_an_access_line_is_short() -> None:
    assert readable(ACCESS) == (
        "T ACCESS  POST /chat 200  grpc_status=0 duration_ms=12 request_id=r"
    )


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], ""),
        (["starting", '{"message": "m"}'], ""),
        ([FAILED, '{"message": "m"}'], "package.OddError: no room"),
        ([FAILED, "configuration: a.b: -1 is out of range"], "a.b: -1 is out of range"),
        (["configuration: a.b: no", "RuntimeError: Event loop is closed"], "a.b: no"),
        (
            ["Traceback", "  File x", "ModuleNotFoundError: No module"],
            "ModuleNotFoundError: No module",
        ),
    ],
)
def test_the_last_word_of_a_process_is_its_cause(lines: list[str], said: str) -> None:
    assert cause(lines) == said


def test_a_cause_is_one_line_of_bounded_length() -> None:
    assert len(cause([f"configuration: {'x' * 9_000}"])) == CAUSE_CHARS_MAX


def test_the_tail_of_a_run_leaves_out_what_was_there_before(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("old\nnew\n")
    assert tail(path, 9, begin=4) == ["new"]
    # Shorter than it was: it was rotated, and all of it is new.
    assert tail(path, 9, begin=100) == ["old", "new"]


def test_lines_of_several_files_come_in_the_order_of_time() -> None:
    a, b = Path("a.log"), Path("b.log")
    lines = merged(
        {
            a: [
                '{"time": "2026-01-01T00:00:01.500+00:00", "message": "1"}',
                "without a time",
                '{"time": "2026-01-01T00:00:01.400Z", "path": "began before the line above"}',
            ],
            b: ["[2026-01-01 00:00:01.000][1] envoy", "2026-01-01T00:00:02Z supervisor"],
        }
    )
    assert [path for path, _ in lines] == [b, a, a, a, b]


@pytest.mark.parametrize(
    ("path", "noise"),
    [
        ("/grpc.health.v1.Health/Check", True),
        ("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", True),
        ("/sluice.scheduler.v1.SchedulerAdminService/WatchStatus", True),
        ("/sluice.scheduler.v1.SchedulerService/Generate", False),
    ],
)
def test_requests_that_only_look_are_noise(path: str, noise: bool) -> None:
    assert is_noise(json.dumps({"service": "envoy", "path": path})) is noise
    assert not is_noise(json.dumps({"service": "scheduler", "message": path}))
