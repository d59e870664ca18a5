"""Tenants, keys and the file they come from."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from scheduler_svc.adapters.state_watch import read_tenant, tenant_message
from scheduler_svc.adapters.tenant import Key, Tenant
from scheduler_svc.adapters.tenants import Tenants
from scheduler_svc.adapters.tenants_file import TenantsFileError, parse
from scheduler_svc.domain.model import PriorityClass
from sluice.errors import Code, SluiceError
from sluice.quota.exchange import Limits


def key_hash(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


GOOD = f"""
admin_key_sha256 = ["{key_hash("root-key")}"]
[[tenant]]
name = "dev"
key_sha256 = ["{key_hash("k1")}", "{key_hash("k2")}"]
ceiling = "interactive"
default_class = "standard"
models = ["m1"]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tenants.toml"
    path.write_text(GOOD)
    return path


@pytest.mark.parametrize("header", ["Bearer k1", "bearer k2", "BEARER k1"])
def test_a_known_key_names_its_tenant(file: Path, header: str) -> None:
    assert Tenants(file).tenant(header).name == "dev"


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (None, "KEY_MISSING"),
        ("", "KEY_MISSING"),
        ("k1", "KEY_MALFORMED"),
        ("Basic k1", "KEY_MALFORMED"),
        ("Bearer ", "KEY_MALFORMED"),
        ("Bearer " + "x" * 513, "KEY_MALFORMED"),
        ("Bearer nope", "KEY_UNKNOWN"),
        ("Bearer root-key", "KEY_UNKNOWN"),
    ],
)
def test_anything_else_is_unauthenticated_with_a_reason(
    file: Path, header: str | None, reason: str
) -> None:
    with pytest.raises(SluiceError) as raised:
        Tenants(file).tenant(header)
    assert (raised.value.code, raised.value.reason) == (Code.UNAUTHENTICATED, reason)


def test_an_admin_key_is_not_a_tenants_key_and_the_other_way_round(file: Path) -> None:
    tenants = Tenants(file)
    tenants.check_admin("Bearer root-key")
    with pytest.raises(SluiceError) as raised:
        tenants.check_admin("Bearer k1")
    assert raised.value.code is Code.PERMISSION_DENIED
    with pytest.raises(SluiceError) as raised:
        tenants.check_admin("Bearer nope")
    assert raised.value.code is Code.UNAUTHENTICATED


def test_a_class_is_lowered_to_the_ceiling_and_defaults_to_the_tenants(file: Path) -> None:
    tenant = Tenants(file).tenant("Bearer k1")
    assert tenant.class_for(PriorityClass.CRITICAL) is PriorityClass.INTERACTIVE
    assert tenant.class_for(PriorityClass.BATCH) is PriorityClass.BATCH
    assert tenant.class_for(None) is PriorityClass.STANDARD
    assert tenant.may_use("m1")
    assert not tenant.may_use("m2")


def test_a_changed_file_is_read_and_a_bad_one_keeps_the_last_good(file: Path) -> None:
    tenants = Tenants(file)
    file.write_text(GOOD.replace(key_hash("k1"), key_hash("k3")))
    os.utime(file, ns=(1, 1))
    tenants.refresh()
    assert tenants.tenant("Bearer k3").name == "dev"
    file.write_text("not toml [")
    tenants.refresh()
    assert tenants.reloads_failed == 1
    assert tenants.tenant("Bearer k3").name == "dev"
    file.unlink()
    tenants.refresh()
    assert tenants.reloads_failed == 2
    assert tenants.tenant("Bearer k3").name == "dev"


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("x = [", "not TOML"),
        ("[[tenant]]\nname = 'A'", "tenant[0].name"),
        ("[[tenant]]\nname = 'a'\nceiling = 'urgent'", "tenant[0].ceiling"),
        ("[[tenant]]\nname = 'a'\ndefault_class = 3", "tenant[0].default_class"),
        ("[[tenant]]\nname = 'a'\nmodels = 'm'", "tenant[0].models"),
        ("[[tenant]]\nname = 'a'\nagents = 'yes'", "tenant[0].agents"),
        ("[[tenant]]\nname = 'a'\ntools = 'clock'", "tenant[0].tools"),
        ("[[tenant]]\nname = 'a'\nconcurrent_runs = -1", "tenant[0].concurrent_runs"),
        ("[[tenant]]\nname = 'a'\nconcurrent_runs = true", "tenant[0].concurrent_runs"),
        ("[[tenant]]\nname = 'a'\nkey_sha256 = ['zz']", "tenant[0].key_sha256"),
        ("[[tenant]]\nname = 'a'\nquota = 1", "tenant[0].quota"),
        ("[[tenant]]\nname = 'a'\n[[tenant]]\nname = 'a'", "tenant[1].name"),
        ("tenant = [3]", "tenant[0]"),
        ("tenant = 3", "tenant: must be an array"),
        ("[[tenant]]\nname = 'a'\n[admin]\nx = 1\n", "admin"),
        ("admin_key_sha256 = 'x'\n[[tenant]]\nname = 'a'", "admin_key_sha256"),
        ("", "at least one [[tenant]]"),
    ],
)
def test_a_wrong_file_names_the_entry_and_the_field(text: str, where: str) -> None:
    with pytest.raises(TenantsFileError) as raised:
        parse(text)
    assert where in str(raised.value)


def test_a_tenant_of_the_file_has_the_rights_that_it_says_and_seeds_them() -> None:
    text = "[[tenant]]\nname = 'a'\nagents = true\ntools = ['clock']\nconcurrent_runs = 2\n"
    tenant = parse(text).tenants["a"]
    assert (tenant.agents, tenant.tools, tenant.concurrent_runs) == (True, frozenset(("clock",)), 2)
    assert read_tenant(tenant_message(tenant)) == tenant
    plain = parse("[[tenant]]\nname = 'a'\n").tenants["a"]
    assert (plain.agents, plain.tools, plain.concurrent_runs) == (False, frozenset(), None)
    assert read_tenant(tenant_message(plain)) == plain


def test_one_key_for_two_tenants_is_refused() -> None:
    entry = f"[[tenant]]\nname = '%s'\nkey_sha256 = ['{key_hash('k')}']\n"
    with pytest.raises(TenantsFileError, match="two tenants"):
        parse(entry % "a" + entry % "b")


def test_a_default_above_the_ceiling_is_lowered_to_it() -> None:
    tenant = parse("[[tenant]]\nname = 'a'\nceiling = 'batch'").tenants["a"]
    assert tenant.default_class is PriorityClass.BATCH


def a_key(key: str, tenant: str = "team", **more: float) -> Key:
    return Key(f"id-{key}", tenant, key_hash(key), **more)


def test_once_the_state_service_has_told_only_what_it_says_counts(file: Path) -> None:
    tenants = Tenants(file)
    tenants.replace([Tenant("team")], [a_key("t1")])
    assert tenants.tenant("Bearer t1").name == "team"
    with pytest.raises(SluiceError, match="not known"):
        tenants.tenant("Bearer k1")
    tenants.check_admin("Bearer root-key")
    file.write_text(GOOD.replace(key_hash("root-key"), key_hash("new-root")))
    os.utime(file, ns=(1, 1))
    tenants.refresh()
    assert tenants.seed_changed.is_set()
    tenants.check_admin("Bearer new-root")
    with pytest.raises(SluiceError, match="not known"):
        tenants.tenant("Bearer k1")


def test_before_the_state_service_has_told_an_unknown_key_is_not_refused_for_good(
    file: Path,
) -> None:
    tenants = Tenants(file, awaits_state=True)
    assert tenants.tenant("Bearer k1").name == "dev"
    with pytest.raises(SluiceError) as raised:
        tenants.tenant("Bearer t1")
    assert (raised.value.code, raised.value.reason) == (Code.UNAVAILABLE, "STATE_UNREACHABLE")
    tenants.replace([Tenant("team")], [a_key("t1")])
    assert tenants.tenant("Bearer t1").name == "team"
    with pytest.raises(SluiceError, match="not known"):
        tenants.tenant("Bearer k1")


def test_a_key_is_added_rotated_and_revoked_and_goes_with_its_tenant(file: Path) -> None:
    tenants = Tenants(file)
    tenants.replace([Tenant("team")], [a_key("t1")])
    tenants.change(keys=[a_key("t2")])
    assert {tenants.tenant(f"Bearer {key}").name for key in ("t1", "t2")} == {"team"}
    tenants.change(removed_keys=["id-t1"])
    with pytest.raises(SluiceError, match="not known"):
        tenants.tenant("Bearer t1")
    tenants.change([Tenant("team", ceiling=PriorityClass.BATCH)])
    assert tenants.tenant("Bearer t2").ceiling is PriorityClass.BATCH
    # The tenant is gone before its keys are, or the other way round: nobody gets in between.
    tenants.change([Tenant("other")], removed=["team"])
    with pytest.raises(SluiceError, match="not known"):
        tenants.tenant("Bearer t2")


def test_a_key_may_come_before_its_tenant(file: Path) -> None:
    tenants = Tenants(file)
    tenants.change(keys=[a_key("t1")])
    with pytest.raises(SluiceError, match="not known"):
        tenants.tenant("Bearer t1")
    tenants.change([Tenant("team")])
    assert tenants.tenant("Bearer t1").name == "team"


def test_a_key_is_void_from_its_expiry_on(file: Path) -> None:
    now = [1000.0]
    tenants = Tenants(file, wall=lambda: now[0])
    tenants.replace([Tenant("team")], [a_key("t1", expires_s=1001.0)])
    assert tenants.tenant("Bearer t1").name == "team"
    now[0] = 1001.0
    with pytest.raises(SluiceError) as raised:
        tenants.tenant("Bearer t1")
    assert (raised.value.code, raised.value.reason) == (Code.UNAUTHENTICATED, "KEY_EXPIRED")


def test_a_listener_hears_of_every_tenant_once_and_of_what_changes(file: Path) -> None:
    tenants = Tenants(file)
    heard: list[tuple[str, Limits | None, bool]] = []

    def on_tenant(tenant: str, limits: Limits, *, fail_open: bool) -> None:
        heard.append((tenant, limits, fail_open))

    tenants.listen(on_tenant, lambda name: heard.append((name, None, False)))
    assert heard == [("dev", Limits(), False)]
    small = Tenant("team", limits=Limits(requests_per_min=5), quota_fail_open=True)
    tenants.replace([small], [])
    assert heard[1:] == [("dev", None, False), ("team", Limits(requests_per_min=5), True)]
    tenants.change([small])
    assert len(heard) == 3


def test_a_table_that_became_empty_is_seeded_again(file: Path) -> None:
    tenants = Tenants(file)
    tenants.replace([Tenant("team")], [a_key("t1")])
    tenants.change(removed=["team"])
    assert tenants.seed_changed.is_set()
