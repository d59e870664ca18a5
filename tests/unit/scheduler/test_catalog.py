"""What a client is told of a model that is not there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from scheduler_svc.adapters.alias_table import AliasTable
from scheduler_svc.adapters.catalog import SHOWN_CHARS_MAX, Catalog
from sluice.errors import Code, SluiceError


@pytest.mark.parametrize("known_to_others", [False, True])
@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("chta", "'chta'"),
        ("m" * SHOWN_CHARS_MAX, f"'{'m' * SHOWN_CHARS_MAX}'"),
        ("m" * 256, f"'{'m' * SHOWN_CHARS_MAX}...'"),
        ("a\n\x1b[31mé", r"'a\n\x1b[31m\xe9'"),
    ],
    ids=["short", "longest shown whole", "longer", "not printable"],
)
def test_a_model_that_is_not_there_is_named_in_the_message(
    name: str, shown: str, known_to_others: bool
) -> None:
    """Alike where it is there for others."""
    fleet: Any = SimpleNamespace(models={}, knows_all=True)
    tenant: Any = SimpleNamespace(may_use=lambda _name: not known_to_others)
    catalog = Catalog(fleet, "", "", AliasTable({}))
    with pytest.raises(SluiceError) as raised:
        catalog.resolve(name, tenant)
    assert (raised.value.code, raised.value.reason) == (Code.NOT_FOUND, "MODEL_UNKNOWN")
    assert raised.value.message == f"no such model for this tenant: {shown}"
    assert raised.value.metadata == {"model": name}
    assert [one.field for one in raised.value.fields] == ["model"]
