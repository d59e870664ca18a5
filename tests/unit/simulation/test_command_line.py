"""`python -m scheduler_svc.simulation`, and `sluice simulate`, which starts it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from scheduler_svc.simulation import __main__ as command
from sluice.command import cli

DATA = Path(__file__).resolve().parents[2] / "data"


def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["simulate", *arguments])
    with pytest.raises(SystemExit) as ended:
        command.main()
    out, err = capsys.readouterr()
    return int(str(ended.value.code)), out, err


@pytest.mark.parametrize(
    ("trace", "fleet"),
    [
        ("azure_llm_conv_sample.csv", "default=2"),
        ("mooncake_conversation_sample.jsonl", "long=2"),
        ("servegen_sample", "small=1,default=1"),
    ],
)
def test_every_trace_is_simulated_and_reported_as_json(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    trace: str,
    fleet: str,
) -> None:
    arguments = [str(DATA / trace), "--requests", "150", "--fleet", fleet, "--json"]
    status, out, _ = run(monkeypatch, capsys, *arguments)
    assert status == 0
    report = json.loads(out)
    assert report["totals"]["offered"] == 150
    assert report["totals"]["finished"] > 100
    assert (report["prefix_hit_rate"] is None) == (not trace.startswith("mooncake"))
    assert run(monkeypatch, capsys, *arguments)[1] == out


def test_a_table_and_a_picture_come_of_a_generated_mix(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    picture = tmp_path / "out.png"
    options = ["--requests", "200", "--burst", "3", "--plot", str(picture)]
    weights = ["--slo", "interactive=1:3", "--tenants", "a=1,b=2"]
    status, out, _ = run(monkeypatch, capsys, *options, *weights)
    assert status == 0
    assert "interactive" in out
    assert "fairness" in out
    assert picture.stat().st_size > 10_000


def test_a_plan_prints_its_search_and_its_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--plan", "--fleet", "default", "--requests", "150", "--rate", "10"]
    goal = ["--goal", "interactive=0.9"]
    status, out, _ = run(monkeypatch, capsys, *options, *goal)
    assert status == 0
    assert "missed" in out
    assert "cheapest of" in out
    status, out, _ = run(monkeypatch, capsys, *options, *goal, "--json")
    best = json.loads(out)["best"]
    assert best["reached"]
    status, out, _ = run(monkeypatch, capsys, *options, *goal, "--instances-max", "1")
    assert status == 1
    assert "no fleet" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--fleet", "huge=1"], "'huge' is not a kind"),
        (["--fleet", "default"], "not KIND=COUNT"),
        (["--fleet", "default=0"], "at least one instance"),
        (["--fleet", "default=1,default=2"], "named twice"),
        (["--classes", "urgent=1"], "'urgent' is not a class"),
        (["--classes", "batch=0"], "above 0"),
        (["--tenants", "a"], "not NAME=NUMBER"),
        (["--tenants", "a=-1"], "not NAME=NUMBER"),
        (["--slo", "batch=soon"], "not CLASS=TTFT_S:TPOT_FACTOR"),
        (["--rate", "many"], "--rate"),
        (["--policy", "best"], "'best' is not one of"),
        (["--plan", "--goal", "batch=2"], "between 0 and 1"),
        (["--plan", "--fleet", "default,small,large"], "one kind or two"),
        (["--plan", "--fleet", "default=2,small"], "--fleet: 'default=2': --plan finds the counts"),
        (["--plan", "--plot", "x.png"], "no picture"),
        (["--duration", "0.001", "--rate", "0.01"], "no request came"),
        (["trace.txt"], "--format"),
    ],
)
def test_wrong_use_is_one_line_and_status_2(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: str,
) -> None:
    status, out, err = run(monkeypatch, capsys, *arguments)
    assert status == 2
    assert words in err
    assert len(err.splitlines()) == 1
    assert out == ""


def test_a_file_that_is_missing_or_wrong_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    status, _, err = run(monkeypatch, capsys, str(tmp_path / "none.csv"))
    assert status == 1
    assert "none.csv" in err
    (tmp_path / "bad.csv").write_text("a,b\n1,2\n")
    status, _, err = run(monkeypatch, capsys, str(tmp_path / "bad.csv"))
    assert status == 1
    assert "bad.csv:2" in err


def test_the_command_passes_arguments_on_and_the_status_back(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert cli.run(["simulate", "--requests", "50", "--json"], {}) == 0
    assert json.loads(capfd.readouterr().out)["totals"]["offered"] == 50
    assert cli.run(["simulate", "--fleet", "huge=1"], {}) == 2
    assert "huge" in capfd.readouterr().err
