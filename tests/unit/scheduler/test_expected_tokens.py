"""A request counts with the output that it will write, also when it says nothing about it: demand,
placement and the ledger of KV memory go by it.

Seen to fail on the mutant: a request that leaves out `n` is expected to write nothing.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from scheduler_svc.adapters.decision_log import DecisionLog
from scheduler_svc.adapters.decision_records import Recorder
from scheduler_svc.adapters.decisions import Decisions
from scheduler_svc.adapters.quota_keeper import QuotaKeeper
from scheduler_svc.adapters.serving import Caller, Serving
from scheduler_svc.adapters.tenant import Tenant
from scheduler_svc.adapters.usage_log import UsageLog
from scheduler_svc.config import SchedulerConfig, class_times
from scheduler_svc.domain.flush import FlushBudget
from scheduler_svc.domain.limits import SchedulerLimits
from scheduler_svc.domain.model import PriorityClass, Ticket
from scheduler_svc.domain.placement import LeastWork
from scheduler_svc.domain.prices import Prices
from scheduler_svc.domain.scheduler import Scheduler
from sluice.scheduler.v1 import generate_pb2


async def ticket_of(request: generate_pb2.GenerateRequest) -> Ticket:
    """What the gate would be given."""
    tenant = Tenant("dev")
    gate = SimpleNamespace(
        domain=Scheduler(SchedulerLimits(), LeastWork()),
        flush=FlushBudget(),
        quota=QuotaKeeper(),
        check=lambda ticket: None,
    )
    serving = Serving(
        cast("Any", gate),
        cast("Any", SimpleNamespace(resolve=lambda model, tenant, embeds: "m")),
        class_times(SchedulerConfig()),
        cast("Any", SimpleNamespace()),
        lambda instance: None,
        UsageLog("test", None),
        Prices(),
        Decisions(Recorder("test", 1.0), DecisionLog(1 << 20), 0.0),
    )
    caller = Caller(tenant, "r", PriorityClass.STANDARD, 10.0)
    live, _ = await serving.generation(request, caller, whole=False)
    return live.ticket


@pytest.mark.parametrize("outputs", [None, 1, 3])
async def test_a_request_is_expected_to_write_for_each_of_its_outputs(outputs: int | None) -> None:
    request = generate_pb2.GenerateRequest(prompt="hello")
    request.sampling.max_tokens = 40
    if outputs is not None:
        request.sampling.n = outputs
    ticket = await ticket_of(request)
    assert ticket.output_tokens == 40 * (outputs or 1)


async def test_a_request_without_sampling_is_expected_to_write_the_default() -> None:
    ticket = await ticket_of(generate_pb2.GenerateRequest(prompt="hello"))
    assert ticket.output_tokens == SchedulerLimits().default_output_tokens
