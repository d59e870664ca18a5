"""What counts as the same beginning of a prompt, and who never shares one."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.domain.canonical import (
    BLOCKS_MAX,
    PrefixHasher,
    conversation_bytes,
    token_bytes,
)
from scheduler_svc.domain.prefix_blocks import PrefixBlocks
from scheduler_svc.domain.prefix_index import PrefixIndex

HASHER = PrefixHasher(b"test")
ALL = 1 << 30


@dataclass
class Call:
    id: str = ""
    name: str = ""
    arguments_json: str = ""


@dataclass
class Message:
    role: str = "user"
    content: str = ""
    name: str = ""
    tool_calls: list[Call] = field(default_factory=list)
    tool_call_id: str = ""


@dataclass
class Tool:
    name: str = ""
    description: str = ""
    parameters_json: str = ""


def common(first: bytes, second: bytes, block: int = 8) -> int:
    """Blocks that two prompts have in common by their hashes."""
    one, two = HASHER.hashes(first, block, ["s"]), HASHER.hashes(second, block, ["s"])
    same = one[: len(two)] == two[: len(one)]
    return len(same) if same.all() else int(same.argmin())


@given(st.binary(max_size=300), st.binary(max_size=300), st.sampled_from([8, 16, 64]))
@settings(max_examples=300, derandomize=True, deadline=None)
def test_hashes_agree_exactly_as_far_as_whole_blocks_do(a: bytes, b: bytes, block: int) -> None:
    shared = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a))
    shared = min(shared, len(a), len(b))
    assert common(a, b, block) == shared // block
    assert common(a + b, a, block) == len(a) // block


def test_blocks_count_by_content_and_by_place() -> None:
    high = b"\x00" * 7 + b"\x80"  # differences in top bits only do not cancel out
    low = bytes(8)
    assert common(high + high, low + low, 16) == 0
    assert common(high + low, low + high, 16) == 0
    assert common(high + low, low + high, 8) == 0
    many = HASHER.hashes(bytes(8 * 4_000), 8, ["s"])
    assert len(set(many.tolist())) == 4_000


def test_a_conversation_that_goes_on_shares_all_it_had() -> None:
    history = [Message("system", "Be brief."), Message("user", "Hello"), Message("assistant", "Hi")]
    longer = [*history, Message("user", "And now?")]
    whole = conversation_bytes(history, [], ALL)
    assert conversation_bytes(longer, [], ALL).startswith(whole)
    # One message that only differs at its end shares its beginning too.
    one = conversation_bytes([Message("user", "a long document. Question 1")], [], ALL)
    two = conversation_bytes([Message("user", "a long document. Question 1 and 2")], [], ALL)
    assert two.startswith(one)


def test_no_text_can_imitate_a_seam() -> None:
    conversations = [
        ([Message("user", "ab")], []),
        ([Message("user", "a"), Message("user", "b")], []),
        ([Message("user", "a\x00user\x00b")], []),
        ([Message("usera", "b")], []),
        ([Message("user", "b", name="a")], []),
        ([Message("user", "b", tool_call_id="a")], []),
        ([Message("user", "", tool_calls=[Call("a", "b", "")])], []),
        ([Message("user", "", tool_calls=[Call("a", "", "b")])], []),
        ([Message("user", "", tool_calls=[Call("a"), Call("b")])], []),
        ([Message("user", "ab")], [Tool("a")]),
        ([Message("user", "ab")], [Tool("", "a")]),
        ([Message("user", "ab")], [Tool("", "", "a")]),
    ]
    serial = [conversation_bytes(messages, tools, ALL) for messages, tools in conversations]
    assert len(set(serial)) == len(serial)
    with pytest.raises(UnicodeDecodeError):
        serial[0].decode()


def test_other_tools_are_another_beginning() -> None:
    messages = [Message("user", "x" * 1_000)]
    first = conversation_bytes(messages, [Tool("search")], ALL)
    second = conversation_bytes(messages, [Tool("browse")], ALL)
    assert common(first, second) == 0


@pytest.mark.parametrize("other", [["m", "b", ""], ["m", "a", "x"], ["n", "a", ""], ["m", "a/"]])
def test_tenants_salts_and_models_never_share_a_prefix(other: list[str]) -> None:
    """Mutant seen to fail: the salt left out of the chain."""
    prompt = b"the same system prompt " * 100
    mine = HASHER.hashes(prompt, 64, ["m", "a", ""])
    theirs = HASHER.hashes(prompt, 64, other)
    assert not set(mine.tolist()) & set(theirs.tolist())
    index = PrefixIndex(2, 1 << 20, 60.0)
    index.note(mine, 0, 0.0)
    assert index.match(theirs, 2, 0.0) is None
    assert index.match(mine, 2, 0.0) is not None


def test_the_key_decides_the_hashes_and_the_same_key_repeats_them() -> None:
    data = bytes(range(256))
    again = PrefixHasher(b"test").hashes(data, 8, ["s"])
    other = PrefixHasher(b"other").hashes(data, 8, ["s"])
    assert (HASHER.hashes(data, 8, ["s"]) == again).all()
    assert not set(again.tolist()) & set(other.tolist())


def test_only_the_beginning_of_an_endless_prompt_is_looked_at() -> None:
    assert len(HASHER.hashes(bytes(8 * BLOCKS_MAX + 800), 8, ["s"])) == BLOCKS_MAX
    messages = [Message("user", "x" * 1_000)] * 100
    assert len(conversation_bytes(messages, [], 5_000)) < 7_000


def test_token_ids_share_prefixes_block_by_block() -> None:
    ids = list(range(100))
    assert common(token_bytes(ids), token_bytes([*ids[:64], 7, *ids[64:]]), 4 * 16) == 4
    assert np.frombuffer(token_bytes([1, 2**32 - 1]), np.uint32).tolist() == [1, 2**32 - 1]


@pytest.mark.parametrize("kv_block_tokens", [1, 7, 16, 64, 128, 2_048])
@pytest.mark.parametrize("bytes_per_token", [0.5, 3.5, 9.0])
def test_a_block_is_whole_blocks_of_the_engine_and_a_repeat_is_estimated_above_nine_tenths(
    kv_block_tokens: int, bytes_per_token: float
) -> None:
    """A router's block that is not the worker's estimated 0.08 on a repeat. Here the
    estimate is a share of the prompt, so neither block nor ratio can spoil it."""
    blocks = PrefixBlocks(8, 32)
    tokens = blocks.saw("m", kv_block_tokens)
    block = blocks.block("m", bytes_per_token)
    assert block is not None and block.tokens == tokens
    assert tokens >= 32 and tokens % kv_block_tokens == 0
    assert block.text_bytes % 8 == block.id_bytes % 8 == 0
    prompt = b"x" * (block.text_bytes * 12 + 5)
    index = PrefixIndex(1, 1 << 20, 60.0)
    hashes = HASHER.hashes(prompt, block.text_bytes, ["m"])
    index.note(hashes, 0, 0.0)
    found = index.match(hashes, 1, 0.0)
    assert found is not None
    assert found[0] / (len(prompt) / block.text_bytes) > 0.9


def test_a_block_keeps_its_size_while_the_ratio_drifts_a_little() -> None:
    blocks = PrefixBlocks(8, 32)
    assert blocks.block("m", 4.0) is None  # no instance has said what its block is
    blocks.saw("m", 16)
    first = blocks.block("m", 4.0)
    assert first is not None and first.text_bytes == 128
    assert blocks.block("m", 3.0) == blocks.block("m", 5.5) == first
    assert blocks.block("m", 9.0) != first
    blocks.saw("m", 128)  # instances that differ: the largest counts
    blocks.saw("m", 16)
    larger = blocks.block("m", 4.0)
    assert larger is not None and larger.tokens == 128
