"""Structured output of the simulated engine: a text that obeys a constraint.

Pure. A constraint is not enforced token by token: a small text that obeys it is made from it and
then written token by token. What the makers do not understand is INVALID_ARGUMENT naming the
field, never a text that might not obey. All makers are bounded, in the length of the text and in
the depth of nesting, and end within some 100 ms for the largest constraint that is accepted.
"""

from __future__ import annotations

import json

from inference_svc.adapters.simulated.forms import FormError, Picker
from inference_svc.adapters.simulated.grammar import grammar_text
from inference_svc.adapters.simulated.json_values import schema_text
from inference_svc.adapters.simulated.regex import regex_text
from inference_svc.domain.sampling_rules import constraint_field
from inference_svc.ports import Constraint, ConstraintKind
from sluice.errors import invalid


def make_form(constraint: Constraint, state: int) -> str:
    """A text that obeys the constraint, chosen by ``state``; INVALID_ARGUMENT if none is made."""
    picker = Picker(state)
    kind, text = constraint.kind, constraint.text
    try:
        if kind is ConstraintKind.CHOICE:
            return constraint.choices[picker.pick(len(constraint.choices))]
        if kind is ConstraintKind.REGEX:
            return regex_text(text, picker)
        if kind is ConstraintKind.GRAMMAR:
            return grammar_text(text, picker)
        if kind is ConstraintKind.JSON_SCHEMA:
            return schema_text(text, picker)
        return json.dumps({"answer": picker.pick(100)})
    except FormError as error:
        raise invalid(constraint_field(kind), str(error)) from None
