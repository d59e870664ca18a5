"""What is counted: SLOs, goodput, fairness, cost; the table and the picture."""

from __future__ import annotations

import io
import json
from itertools import islice
from pathlib import Path

import pytest
from rich.console import Console

from scheduler_svc.domain.model import Outcome, PriorityClass
from scheduler_svc.simulation.arrivals import Arrival, Mix, generated
from scheduler_svc.simulation.kinds import GpuKind, load_kinds
from scheduler_svc.simulation.option_texts import class_slos
from scheduler_svc.simulation.plot import plot
from scheduler_svc.simulation.record import SLOS, Recorder, Slo
from scheduler_svc.simulation.report import jain, make_report, show
from scheduler_svc.simulation.run import EngineUse, Options, Outcomes, Simulation

KIND = GpuKind("test", price_per_hour=3.0)
CRITICAL, BATCH = PriorityClass.CRITICAL, PriorityClass.BATCH


def recorded() -> Outcomes:
    """Two tenants, an hour: one request each that met, was late, was slow, was refused."""
    recorder = Recorder(SLOS)
    for tenant, cls, ttft_s, tpot_s in (
        ("a", CRITICAL, 1.0, 0.020),  # met, just
        ("a", CRITICAL, 1.1, 0.010),  # late
        ("b", CRITICAL, 0.1, 0.021),  # slow
        ("b", BATCH, 900.0, 1.0),  # promises nothing
    ):
        arrival = Arrival(10.0, tenant, cls, 100, 11)
        recorder.offered(arrival)
        first_s = 10.0 + ttft_s
        recorder.finished(arrival, 11, first_s, first_s + 10 * tpot_s, unloaded_s=0.0100001)
    refused = Arrival(20.0, "b", BATCH, 100, 11)
    recorder.offered(refused)
    recorder.refused(refused, Outcome.HOPELESS, 21.0)
    uses = [EngineUse("test", 0.5, 0.25, 1, 30, 100), EngineUse("test", 0.7, 0.75, 2, 10, 100)]
    return Outcomes(Options([(KIND, 2)]), recorder, 20.0, 3_600.0, uses)


def test_goodput_is_the_tokens_of_requests_that_met_their_slo() -> None:
    report = make_report(recorded())
    critical, batch = report["classes"]["critical"], report["classes"]["batch"]
    assert critical["slo_attainment"] == pytest.approx(1 / 3)
    assert critical["goodput_tokens_per_s"] == pytest.approx(11 / 3_600)
    assert critical["output_tokens_per_s"] == pytest.approx(33 / 3_600)
    assert batch["slo_attainment"] == pytest.approx(1 / 2)
    assert batch["outcomes"] == {"finished": 1, "hopeless": 1}
    assert report["totals"]["slo_attainment"] == pytest.approx(2 / 5)
    assert list(report["classes"]) == ["critical", "batch"]


def test_a_tpot_in_milliseconds_holds_on_every_kind() -> None:
    slos = class_slos(["interactive=2:30ms", "critical=1"])
    assert slos[PriorityClass.INTERACTIVE] == Slo(2.0, tpot_s=0.03)
    assert slos[CRITICAL] == Slo(1.0)
    recorder = Recorder(slos)
    arrival = Arrival(0.0, "a", PriorityClass.INTERACTIVE, 10, 11)
    for tpot_s in (0.0299, 0.0301):
        recorder.finished(arrival, 11, 1.0, 1.0 + 10 * tpot_s, unloaded_s=1.0)
    assert recorder.group(arrival).met == 1


def test_times_are_percentiles_of_what_finished() -> None:
    ttft = make_report(recorded())["classes"]["critical"]["ttft_s"]
    assert ttft is not None
    assert ttft["p50"] == pytest.approx(1.0)
    assert ttft["mean"] == pytest.approx(2.2 / 3)


def test_cost_use_and_hits_are_those_of_the_fleet() -> None:
    report = make_report(recorded())
    assert report["cost"]["total"] == pytest.approx(6.0)
    assert report["cost"]["per_million_output_tokens"] == pytest.approx(6.0 / 44 * 1e6)
    assert report["cost"]["per_million_goodput_tokens"] == pytest.approx(6.0 / 22 * 1e6)
    (row,) = report["fleet"]
    assert (row["busy"], row["filled"], row["preemptions"]) == (0.6, 0.5, 3)
    assert report["prefix_hit_rate"] == pytest.approx(0.2)


def test_the_fairness_index_is_1_when_even_and_1_over_n_when_one_has_all() -> None:
    assert jain([5, 5, 5, 5]) == pytest.approx(1.0)
    assert jain([8, 0, 0, 0]) == pytest.approx(0.25)
    assert jain([0, 0]) == 1.0
    report = make_report(recorded())
    assert report["jain_tokens"] == pytest.approx(1.0)  # 22 tokens each
    assert report["jain_share"] == pytest.approx((1 + 2 / 3) ** 2 / (2 * (1 + 4 / 9)))


def test_the_report_is_json_and_a_table() -> None:
    report = make_report(recorded())
    assert json.loads(json.dumps(report)) == report
    text = io.StringIO()
    show(report, Console(file=text, width=200, highlight=False))
    assert "2 x test" in text.getvalue()
    assert "hopeless 1" in text.getvalue()
    assert "SIMULATED" in text.getvalue()


def test_only_the_first_tenants_are_shown_and_the_rest_counted() -> None:
    mix = Mix(tenants={f"t{number:02}": 1.0 for number in range(25)})
    run = Simulation(Options([(KIND, 1)])).run(islice(generated(mix, 5.0, 1.0, 1), 200))
    text = io.StringIO()
    show(make_report(run), Console(file=text, width=200, highlight=False))
    assert "t19" in text.getvalue()
    assert "t20" not in text.getvalue()
    assert "5 more tenants" in text.getvalue()


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    run = Simulation(Options([(KIND, 1)])).run(islice(generated(Mix(), 8.0, 1.0, 1), 300))
    plot(run, tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_every_kind_says_where_its_numbers_come_from() -> None:
    kinds = load_kinds()
    assert "default" in kinds
    for kind in kinds.values():
        assert kind.provenance
        assert kind.price_per_hour > 0.0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[kind.x]\nspeed = 1\n", "x: speed is not a setting"),
        ("[kind.x]\nsequences_max = 1.5\n", "x: sequences_max must be of type int"),
        ("[kind.x]\nprefill_tokens_per_s = 0\n", "x: prefill_tokens_per_s must be at least"),
        ("[kind.x]\nkv_tokens = 100\n", "x: kv_tokens must hold context_tokens"),
        ("[kind.x]\nsequences_max = 9999\n", "x: step_tokens_max must be at least sequences_max"),
        ("[gpu.x]\n", "only tables"),
        ("kind = [", "kinds.toml"),
    ],
)
def test_a_wrong_kind_is_refused_by_name(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "kinds.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=words):
        load_kinds(path)


def test_a_kind_of_ones_own_goes_before_a_preset(tmp_path: Path) -> None:
    path = tmp_path / "kinds.toml"
    path.write_text("[kind.small]\nprice_per_hour = 7\n[kind.mine]\nsequences_max = 8\n")
    kinds = load_kinds(path)
    assert kinds["small"].price_per_hour == 7.0
    assert kinds["mine"].sequences_max == 8
    assert "large" in kinds
