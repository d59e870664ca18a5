"""Sources of arrivals: traces, generated mixes, and what is refused."""

from __future__ import annotations

import statistics
from itertools import islice, pairwise
from pathlib import Path

import pytest

from scheduler_svc.domain.model import PriorityClass
from scheduler_svc.simulation.arrivals import (
    MOONCAKE_QUANTUM_S,
    Lengths,
    Mix,
    azure,
    generated,
    mooncake,
    scaled,
    servegen,
)

DATA = Path(__file__).resolve().parents[2] / "data"
AZURE = DATA / "azure_llm_conv_sample.csv"
MOONCAKE = DATA / "mooncake_conversation_sample.jsonl"
SERVEGEN = DATA / "servegen_sample"
MIX = Mix()


def test_an_azure_trace_keeps_its_times_and_lengths() -> None:
    arrivals = list(azure(AZURE, MIX, 1))
    assert len(arrivals) == 600
    assert arrivals[0].at_s == 0.0
    assert (arrivals[1].prompt_tokens, arrivals[1].output_tokens) == (396, 109)
    assert arrivals[1].at_s == pytest.approx(4.314579)
    assert all(one.at_s <= other.at_s for one, other in pairwise(arrivals))


def test_a_mooncake_trace_is_spread_over_its_three_seconds_in_order() -> None:
    arrivals = list(mooncake(MOONCAKE, MIX, 1))
    assert len(arrivals) == 200
    assert (arrivals[0].prompt_tokens, arrivals[0].output_tokens) == (6758, 500)
    assert arrivals[0].prefix[:3] == (0, 1, 2)
    assert all(one.at_s < other.at_s for one, other in pairwise(arrivals))
    first = [arrival.at_s for arrival in arrivals if arrival.at_s < MOONCAKE_QUANTUM_S]
    assert len(first) > 3
    assert len({round(at_s % MOONCAKE_QUANTUM_S, 3) for at_s in first}) == len(first)


def test_servegen_clients_are_tenants_with_the_rates_of_their_windows() -> None:
    arrivals = list(scaled(servegen(SERVEGEN, MIX, 1), duration_s=30.0))
    assert {arrival.tenant for arrival in arrivals} == {"client-0", "client-5"}
    assert all(one.at_s <= other.at_s for one, other in pairwise(arrivals))
    # 85 and 767 a second, in bursts with coefficients of 2 and 17.
    assert 5_000 < len(arrivals) < 50_000


@pytest.mark.parametrize(
    ("cv", "low", "high"), [(0.0, 0.0, 1e-9), (1.0, 0.9, 1.1), (3.0, 2.4, 3.6)]
)
def test_a_generated_mix_has_its_rate_and_burstiness(cv: float, low: float, high: float) -> None:
    arrivals = list(islice(generated(MIX, 50.0, cv, 3), 8_000))
    gaps = [other.at_s - one.at_s for one, other in pairwise(arrivals)]
    assert statistics.mean(gaps) == pytest.approx(1 / 50.0, rel=0.15)
    assert low <= statistics.pstdev(gaps) / statistics.mean(gaps) <= high


def test_classes_tenants_and_lengths_are_drawn_by_their_weights() -> None:
    mix = Mix(
        classes={PriorityClass.CRITICAL: 1.0, PriorityClass.BATCH: 3.0},
        tenants={"small": 1.0, "none": 0.0, "large": 9.0},
        prompts=Lengths(100.0, 0.5, 400),
    )
    arrivals = list(islice(generated(mix, 1.0, 1.0, 1), 4_000))
    critical = sum(arrival.priority_class is PriorityClass.CRITICAL for arrival in arrivals)
    assert critical / len(arrivals) == pytest.approx(0.25, abs=0.03)
    assert sum(arrival.tenant == "large" for arrival in arrivals) / len(arrivals) > 0.85
    assert not any(arrival.tenant == "none" for arrival in arrivals)
    prompts = [arrival.prompt_tokens for arrival in arrivals]
    assert statistics.median(prompts) == pytest.approx(100.0, rel=0.1)
    assert max(prompts) == 400
    assert min(prompts) >= 1


def test_the_same_seed_gives_the_same_arrivals_and_another_seed_others() -> None:
    def drawn(seed: int) -> list[object]:
        return [*islice(generated(MIX, 5.0, 2.0, seed), 50), *mooncake(MOONCAKE, MIX, seed)]

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


def test_arrivals_can_be_hurried_and_cut() -> None:
    whole = list(azure(AZURE, MIX, 1))
    fast = list(scaled(iter(whole), speed=2.0, requests_max=10))
    assert len(fast) == 10
    assert fast[5].at_s == pytest.approx(whole[5].at_s / 2)
    assert all(a.at_s <= 20.0 for a in scaled(iter(whole), duration_s=20.0))


@pytest.mark.parametrize(
    ("reader", "name", "text"),
    [
        (azure, "a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n"),
        (azure, "a.csv", "time,in,out\n1,2,3\n"),
        (mooncake, "a.jsonl", '{"timestamp": 0}\n'),
        (mooncake, "a.jsonl", "not json\n"),
    ],
)
def test_a_line_that_is_no_request_is_named(
    reader: object, name: str, text: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"{name}:[12]: not a line of"):
        list(reader(path, MIX, 1))  # type: ignore[operator]


def test_a_servegen_folder_without_windows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no chunk"):
        list(servegen(tmp_path, MIX, 1))
    (tmp_path / "chunk-0-trace.csv").write_text("0,0,0,,0,0\n600,0,0,,0,0\n")
    with pytest.raises(ValueError, match="no window has arrivals"):
        list(servegen(tmp_path, MIX, 1))
    (tmp_path / "chunk-0-trace.csv").write_text("0,1,1,Normal,1,1\n")
    with pytest.raises(ValueError, match=r"trace\.csv:1: not a line of a ServeGen trace"):
        list(servegen(tmp_path, MIX, 1))
