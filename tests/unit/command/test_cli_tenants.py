"""How the options of `sluice tenants` become a tenant."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import typer

from sluice.agent.v1 import tools_pb2
from sluice.command import cli_support, cli_tenants, cli_tools, tenant_tools
from sluice.command.cli_tenants import CLASSES
from sluice.command.tenant_limits import NONE, run_budget_words, set_limits, set_run_budget
from sluice.common.v1 import policy_pb2
from sluice.config import ConfigError
from sluice.errors import Code, SluiceError
from sluice.scheduler.v1 import admin_pb2, runs_pb2


def test_the_words_of_classes_are_the_protos_own() -> None:
    for number, name in enumerate(CLASSES, start=1):
        assert policy_pb2.PriorityClass.Value(f"PRIORITY_CLASS_{name.upper()}") == number
        assert cli_tenants._class_name(number) == name


def test_only_what_is_given_changes() -> None:
    quota = admin_pb2.TenantQuota(requests_per_min=5, tokens_per_day=7)
    tenant = admin_pb2.Tenant(
        name="a",
        ceiling=policy_pb2.PRIORITY_CLASS_INTERACTIVE,
        default_class=policy_pb2.PRIORITY_CLASS_STANDARD,
        models=["m"],
        quota=quota,
    )
    before = admin_pb2.Tenant()
    before.CopyFrom(tenant)
    cli_tenants._set(tenant, "", "", None)
    set_limits(tenant, "", "", "", "", "")
    cli_tenants._set_rights(tenant, None, None, None)
    assert tenant == before
    cli_tenants._set(tenant, "", "", [NONE])
    set_limits(tenant, NONE, "12", "", "", "3")
    cli_tenants._set_rights(tenant, True, None, True)
    assert list(tenant.models) == []
    assert not tenant.quota.HasField("requests_per_min")
    assert (tenant.quota.tokens_per_min, tenant.quota.tokens_per_day) == (12, 7)
    assert tenant.quota.concurrent_runs == 3
    assert (tenant.agents, tenant.sessions, tenant.quota_fail_open) == (True, False, True)


def test_names_that_are_given_replace_those_that_were_there() -> None:
    tenant = admin_pb2.Tenant(name="a", tools=["clock"])
    tenant_tools.set_names(tenant.tools, None)
    assert list(tenant.tools) == ["clock"]
    tenant_tools.set_names(tenant.tools, ["sales", "handbook"])
    assert list(tenant.tools) == ["sales", "handbook"]
    tenant_tools.set_names(tenant.tools, [NONE])
    assert list(tenant.tools) == []


def test_tools_are_given_whole_or_added_and_taken_out() -> None:
    tenant = admin_pb2.Tenant(name="a", tools=["clock", "sales"])
    tenant_tools.set_tools(tenant.tools, None, ["desk", "clock"], ["sales"])
    assert list(tenant.tools) == ["clock", "desk"]
    tenant_tools.set_tools(tenant.tools, ["handbook"], (), ())
    assert list(tenant.tools) == ["handbook"]
    with pytest.raises(typer.BadParameter, match="not both"):
        tenant_tools.set_tools(tenant.tools, ["clock"], ["desk"], ())
    with pytest.raises(typer.BadParameter, match="there are: handbook") as raised:
        tenant_tools.set_tools(tenant.tools, None, (), ["clock"])
    assert raised.value.param_hint == "--remove-tool"
    assert list(tenant.tools) == ["handbook"]


def test_a_lower_ceiling_takes_the_default_class_with_it_unless_one_is_said() -> None:
    tenant = admin_pb2.Tenant(
        name="a",
        ceiling=policy_pb2.PRIORITY_CLASS_CRITICAL,
        default_class=policy_pb2.PRIORITY_CLASS_STANDARD,
    )
    cli_tenants._set(tenant, "", "batch", None)
    assert (tenant.ceiling, tenant.default_class) == (4, 4)
    cli_tenants._set(tenant, "standard", "critical", None)
    assert (tenant.ceiling, tenant.default_class) == (1, 3)


@pytest.mark.parametrize("value", ["-1", "1.5", "many", str(1 << 32)])
def test_a_limit_that_is_no_number_names_its_option(value: str) -> None:
    with pytest.raises(typer.BadParameter) as raised:
        set_limits(admin_pb2.Tenant(), value, "", "", "", "")
    assert raised.value.param_hint == "--requests-per-min"


def test_limits_of_runs_are_set_one_by_one_and_taken_away() -> None:
    budget = runs_pb2.RunBudget()
    set_run_budget(budget, ["steps=20", "tokens=9000", "calls=0", "time=10m", "cost=0.5"])
    assert (budget.steps_max, budget.tokens_max, budget.tool_calls_max) == (20, 9000, 0)
    assert (budget.wall_time_max.seconds, budget.cost_max) == (600, 0.5)
    assert run_budget_words(budget) == "steps=20, tokens=9000, calls=0, time=600s, cost=0.5"
    set_run_budget(budget, ["steps=none", "time=none", "cost=2"])
    assert run_budget_words(budget) == "tokens=9000, calls=0, cost=2"


@pytest.mark.parametrize(
    "word",
    [
        "",
        "steps",
        "steps=",
        "step=3",
        "steps=0",
        "tokens=-1",
        "calls=x",
        "time=5",
        "cost=0",
        "cost=nan",
    ],
)
def test_a_wrong_limit_of_runs_names_its_option(word: str) -> None:
    with pytest.raises(typer.BadParameter) as raised:
        set_run_budget(runs_pb2.RunBudget(), [word])
    assert raised.value.param_hint == "--run-budget"


def test_a_wrong_class_names_its_option() -> None:
    with pytest.raises(typer.BadParameter) as raised:
        cli_tenants._set(admin_pb2.Tenant(), "", "urgent", None)
    assert raised.value.param_hint == "--ceiling"


@pytest.mark.parametrize(
    ("text", "seconds"), [("30s", 30), ("5m", 300), ("2h", 7200), ("1d", 86400)]
)
def test_a_span_is_a_number_and_a_unit(text: str, seconds: int) -> None:
    assert cli_support.span_s(text, "--expires") == seconds


@pytest.mark.parametrize("text", ["", "5", "d", "1w", "-1d", "1.5h"])
def test_anything_else_is_no_span(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="90d"):
        cli_support.span_s(text, "--expires")


class Registry:
    """Answers PutTenant with an error."""

    def __init__(self, error: SluiceError) -> None:
        self.error = error

    def admin(self, method: str, request: object) -> None:
        raise self.error


def test_a_tenant_that_is_there_is_named_and_how_it_is_changed() -> None:
    client: Any = Registry(SluiceError(Code.ABORTED, "VERSION_CONFLICT", "It was changed."))
    with pytest.raises(ConfigError, match="'a' already; `sluice tenants set`"):
        cli_tenants._create(client, admin_pb2.Tenant(name="a"))
    client = Registry(SluiceError(Code.UNAVAILABLE, "STORE_UNAVAILABLE", "Gone."))
    with pytest.raises(SluiceError, match=r"Gone\."):
        cli_tenants._create(client, admin_pb2.Tenant(name="a"))


class Admin:
    """A client of a mesh with the tenant dev, which has registered one tool."""

    def __init__(self) -> None:
        self.deleted = ""

    def admin(self, method: str, request: Any) -> Any:
        if method == "ListTenantTools":
            tool = tools_pb2.ToolDeclaration(name="look")
            return admin_pb2.ListTenantToolsResponse(tools=[tool])
        if method == "DeleteTenant":
            self.deleted = request.tenant
            return admin_pb2.DeleteTenantResponse()
        return admin_pb2.ListTenantsResponse(tenants=[admin_pb2.Tenant(name="dev")])


def test_a_tool_that_nobody_declares_names_the_nearest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    client: Any = Admin()
    monkeypatch.setattr(tenant_tools, "_configured_tools", lambda _: {"calculator", "clock"})
    names = ["calculater", "look__at", "lok__at", "zzz", "clock"]
    tenant_tools.warn_of_unknown(client, None, "dev", names)
    said = capsys.readouterr().err.splitlines()
    assert [line.rsplit("; ", 1)[-1] for line in said[:2]] == [
        "the nearest is 'calculator'",
        "the nearest is 'look'",
    ]
    assert len(said) == 3
    assert said[2].endswith("declares it for dev")


def test_tools_of_a_tenant_that_is_not_there_are_not_an_empty_list(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli_tools, "open_admin", lambda *_: nullcontext(Admin()))
    for as_json in (False, True):
        with pytest.raises(SluiceError) as raised:
            cli_tools.list_tools("ghost", as_json)
        assert raised.value.reason == "TENANT_UNKNOWN"
    cli_tools.list_tools("dev")
    assert "look" in capsys.readouterr().out


def test_what_is_said_of_a_removal_is_not_broken_into_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    admin = Admin()
    monkeypatch.setattr(cli_tenants, "open_admin", lambda *_: nullcontext(admin))
    monkeypatch.setattr(cli_tenants, "_own_key_id", lambda _: "")
    monkeypatch.setattr(cli_tenants, "_key_path", lambda *_: tmp_path / "none")
    cli_tenants.remove("dev")
    assert admin.deleted == "dev"
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_a_change_of_nothing_is_refused() -> None:
    with pytest.raises(typer.BadParameter, match="no option says"):
        cli_tenants.change("a")


def test_of_thousands_of_tenants_a_few_are_named() -> None:
    found = admin_pb2.ListTenantsResponse(
        tenants=[admin_pb2.Tenant(name=f"t{number}") for number in range(3_000)]
    )
    with pytest.raises(ConfigError) as raised:
        cli_tenants._named(found, "nobody")
    assert str(raised.value).endswith("t8, t9 and 2990 more")
