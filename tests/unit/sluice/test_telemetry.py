"""Telemetry without a collector: names, sampling, passing on, bounded labels."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sluice import telemetry_names
from sluice.context import is_sampled, is_traceparent
from sluice.telemetry import OTHER, Telemetry, _Bound
from sluice.telemetry_names import METRICS, SPANS, Kind, Metric

ROOT = Path(__file__).resolve().parents[3]
SAMPLED = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
UNSAMPLED = "00-" + "a" * 32 + "-" + "b" * 16 + "-00"


def test_without_an_endpoint_no_sdk_is_imported() -> None:
    code = (
        "import sys; from sluice.telemetry import Telemetry; t = Telemetry.setup('x')\n"
        "from sluice import telemetry_names as n; t.span(n.SPAN_REQUEST).end()\n"
        "assert not t.enabled and not any(m.startswith('opentelemetry') for m in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60)


@pytest.mark.parametrize("traceparent", [SAMPLED, UNSAMPLED, ""])
def test_an_absent_collector_passes_the_trace_context_on(traceparent: str) -> None:
    span = Telemetry.off().span(telemetry_names.SPAN_REQUEST, traceparent)
    assert span.traceparent == traceparent
    assert not span.recording
    span.set("x", 1)
    span.end("ERROR")


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        (SAMPLED, True),
        (UNSAMPLED, True),
        ("", False),
        (SAMPLED.upper(), False),
        ("01" + SAMPLED[2:], False),
        ("00-" + "0" * 32 + SAMPLED[35:], False),
        (SAMPLED[:36] + "0" * 16 + "-01", False),
        (SAMPLED + "-x", False),
        (SAMPLED + "\n", False),
    ],
)
def test_only_a_w3c_traceparent_is_one(text: str, valid: bool) -> None:
    assert is_traceparent(text) is valid


def test_the_flag_says_whether_it_is_sampled() -> None:
    assert is_sampled(SAMPLED)
    assert not is_sampled(UNSAMPLED)
    assert is_sampled(SAMPLED[:-2] + "03")
    assert not is_sampled(SAMPLED[:-2] + "02")


def _metric(name: str, *labels: str, series_max: int = 4) -> Metric:
    return Metric(name, Kind.COUNTER, "1", "For tests.", labels, series_max)


def test_label_combinations_are_bounded_and_the_rest_is_summed() -> None:
    """Mutant: the bound is not checked (10,000 series)."""
    bound = _Bound(_metric("x", "model", series_max=4))
    readings = [(1, {"model": f"m{n}"}) for n in range(10_000)]
    observed = {
        str((o.attributes or {})["model"]): o.value for o in bound.observe([lambda: readings])
    }
    assert observed == {"m0": 1, "m1": 1, "m2": 1, "m3": 1, OTHER: 9996}
    assert len(bound.observe([lambda: readings])) == 5


def test_a_reading_that_changes_under_the_reader_is_read_again() -> None:
    tries = 0

    def read() -> Iterator[tuple[int, dict[str, str]]]:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise RuntimeError("dictionary changed size during iteration")
        return iter([(7, {"a": "x"})])

    assert [o.value for o in _Bound(_metric("x", "a")).observe([read])] == [7]
    assert tries == 3


def test_what_several_parts_of_a_process_read_is_summed() -> None:
    reads = [lambda: 2, lambda: 3.5]
    assert [o.value for o in _Bound(_metric("x")).observe(reads)] == [5.5]


def test_a_metric_must_be_registered_and_of_its_kind() -> None:
    off = Telemetry.off()
    with pytest.raises(AssertionError):
        off.counter(_metric("sluice.unknown"), lambda: 0)
    with pytest.raises(AssertionError):
        off.gauge(telemetry_names.REQUESTS, lambda: 0)
    off.histogram(telemetry_names.TTFT).record(1.0, {"class": "batch"})


def test_registered_names_are_unique_and_follow_the_conventions() -> None:
    constants = [value for value in vars(telemetry_names).values() if isinstance(value, Metric)]
    assert len(constants) == len(METRICS)
    spans = {
        value
        for name, value in vars(telemetry_names).items()
        if name.startswith("SPAN_") and isinstance(value, str)
    }
    assert spans == SPANS
    for metric in METRICS.values():
        assert metric.name.startswith(("sluice.", "gen_ai."))
        assert metric.help.endswith(".")
        assert bool(metric.buckets) is (metric.kind is Kind.HISTOGRAM)
        assert not {"request_id", "model_name", "path"} & set(metric.labels)
    # Tenants come and go, so only these are about them; who feeds them bounds their number.
    about_tenants = {metric.name for metric in METRICS.values() if "tenant" in metric.labels}
    assert about_tenants == {
        telemetry_names.AGENT_NOT_NEEDED.name,
        telemetry_names.AGENT_EXTRA_COST.name,
    }


def _sources() -> Iterator[Path]:
    for folder in ("sluice", "scheduler_svc", "execution_svc", "inference_svc"):
        for path in (ROOT / folder).rglob("*.py"):
            if "v1" not in path.parts and path.name != "telemetry_names.py":
                yield path


def test_names_of_spans_and_metrics_are_spelled_in_the_registry_only() -> None:
    """Each first argument of ``.span``, ``.counter``, ``.gauge`` and ``.histogram`` is a name, not
    a string; no string that is a registered name appears elsewhere. Mutant: a literal span name in
    a service."""
    registered = {*METRICS, *SPANS}
    found = []
    for path in _sources():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and node.value in registered:
                found.append(f"{path.name}:{node.lineno} {node.value}")
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in ("span", "counter", "gauge", "histogram")
                and node.args
                and isinstance(node.args[0], ast.Constant | ast.JoinedStr)
            ):
                found.append(f"{path.name}:{node.lineno} .{node.func.attr}(literal)")
    assert found == []
