"""The ranges of ``sluice.sampling_rules`` for this layer's own form of the parameters.

Pure functions without state. Field paths are those of the proto, below ``sampling``.
"""

from __future__ import annotations

from dataclasses import fields

from inference_svc.ports import ConstraintKind, Sampling
from sluice import sampling_rules

_NAMES = tuple(field.name for field in fields(Sampling))


def check(sampling: Sampling) -> None:
    """Raises INVALID_ARGUMENT naming the field and its range; returns when all is in range."""
    values = {name: getattr(sampling, name) for name in _NAMES}
    sampling_rules.check({name: value for name, value in values.items() if value is not None})
    constraint = sampling.constraint
    if constraint is None:
        return
    if constraint.kind is ConstraintKind.JSON_OBJECT:
        sampling_rules.check_constraint(constraint.kind.value, value=True)
    elif constraint.kind is ConstraintKind.CHOICE:
        sampling_rules.check_constraint(constraint.kind.value, constraint.choices)
    else:
        sampling_rules.check_constraint(constraint.kind.value, constraint.text)


def constraint_field(kind: ConstraintKind) -> str:
    """The path of a constraint's field, e.g. ``sampling.structured_output.regex``."""
    return f"{sampling_rules.CONSTRAINT_FIELD}.{kind.value}"


def check_token_ids(sampling: Sampling, vocabulary_size: int) -> None:
    """Raises INVALID_ARGUMENT when a stop token or a biased token is not in the vocabulary."""
    sampling_rules.check_token_ids(sampling.stop_token_ids, sampling.logit_bias, vocabulary_size)
