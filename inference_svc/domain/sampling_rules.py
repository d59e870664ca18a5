"""Ranges of sampling parameters, as documented in ``protos/sluice/common/v1/sampling.proto``.

Pure functions without state. :func:`check` raises for the first value outside its range; what
depends on a model (ids inside its vocabulary, whether a constraint compiles) is the engine's to
check. Field paths are those of the proto, below ``sampling``.
"""

from __future__ import annotations

import math

from inference_svc.ports import Constraint, ConstraintKind, Sampling
from sluice.errors import invalid

TEMPERATURE_MAX = 2.0
TOP_P_MAX = 1.0
MIN_P_MAX = 1.0
PENALTY_ABS_MAX = 2.0
REPETITION_PENALTY_MAX = 2.0
TOP_K_MAX = 2**31 - 1  # what engines hold in a signed 32-bit integer
OUTPUT_TOKENS_MAX = 2**31 - 1
STOP_STRINGS_MAX = 16
STOP_STRING_BYTES_MAX = 256
STOP_TOKEN_IDS_MAX = 64
TOKEN_ID_MAX = 2**31 - 1
SEED_MIN, SEED_MAX = -(2**63), 2**63 - 1
OUTPUTS_MAX = 8
LOGPROBS_MAX = 20
LOGIT_BIAS_ENTRIES_MAX = 300
LOGIT_BIAS_ABS_MAX = 100.0
JSON_SCHEMA_BYTES_MAX = 64 * 1024
REGEX_BYTES_MAX = 4 * 1024
GRAMMAR_BYTES_MAX = 64 * 1024
CHOICES_MAX = 256
CHOICE_BYTES_MAX = 1024

CONSTRAINT_FIELD = "sampling.structured_output"
_CONSTRAINT_BYTES_MAX = {
    ConstraintKind.JSON_SCHEMA: JSON_SCHEMA_BYTES_MAX,
    ConstraintKind.REGEX: REGEX_BYTES_MAX,
    ConstraintKind.GRAMMAR: GRAMMAR_BYTES_MAX,
}


def check(sampling: Sampling) -> None:
    """Raises INVALID_ARGUMENT naming the field and its range; returns when all is in range."""
    _between("temperature", sampling.temperature, 0.0, TEMPERATURE_MAX)
    _above_zero("top_p", sampling.top_p, TOP_P_MAX)
    _whole("top_k", sampling.top_k, 0, TOP_K_MAX)
    _between("min_p", sampling.min_p, 0.0, MIN_P_MAX)
    _between("presence_penalty", sampling.presence_penalty, -PENALTY_ABS_MAX, PENALTY_ABS_MAX)
    _between("frequency_penalty", sampling.frequency_penalty, -PENALTY_ABS_MAX, PENALTY_ABS_MAX)
    _above_zero("repetition_penalty", sampling.repetition_penalty, REPETITION_PENALTY_MAX)
    _whole("max_tokens", sampling.max_tokens, 1, OUTPUT_TOKENS_MAX)
    _whole("min_tokens", sampling.min_tokens, 0, OUTPUT_TOKENS_MAX)
    most, least = sampling.max_tokens, sampling.min_tokens
    if most is not None and least is not None and least > most:
        raise invalid("sampling.min_tokens", f"must not be more than max_tokens ({most})")
    _whole("seed", sampling.seed, SEED_MIN, SEED_MAX)
    _whole("n", sampling.n, 1, OUTPUTS_MAX)
    _whole("logprobs", sampling.logprobs, 0, LOGPROBS_MAX)
    _check_stops(sampling)
    _check_bias(sampling)
    if sampling.constraint is not None:
        _check_constraint(sampling.constraint)


def constraint_field(kind: ConstraintKind) -> str:
    """The path of a constraint's field, e.g. ``sampling.structured_output.regex``."""
    return f"{CONSTRAINT_FIELD}.{kind.value}"


def check_token_ids(sampling: Sampling, vocabulary_size: int) -> None:
    """Raises INVALID_ARGUMENT when a stop token or a biased token is not in the vocabulary."""
    for index, token in enumerate(sampling.stop_token_ids):
        if not 0 <= token < vocabulary_size:
            raise invalid(
                f"sampling.stop_token_ids[{index}]",
                f"must be below {vocabulary_size}, the size of the model's vocabulary",
            )
    for token in sampling.logit_bias:
        if not 0 <= token < vocabulary_size:
            raise invalid(
                "sampling.logit_bias",
                f"token ids must be below {vocabulary_size}, the size of the model's vocabulary",
            )


def _between(name: str, value: float | None, least: float, most: float) -> None:
    # A comparison with NaN is False, so NaN and the infinities fail here too.
    if value is not None and not least <= value <= most:
        raise invalid(f"sampling.{name}", f"must be between {least:g} and {most:g}")


def _above_zero(name: str, value: float | None, most: float) -> None:
    if value is not None and not 0.0 < value <= most:
        raise invalid(f"sampling.{name}", f"must be more than 0 and at most {most:g}")


def _whole(name: str, value: int | None, least: int, most: int) -> None:
    if value is not None and not least <= value <= most:
        raise invalid(f"sampling.{name}", f"must be between {least} and {most}")


def _check_stops(sampling: Sampling) -> None:
    if len(sampling.stop) > STOP_STRINGS_MAX:
        raise invalid("sampling.stop", f"must hold at most {STOP_STRINGS_MAX} strings")
    for index, stop in enumerate(sampling.stop):
        if not 1 <= len(stop.encode()) <= STOP_STRING_BYTES_MAX:
            raise invalid(
                f"sampling.stop[{index}]", f"must be 1 to {STOP_STRING_BYTES_MAX} bytes long"
            )
    if len(sampling.stop_token_ids) > STOP_TOKEN_IDS_MAX:
        raise invalid("sampling.stop_token_ids", f"must hold at most {STOP_TOKEN_IDS_MAX} ids")
    for index, token in enumerate(sampling.stop_token_ids):
        _whole(f"stop_token_ids[{index}]", token, 0, TOKEN_ID_MAX)


def _check_bias(sampling: Sampling) -> None:
    if len(sampling.logit_bias) > LOGIT_BIAS_ENTRIES_MAX:
        raise invalid("sampling.logit_bias", f"must hold at most {LOGIT_BIAS_ENTRIES_MAX} entries")
    for token, bias in sampling.logit_bias.items():
        _whole("logit_bias", token, 0, TOKEN_ID_MAX)
        if not math.isfinite(bias) or abs(bias) > LOGIT_BIAS_ABS_MAX:
            raise invalid(
                "sampling.logit_bias",
                f"values must be between -{LOGIT_BIAS_ABS_MAX:g} and {LOGIT_BIAS_ABS_MAX:g}",
            )


def _check_constraint(constraint: Constraint) -> None:
    field = constraint_field(constraint.kind)
    if constraint.kind is ConstraintKind.CHOICE:
        if not 1 <= len(constraint.choices) <= CHOICES_MAX:
            raise invalid(field, f"must hold 1 to {CHOICES_MAX} values")
        for index, choice in enumerate(constraint.choices):
            if not 1 <= len(choice.encode()) <= CHOICE_BYTES_MAX:
                raise invalid(
                    f"{field}.values[{index}]", f"must be 1 to {CHOICE_BYTES_MAX} bytes long"
                )
        return
    most = _CONSTRAINT_BYTES_MAX.get(constraint.kind)
    if most is None:
        return
    if not 1 <= len(constraint.text.encode()) <= most:
        raise invalid(field, f"must be 1 to {most} bytes long")
