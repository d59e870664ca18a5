"""Tenants of a runtime folder: what is added is what the scheduler reads, and the rest stays."""

from __future__ import annotations

import hashlib
import stat
from pathlib import Path

import pytest

from scheduler_svc.adapters.tenants import parse
from scheduler_svc.domain.model import PriorityClass
from sluice.command import first_files
from sluice.command.supervisor import locked
from sluice.command.tenants_file import Tenant, TenantsFile
from sluice.config import ConfigError


@pytest.fixture
def file(tmp_path: Path) -> TenantsFile:
    first_files.prepare(tmp_path)
    return TenantsFile(tmp_path)


def test_the_scheduler_knows_an_added_tenant_by_its_key(file: TenantsFile) -> None:
    before = file.path.read_text()
    path = file.add(Tenant("team-a", "batch", "interactive", ("m", 'odd "name"')))
    assert file.path.read_text().startswith(before.rstrip())
    for one in (path, file.path):
        assert stat.S_IMODE(one.stat().st_mode) == 0o600
    key = path.read_text().strip()
    assert key not in file.path.read_text()
    tenant = parse(file.path.read_text()).by_key_hash[hashlib.sha256(key.encode()).hexdigest()]
    assert tenant.name == "team-a"
    assert tenant.default_class is PriorityClass.BATCH
    assert tenant.ceiling is PriorityClass.INTERACTIVE
    assert tenant.models == {"m", 'odd "name"'}


def test_the_list_holds_every_tenant(file: TenantsFile) -> None:
    file.add(Tenant("b"))
    assert file.tenants() == [Tenant("dev"), Tenant("b")]


def test_adding_and_removing_leaves_the_file_as_it_was(file: TenantsFile) -> None:
    before = file.path.read_text()
    path = file.add(Tenant("b"))
    file.remove("b")
    assert file.path.read_text() == before
    assert not path.exists()


def test_removing_one_of_several_leaves_the_others_and_their_comments(file: TenantsFile) -> None:
    file.add(Tenant("a"))
    file.add(Tenant("b"))
    file.path.write_text(file.path.read_text() + "# the end of b\n")
    file.add(Tenant("c"))
    file.remove("a")
    assert [one.name for one in file.tenants()] == ["dev", "b", "c"]
    assert "# the end of b" in file.path.read_text()
    parse(file.path.read_text())


@pytest.mark.parametrize(
    ("tenant", "problem"),
    [
        (Tenant("Big"), "name"),
        (Tenant("../x"), "name"),
        (Tenant("x" * 65), "name"),
        (Tenant("dev"), "already"),
        (Tenant("a", "critical", "batch"), "ceiling"),
    ],
)
def test_a_wrong_tenant_changes_nothing(file: TenantsFile, tenant: Tenant, problem: str) -> None:
    before = sorted(file.path.parent.iterdir()), file.path.read_text()
    with pytest.raises(ConfigError, match=problem):
        file.add(tenant)
    assert (sorted(file.path.parent.iterdir()), file.path.read_text()) == before


def test_who_cannot_be_removed_stays(file: TenantsFile) -> None:
    file.add(Tenant("b"))
    before = file.path.read_text()
    for name, problem in (("nobody", "there are: dev, b"), ("dev", "`sluice` itself")):
        with pytest.raises(ConfigError, match=problem):
            file.remove(name)
    assert file.path.read_text() == before


def test_the_last_tenant_cannot_be_removed(file: TenantsFile) -> None:
    file.path.with_name("api-key").unlink()
    with pytest.raises(ConfigError, match="last"):
        file.remove("dev")


def test_a_form_that_cannot_be_cut_is_left_to_an_editor(file: TenantsFile) -> None:
    file.path.write_text('tenant = [{ name = "a" }, { name = "b" }]\n')
    with pytest.raises(ConfigError, match="editor"):
        file.remove("a")


def test_a_header_inside_a_string_damages_nothing(file: TenantsFile) -> None:
    file.add(Tenant("a"))
    text = file.path.read_text() + 'models2 = """\n[[tenant]]\n"""\n'
    file.path.write_text(text)
    file.add(Tenant("b"))
    with pytest.raises(ConfigError, match="editor"):
        file.remove("b")
    assert [one.name for one in file.tenants()] == ["dev", "a", "b"]


def test_a_file_that_is_missing_or_no_toml_is_named(tmp_path: Path) -> None:
    file = TenantsFile(tmp_path)
    with pytest.raises(ConfigError, match="sluice up"):
        file.tenants()
    file.path.write_text("no toml")
    with pytest.raises(ConfigError, match="TOML"):
        file.add(Tenant("a"))


def test_two_changes_do_not_meet(file: TenantsFile) -> None:
    with (
        locked(file.path.parent / "run" / "tenants.lock"),
        pytest.raises(ConfigError, match="another command"),
    ):
        file.add(Tenant("a"))
