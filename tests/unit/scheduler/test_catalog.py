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


def described(model: str, *, embeds: bool = False) -> Any:
    can = SimpleNamespace(generate=not embeds, embed=embeds)
    return SimpleNamespace(model=model, capabilities=can)


def granted(*known: Any, knows_all: bool) -> str:
    """The model of a run's step that names none, of a run that may call m and e."""
    models = dict(enumerate(known))
    fleet: Any = SimpleNamespace(models=models, knows_all=knows_all)
    tenant: Any = SimpleNamespace(may_use=lambda _name: True)
    return Catalog(fleet, "", "", AliasTable({})).granted("", tenant, ["m", "e"])


def test_a_runs_step_waits_for_a_scheduler_that_does_not_know_its_models_yet() -> None:
    """Mutant step_of_an_unknown_model_fails: a scheduler that has just begun anew."""
    for known in ((), (described("other"),), (described("e", embeds=True),)):
        with pytest.raises(SluiceError) as raised:
            granted(*known, knows_all=False)
        assert (raised.value.code, raised.value.reason) == (Code.UNAVAILABLE, "NO_INSTANCE")
        assert raised.value.retry_after_s
    assert granted(described("m"), knows_all=False) == "m"


def test_a_runs_step_is_refused_when_its_models_are_gone() -> None:
    with pytest.raises(SluiceError) as raised:
        granted(described("other"), knows_all=True)
    assert (raised.value.code, raised.value.reason) == (Code.NOT_FOUND, "MODEL_UNKNOWN")
    assert raised.value.message == "no such model for this tenant: 'm, e'"
