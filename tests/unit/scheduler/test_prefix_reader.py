"""From a request's work to the beginnings of its prompt, and from GPU readings to the domain's."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler_svc.adapters.fleet_watch import gpu_state
from scheduler_svc.adapters.prefixes import PrefixReader
from scheduler_svc.domain.model import GpuState, Prefix
from scheduler_svc.domain.prefix_blocks import PrefixBlock
from sluice.common.v1 import input_pb2
from sluice.inference.v1 import inference_pb2, load_pb2

READER = PrefixReader(b"test")
BLOCK = PrefixBlock(tokens=32, text_bytes=128)


def work(salt: str = "tenant/", model: str = "m", **kind: Any) -> inference_pb2.Work:
    given = input_pb2.Input(**kind)
    return inference_pb2.Work(model=model, cache_salt=salt, input=given)


def chat(*contents: str) -> input_pb2.Conversation:
    messages = [input_pb2.ChatMessage(role="user", content=content) for content in contents]
    return input_pb2.Conversation(messages=messages)


def read(given: inference_pb2.Work) -> Prefix:
    prefix = READER.read(given, BLOCK)
    assert prefix is not None
    return prefix


def common(one: Prefix, two: Prefix) -> int:
    return len(set(one.hashes.tolist()) & set(two.hashes.tolist()))


@pytest.mark.parametrize(
    "kind",
    [
        {"text": "x" * 1_000},
        {"token_ids": input_pb2.TokenIds(ids=range(250))},
        {"conversation": chat("x" * 1_000)},
    ],
)
def test_every_kind_of_input_has_beginnings_and_a_repeat_has_the_same(
    kind: dict[str, Any],
) -> None:
    prefix = read(work(**kind))
    assert len(prefix.hashes) == 7
    assert 7 < prefix.blocks < 8.2
    assert common(prefix, read(work(**kind))) == 7


def test_nothing_is_shared_between_tenants_models_and_kinds() -> None:
    given: dict[str, Any] = {"text": "x" * 1_000}
    mine = read(work(**given))
    assert common(mine, read(work("other/", **given))) == 0
    assert common(mine, read(work("tenant/salt", **given))) == 0
    assert common(mine, read(work(model="n", **given))) == 0
    ids = input_pb2.TokenIds(ids=[int.from_bytes(b"xxxx", "little")] * 250)
    assert common(mine, read(work(token_ids=ids))) == 0


def test_a_conversation_that_goes_on_shares_what_it_had() -> None:
    before, after = (
        read(work(conversation=chat("x" * 600))),
        read(work(conversation=chat("x" * 600, "y" * 300))),
    )
    assert common(before, after) == len(before.hashes) == 4


def test_what_is_too_short_to_match_or_not_asked_for_is_not_read() -> None:
    assert READER.read(work(text="short"), BLOCK) is None
    assert READER.read(work(text="x" * 255), BLOCK) is None
    assert READER.read(work(text="x" * 256), BLOCK) is not None
    assert READER.read(work(text="x" * 1_000), None) is None
    assert READER.read(inference_pb2.Work(), BLOCK) is None


def test_an_instance_is_as_well_as_the_worst_of_its_gpus() -> None:
    assert gpu_state([]) is None
    assert gpu_state([load_pb2.GpuReading()]) == GpuState()
    well = load_pb2.GpuReading(
        memory_used_bytes=50,
        memory_total_bytes=100,
        xid_errors=0,
        throttle_reasons=[load_pb2.THROTTLE_REASON_SW_POWER_CAP],
    )
    hot = load_pb2.GpuReading(
        memory_used_bytes=99,
        memory_total_bytes=100,
        xid_errors=1,
        ecc_uncorrected_errors=2,
        throttle_reasons=[load_pb2.THROTTLE_REASON_HW_THERMAL],
    )
    assert gpu_state([well]) == GpuState(memory_free=0.5, xid_errors=0)
    state = gpu_state([well, hot])
    assert state is not None and state.memory_free == pytest.approx(0.01)
    assert (state.throttled, state.xid_errors, state.ecc_errors) == (True, 1, 2)
