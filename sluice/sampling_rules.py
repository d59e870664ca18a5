"""Ranges of sampling parameters, as documented in ``protos/sluice/common/v1/sampling.proto``.

The one source for the scheduler, which refuses a wrong value before it waits for anything, and for
the inference layer, which serves callers that did not come through a scheduler's checks. Pure
functions without state; what depends on a model (ids inside its vocabulary, whether a constraint
compiles) is the engine's to check. Field paths are those of the proto, below ``sampling``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from sluice.errors import SluiceError, invalid

TEMPERATURE_MAX: Final = 2.0
TOP_P_MAX: Final = 1.0
MIN_P_MAX: Final = 1.0
PENALTY_ABS_MAX: Final = 2.0
REPETITION_PENALTY_MAX: Final = 2.0
TOP_K_MAX: Final = 2**31 - 1  # what engines hold in a signed 32-bit integer
OUTPUT_TOKENS_MAX: Final = 2**31 - 1
TOTAL_TOKENS_MAX: Final = 2**31 - 1
STOP_STRINGS_MAX: Final = 16
STOP_STRING_BYTES_MAX: Final = 256
STOP_TOKEN_IDS_MAX: Final = 64
TOKEN_ID_MAX: Final = 2**31 - 1
SEED_MIN: Final = -(2**63)
SEED_MAX: Final = 2**63 - 1
OUTPUTS_MAX: Final = 8
LOGPROBS_MAX: Final = 20
LOGIT_BIAS_ENTRIES_MAX: Final = 300
LOGIT_BIAS_ABS_MAX: Final = 100.0
JSON_SCHEMA_BYTES_MAX: Final = 64 * 1024
REGEX_BYTES_MAX: Final = 4 * 1024
GRAMMAR_BYTES_MAX: Final = 64 * 1024
CHOICES_MAX: Final = 256
CHOICE_BYTES_MAX: Final = 1024

CONSTRAINT_FIELD: Final = "sampling.structured_output"
_CONSTRAINT_BYTES_MAX: Final = {
    "json_schema": JSON_SCHEMA_BYTES_MAX,
    "regex": REGEX_BYTES_MAX,
    "grammar": GRAMMAR_BYTES_MAX,
}


def check(values: Mapping[str, Any]) -> None:
    """Raises INVALID_ARGUMENT naming the first field out of its range. ``values``: the fields that
    are set, by their names in the proto, in its order; names without a range are passed over, the
    constraint too: it is :func:`check_constraint`'s."""
    for name, value in values.items():
        rule = _RULES.get(name)
        if rule is not None:
            rule(name, value)
    most, least = values.get("max_tokens"), values.get("min_tokens")
    if most is not None and least is not None and least > most:
        raise invalid("sampling.min_tokens", f"must not be more than max_tokens ({most})")


def no_constraint() -> SluiceError:
    """A constraint that is there and says nothing."""
    return invalid(CONSTRAINT_FIELD, "must be a JSON schema, regex, grammar, choice or object")


def check_constraint(kind: str, value: str | Sequence[str] | bool) -> None:
    """Raises INVALID_ARGUMENT for a constraint of the wrong size. ``kind``: the name of the proto's
    field that is set; ``value``: its text, the values of ``choice``, or the flag of
    ``json_object``."""
    field = f"{CONSTRAINT_FIELD}.{kind}"
    if isinstance(value, bool):
        if not value:
            raise invalid(field, "must be true when set")
    elif isinstance(value, str):
        most = _CONSTRAINT_BYTES_MAX[kind]
        if not 1 <= len(value.encode()) <= most:
            raise invalid(field, f"must be 1 to {most} bytes long")
    else:
        if not 1 <= len(value) <= CHOICES_MAX:
            raise invalid(field, f"must hold 1 to {CHOICES_MAX} values")
        for index, choice in enumerate(value):
            if not 1 <= len(choice.encode()) <= CHOICE_BYTES_MAX:
                raise invalid(
                    f"{field}.values[{index}]", f"must be 1 to {CHOICE_BYTES_MAX} bytes long"
                )


def check_token_ids(
    stop_token_ids: Sequence[int], logit_bias: Mapping[int, float], vocabulary_size: int
) -> None:
    """Raises INVALID_ARGUMENT when a stop token or a biased token is not in the vocabulary."""
    for index, token in enumerate(stop_token_ids):
        if not 0 <= token < vocabulary_size:
            raise invalid(
                f"sampling.stop_token_ids[{index}]",
                f"must be below {vocabulary_size}, the size of the model's vocabulary",
            )
    for token in logit_bias:
        if not 0 <= token < vocabulary_size:
            raise invalid(
                "sampling.logit_bias",
                f"token ids must be below {vocabulary_size}, the size of the model's vocabulary",
            )


def _between(least: float, most: float) -> Callable[[str, float], None]:
    def rule(name: str, value: float) -> None:
        # A comparison with NaN is False, so NaN and the infinities fail here too.
        if not least <= value <= most:
            raise invalid(f"sampling.{name}", f"must be between {least:g} and {most:g}")

    return rule


def _above_zero(most: float) -> Callable[[str, float], None]:
    def rule(name: str, value: float) -> None:
        if not 0.0 < value <= most:
            raise invalid(f"sampling.{name}", f"must be more than 0 and at most {most:g}")

    return rule


def _whole(least: int, most: int) -> Callable[[str, int], None]:
    def rule(name: str, value: int) -> None:
        if not least <= value <= most:
            raise invalid(f"sampling.{name}", f"must be between {least} and {most}")

    return rule


_token_id = _whole(0, TOKEN_ID_MAX)


def _stops(name: str, values: Sequence[str]) -> None:
    if len(values) > STOP_STRINGS_MAX:
        raise invalid(f"sampling.{name}", f"must hold at most {STOP_STRINGS_MAX} strings")
    for index, stop in enumerate(values):
        if not 1 <= len(stop.encode()) <= STOP_STRING_BYTES_MAX:
            raise invalid(
                f"sampling.{name}[{index}]", f"must be 1 to {STOP_STRING_BYTES_MAX} bytes long"
            )


def _stop_tokens(name: str, values: Sequence[int]) -> None:
    if len(values) > STOP_TOKEN_IDS_MAX:
        raise invalid(f"sampling.{name}", f"must hold at most {STOP_TOKEN_IDS_MAX} ids")
    for index, token in enumerate(values):
        _token_id(f"{name}[{index}]", token)


def _biases(name: str, values: Mapping[int, float]) -> None:
    if len(values) > LOGIT_BIAS_ENTRIES_MAX:
        raise invalid(f"sampling.{name}", f"must hold at most {LOGIT_BIAS_ENTRIES_MAX} entries")
    for token, bias in values.items():
        _token_id(name, token)
        if not math.isfinite(bias) or abs(bias) > LOGIT_BIAS_ABS_MAX:
            raise invalid(
                f"sampling.{name}",
                f"values must be between -{LOGIT_BIAS_ABS_MAX:g} and {LOGIT_BIAS_ABS_MAX:g}",
            )


_RULES: Final[Mapping[str, Callable[[str, Any], None]]] = {
    "temperature": _between(0.0, TEMPERATURE_MAX),
    "top_p": _above_zero(TOP_P_MAX),
    "top_k": _whole(0, TOP_K_MAX),
    "min_p": _between(0.0, MIN_P_MAX),
    "presence_penalty": _between(-PENALTY_ABS_MAX, PENALTY_ABS_MAX),
    "frequency_penalty": _between(-PENALTY_ABS_MAX, PENALTY_ABS_MAX),
    "repetition_penalty": _above_zero(REPETITION_PENALTY_MAX),
    "max_tokens": _whole(1, OUTPUT_TOKENS_MAX),
    "min_tokens": _whole(0, OUTPUT_TOKENS_MAX),
    "total_tokens_max": _whole(1, TOTAL_TOKENS_MAX),
    "stop": _stops,
    "stop_token_ids": _stop_tokens,
    "seed": _whole(SEED_MIN, SEED_MAX),
    "n": _whole(1, OUTPUTS_MAX),
    "logprobs": _whole(0, LOGPROBS_MAX),
    "logit_bias": _biases,
}
