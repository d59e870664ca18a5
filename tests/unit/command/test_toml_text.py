"""What is written as TOML reads back equal."""

from __future__ import annotations

import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.command import toml_text

TEXTS = st.text(st.characters(codec="utf-8"), max_size=20)
SCALARS = st.one_of(
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    TEXTS,
    st.lists(st.one_of(st.integers(0, 9), TEXTS), max_size=3),
)
TABLES = st.recursive(
    st.dictionaries(TEXTS, SCALARS, max_size=4),
    lambda inner: st.dictionaries(
        TEXTS, st.one_of(SCALARS, inner, st.lists(inner, min_size=1, max_size=3)), max_size=4
    ),
    max_leaves=12,
)


@given(TABLES)
def test_any_document_reads_back_equal(document: dict[str, object]) -> None:
    assert tomllib.loads(toml_text.dumps(document)) == document


def test_what_toml_cannot_hold_is_refused() -> None:
    with pytest.raises(TypeError):
        toml_text.dumps({"key": None})
