"""The limits of a tenant and of its agent runs, as options and as words."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Final

import typer

from sluice.command.cli_support import span_s

if TYPE_CHECKING:
    from sluice.scheduler.v1 import admin_pb2, runs_pb2

NONE: Final = "none"
OPTION: Final = "--run-budget"
# What the fields of a quota can hold.
COUNT_MAX: Final = (1 << 32) - 1
TOKENS_MAX: Final = 10**12

LimitOption = Annotated[str, typer.Option(help="A number; `none`: no limit, the default.")]
RunsOption = Annotated[
    str,
    typer.Option(help="Open agent runs; `none`: scheduler.agent_runs_max, the default."),
]

RunBudgetOption = Annotated[
    list[str] | None,
    typer.Option(
        OPTION,
        metavar="LIMIT=VALUE",
        help="Most that each of its agent runs may use; LIMIT is steps, tokens, calls, time (such"
        " as 10m) or cost; repeatable. VALUE `none`: the mesh's limit, the default.",
        show_default=False,
    ),
]


LIMITS: Final = {
    "requests_per_min": "--requests-per-min",
    "tokens_per_min": "--tokens-per-min",
    "concurrent_requests": "--concurrent",
    "tokens_per_day": "--tokens-per-day",
    "concurrent_runs": "--concurrent-runs",
}


def set_limits(tenant: admin_pb2.Tenant, *values: str) -> None:
    """Sets the quotas that are given, in the order of LIMITS. Raises BadParameter."""
    for (field, option), value in zip(LIMITS.items(), values, strict=True):
        if value == NONE:
            tenant.quota.ClearField(field)  # type: ignore[arg-type]  # one of LIMITS
        elif value:
            most = TOKENS_MAX if field.startswith("tokens") else COUNT_MAX
            if not value.isdecimal() or int(value) > most:
                raise typer.BadParameter(
                    f"{value!r} must be a number of at most {most}, or {NONE}", param_hint=option
                )
            setattr(tenant.quota, field, int(value))


def limit_word(quota: admin_pb2.TenantQuota, field: str) -> str:
    """A limit, or - for none."""
    return str(getattr(quota, field)) if quota.HasField(field) else "-"  # type: ignore[arg-type]


def set_run_budget(budget: runs_pb2.RunBudget, words: Sequence[str]) -> None:
    """Sets what words such as ``steps=20`` say. Raises BadParameter."""
    for word in words:
        name, _, value = word.partition("=")
        if name not in _RUN_LIMITS or not value:
            raise typer.BadParameter(
                f"{word!r} must be LIMIT=VALUE with {', '.join(_RUN_LIMITS)}", param_hint=OPTION
            )
        field, put = _RUN_LIMITS[name]
        if value == NONE:
            budget.ClearField(field)  # type: ignore[arg-type]  # one of _RUN_LIMITS
        else:
            put(budget, field, value)


def run_budget_words(budget: runs_pb2.RunBudget) -> str:
    """The limits that are set, as :func:`set_run_budget` takes them."""
    return ", ".join(
        f"{name}={_value(budget, field)}"
        for name, (field, _) in _RUN_LIMITS.items()
        if budget.HasField(field)  # type: ignore[arg-type]  # one of _RUN_LIMITS
    )


def _value(budget: runs_pb2.RunBudget, field: str) -> str:
    if field == "wall_time_max":
        return f"{budget.wall_time_max.seconds + budget.wall_time_max.nanos / 1e9:g}s"
    return f"{getattr(budget, field):.15g}"


def _put_count(budget: runs_pb2.RunBudget, field: str, value: str) -> None:
    most = TOKENS_MAX if field == "tokens_max" else COUNT_MAX
    least = 0 if field == "tool_calls_max" else 1
    if not value.isdecimal() or not least <= int(value) <= most:
        raise typer.BadParameter(
            f"{value!r} must be a number of {least} to {most}, or {NONE}", param_hint=OPTION
        )
    setattr(budget, field, int(value))


def _put_time(budget: runs_pb2.RunBudget, field: str, value: str) -> None:
    del field
    budget.wall_time_max.seconds, budget.wall_time_max.nanos = span_s(value, OPTION), 0


def _put_cost(budget: runs_pb2.RunBudget, field: str, value: str) -> None:
    try:
        cost = float(value)
    except ValueError:
        cost = math.nan
    if not 0 < cost < math.inf:
        raise typer.BadParameter(
            f"{value!r} must be a number of more than 0, or {NONE}", param_hint=OPTION
        )
    setattr(budget, field, cost)


_RUN_LIMITS: Final[dict[str, tuple[str, Callable[[runs_pb2.RunBudget, str, str], None]]]] = {
    "steps": ("steps_max", _put_count),
    "tokens": ("tokens_max", _put_count),
    "calls": ("tool_calls_max", _put_count),
    "time": ("wall_time_max", _put_time),
    "cost": ("cost_max", _put_cost),
}
