"""Settings of the queue: bounds, shares and weights reach the domain; wrong ones are refused."""

from __future__ import annotations

import pytest

from scheduler_svc.config import SchedulerConfig, domain_limits
from scheduler_svc.domain.limits import SchedulerLimits
from scheduler_svc.domain.model import PriorityClass
from sluice.config import ConfigError


def test_without_settings_the_domain_has_its_own_defaults() -> None:
    assert domain_limits(SchedulerConfig()).classes == SchedulerLimits().classes


def test_bounds_and_shares_reach_the_domain() -> None:
    config = SchedulerConfig(
        queue_batch=1_000,
        queue_batch_mib=10,
        queue_tenant_share=0.25,
        share_batch=0.2,
        tenant_weights=("gold=4", "lead=0.5"),
    )
    limits = domain_limits(config)
    batch = limits.classes[PriorityClass.BATCH]
    assert (batch.requests_max, batch.tenant_requests_max) == (1_000, 250)
    assert (batch.bytes_max, batch.tenant_bytes_max) == (10 << 20, 10 << 18)
    assert batch.share == 0.2
    assert limits.tenant_weights == {"gold": 4.0, "lead": 0.5}


@pytest.mark.parametrize("entry", ["gold", "gold=", "=2", "gold=much", "gold=0", "gold=nan"])
def test_a_weight_that_is_none_is_refused_by_name(entry: str) -> None:
    with pytest.raises(ConfigError, match="tenant_weights"):
        domain_limits(SchedulerConfig(tenant_weights=(entry,)))
