"""Ranges of sampling parameters: one inside, at and beyond each limit."""

from __future__ import annotations

import pytest

from inference_svc.domain import sampling_rules as rules
from inference_svc.ports import Constraint, ConstraintKind, Sampling
from sluice.errors import Code, SluiceError

HUGE = float("inf")


def violated(sampling: Sampling) -> str | None:
    """The field that the rules refuse, or None."""
    try:
        rules.check(sampling)
    except SluiceError as error:
        return error.fields[0].field if error.code is Code.INVALID_ARGUMENT else error.reason
    return None


def constraint(kind: ConstraintKind, text: str = "", choices: tuple[str, ...] = ()) -> Sampling:
    return Sampling(constraint=Constraint(kind, text, choices))


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.0, top_k=0, min_p=0.0, min_tokens=0, seed=0, logprobs=0),
        Sampling(temperature=2.0, top_p=1.0, min_p=1.0, repetition_penalty=2.0),
        Sampling(presence_penalty=-2.0, frequency_penalty=2.0, top_p=1e-9),
        Sampling(max_tokens=1, min_tokens=1, n=8, logprobs=20),
        Sampling(seed=-(2**63)),
        Sampling(stop=("x" * 256,) * 16, stop_token_ids=(0,) * 64),
        Sampling(logit_bias=dict.fromkeys(range(300), -100.0)),
        constraint(ConstraintKind.CHOICE, choices=("c" * 1024,) * 256),
        constraint(ConstraintKind.REGEX, "a" * 4096),
        constraint(ConstraintKind.JSON_OBJECT),
    ],
)
def test_values_at_their_limits_are_taken(sampling: Sampling) -> None:
    assert violated(sampling) is None


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        (Sampling(temperature=-0.01), "sampling.temperature"),
        (Sampling(temperature=2.01), "sampling.temperature"),
        (Sampling(temperature=HUGE), "sampling.temperature"),
        (Sampling(temperature=float("nan")), "sampling.temperature"),
        (Sampling(top_p=0.0), "sampling.top_p"),
        (Sampling(top_p=1.01), "sampling.top_p"),
        (Sampling(top_p=float("nan")), "sampling.top_p"),
        (Sampling(top_k=-1), "sampling.top_k"),
        (Sampling(min_p=1.01), "sampling.min_p"),
        (Sampling(presence_penalty=-2.01), "sampling.presence_penalty"),
        (Sampling(frequency_penalty=2.01), "sampling.frequency_penalty"),
        (Sampling(repetition_penalty=0.0), "sampling.repetition_penalty"),
        (Sampling(repetition_penalty=2.01), "sampling.repetition_penalty"),
        (Sampling(max_tokens=0), "sampling.max_tokens"),
        (Sampling(max_tokens=3, min_tokens=4), "sampling.min_tokens"),
        (Sampling(seed=2**63), "sampling.seed"),
        (Sampling(n=0), "sampling.n"),
        (Sampling(n=9), "sampling.n"),
        (Sampling(logprobs=21), "sampling.logprobs"),
        (Sampling(stop=("x",) * 17), "sampling.stop"),
        (Sampling(stop=("ok", "")), "sampling.stop[1]"),
        (Sampling(stop=("é" * 129,)), "sampling.stop[0]"),
        (Sampling(stop_token_ids=(0,) * 65), "sampling.stop_token_ids"),
        (Sampling(stop_token_ids=(-1,)), "sampling.stop_token_ids[0]"),
        (Sampling(logit_bias=dict.fromkeys(range(301), 0.0)), "sampling.logit_bias"),
        (Sampling(logit_bias={1: 100.5}), "sampling.logit_bias"),
        (Sampling(logit_bias={1: float("nan")}), "sampling.logit_bias"),
        (constraint(ConstraintKind.CHOICE), "sampling.structured_output.choice"),
        (
            constraint(ConstraintKind.CHOICE, choices=("a", "")),
            "sampling.structured_output.choice.values[1]",
        ),
        (constraint(ConstraintKind.REGEX, "a" * 4097), "sampling.structured_output.regex"),
        (constraint(ConstraintKind.REGEX), "sampling.structured_output.regex"),
        (
            constraint(ConstraintKind.JSON_SCHEMA, " " * 65537),
            "sampling.structured_output.json_schema",
        ),
        (constraint(ConstraintKind.GRAMMAR), "sampling.structured_output.grammar"),
    ],
)
def test_a_value_beyond_its_range_is_named(sampling: Sampling, field: str) -> None:
    assert violated(sampling) == field


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        (Sampling(stop_token_ids=(3, 10)), "sampling.stop_token_ids[1]"),
        (Sampling(logit_bias={10: 1.0}), "sampling.logit_bias"),
    ],
)
def test_ids_outside_a_vocabulary_are_named(sampling: Sampling, field: str) -> None:
    rules.check_token_ids(sampling, 11)
    with pytest.raises(SluiceError) as caught:
        rules.check_token_ids(sampling, 10)
    assert caught.value.fields[0].field == field
