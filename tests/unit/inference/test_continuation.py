"""What may be continued, what is left of its limits, and whether it fits what was delivered."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_svc.domain import continuation as rules
from inference_svc.ports import Constraint, ConstraintKind, Continuation, Sampling
from sluice.errors import Code, SluiceError

FINGERPRINT = "fingerprint-a"
TEXT = "삼겹살 and 龜"


def begun(text: str, tokens: int = 3) -> Continuation:
    return Continuation(tuple(range(tokens)), len(text.encode()), text[-3:], FINGERPRINT)


def refusal(continuation: Continuation, sampling: Sampling, room: int = 100) -> SluiceError | None:
    try:
        rules.check(continuation, sampling, fingerprint=FINGERPRINT, room=room)
        rules.check_delivered(continuation, TEXT)
    except SluiceError as error:
        return error
    return None


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.0),
        Sampling(temperature=0.8, top_p=0.9, top_k=40, min_p=0.1, repetition_penalty=1.1),
        Sampling(stop=("x",), stop_token_ids=(1,), min_tokens=2, max_tokens=9, ignore_eos=True),
        Sampling(logit_bias={1: 5.0}, keep_special_tokens=True, include_stop=True),
        Sampling(presence_penalty=0.0, frequency_penalty=0.0),
    ],
)
def test_sampling_that_depends_on_the_tokens_alone_is_continuable(sampling: Sampling) -> None:
    assert rules.continuable(sampling)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(seed=0),
        Sampling(presence_penalty=0.1),
        Sampling(frequency_penalty=-0.1),
        Sampling(constraint=Constraint(ConstraintKind.JSON_OBJECT)),
        Sampling(n=2),
        Sampling(logprobs=0),
    ],
)
def test_sampling_with_state_outside_the_tokens_is_not(sampling: Sampling) -> None:
    assert not rules.continuable(sampling)
    error = refusal(begun(""), sampling)
    assert error is not None
    assert error.reason == "NOT_CONTINUABLE"
    assert error.code is Code.FAILED_PRECONDITION


@given(
    most=st.none() | st.integers(1, 50),
    least=st.none() | st.integers(0, 50),
    room=st.integers(1, 50),
    generated=st.integers(0, 60),
)
def test_rebased_limits_add_up_to_those_of_the_whole_output(
    most: int | None, least: int | None, room: int, generated: int
) -> None:
    whole = rules.rebase(Sampling(max_tokens=most, min_tokens=least), 0, room)
    rest = rules.rebase(Sampling(max_tokens=most, min_tokens=least), generated, room)
    assert whole.most == min(most if most is not None else room, room)
    assert rest.most == max(whole.most - generated, 0)
    assert 0 <= rest.least <= rest.most
    if generated <= whole.most:
        assert generated + rest.least == max(whole.least, generated)


@given(
    total=st.integers(1, 100),
    prompt=st.integers(1, 100),
    room=st.integers(1, 100),
    count=st.integers(1, 8),
    least=st.none() | st.integers(0, 20),
)
def test_prompt_and_outputs_stay_within_a_total_or_are_refused(
    total: int, prompt: int, room: int, count: int, least: int | None
) -> None:
    sampling = Sampling(n=count, min_tokens=least)
    held = prompt + count * max(least or 0, 1) <= total
    if not held:
        with pytest.raises(SluiceError) as refused:
            rules.within_total(sampling, total, prompt, room)
        assert (refused.value.code, refused.value.reason) == (Code.INVALID_ARGUMENT, "TOTAL_TOKENS")
        assert refused.value.fields[0].field == "sampling.total_tokens_max"
        return
    lowered = rules.within_total(sampling, total, prompt, room)
    assert 1 <= lowered <= room
    assert prompt + count * lowered <= total
    assert lowered == room or prompt + count * (lowered + 1) > total


def test_another_model_is_refused() -> None:
    error = refusal(replace(begun(""), model_fingerprint="other"), Sampling())
    assert error is not None
    assert error.reason == "FINGERPRINT_MISMATCH"
    assert error.code is Code.FAILED_PRECONDITION


def test_tokens_must_fit_the_context() -> None:
    assert refusal(begun("", tokens=5), Sampling(), room=5) is None
    error = refusal(begun("", tokens=6), Sampling(), room=5)
    assert error is not None
    assert error.fields[0].field == "continuation.output_token_ids"


def test_a_tail_above_its_limit_is_invalid() -> None:
    tail = replace(begun(""), delivered_text_tail="x" * (rules.TAIL_BYTES_MAX + 1))
    error = refusal(tail, Sampling())
    assert error is not None
    assert error.fields[0].field == "continuation.delivered_text_tail"


@pytest.mark.parametrize("characters", range(len(TEXT) + 1))
def test_any_whole_characters_may_have_been_delivered(characters: int) -> None:
    assert refusal(begun(TEXT[:characters]), Sampling()) is None


@pytest.mark.parametrize(
    ("delivered", "tail"),
    [
        (len(TEXT.encode()) + 1, ""),  # more than there is
        (1, ""),  # in the middle of a character
        (3, "겹"),  # another character
        (3, "삼겹"),  # a tail longer than what was delivered
    ],
)
def test_delivered_text_that_the_tokens_do_not_spell_is_refused(delivered: int, tail: str) -> None:
    error = refusal(Continuation((1,), delivered, tail, FINGERPRINT), Sampling())
    assert error is not None
    assert error.reason == "CONTINUATION_MISMATCH"
    assert error.code is Code.FAILED_PRECONDITION
