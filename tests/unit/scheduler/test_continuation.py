"""What may go on elsewhere: the gate's rule and the engines' own, side by side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from inference_svc.adapters.convert import to_sampling
from inference_svc.domain import continuation as engines
from scheduler_svc.adapters.live_request import Kept
from scheduler_svc.adapters.translate import obstacle_of
from scheduler_svc.domain.continuation import TAIL_BYTES_MAX, Obstacle, tail_of
from sluice.common.v1 import sampling_pb2


@dataclass(frozen=True)
class Row:
    sampling: dict[str, Any]
    obstacle: Obstacle | None


ROWS = {
    "defaults": Row({}, None),
    "greedy": Row({"temperature": 0.0}, None),
    "unseeded": Row({"temperature": 1.0, "top_p": 0.9, "top_k": 40, "min_p": 0.1}, None),
    "limits": Row(
        {"max_tokens": 9, "min_tokens": 3, "total_tokens_max": 99, "ignore_eos": True}, None
    ),
    "stops": Row({"stop": ["a"], "stop_token_ids": [1], "include_stop": True}, None),
    "repetition penalty": Row({"repetition_penalty": 1.2}, None),
    "bias": Row({"logit_bias": {3: 1.0}}, None),
    "special tokens": Row({"keep_special_tokens": True}, None),
    "no penalty": Row({"presence_penalty": 0.0, "frequency_penalty": 0.0}, None),
    "one output": Row({"n": 1}, None),
    "seed": Row({"temperature": 0.7, "seed": 1}, Obstacle.SEED),
    "seed of zero": Row({"temperature": 0.7, "seed": 0}, Obstacle.SEED),
    "greedy with a seed": Row({"temperature": 0.0, "seed": 1}, Obstacle.SEED),
    "presence": Row({"presence_penalty": 0.5}, Obstacle.PENALTY),
    "frequency": Row({"frequency_penalty": -0.5}, Obstacle.PENALTY),
    "structured": Row({"structured_output": {"regex": "[ab]+"}}, Obstacle.STRUCTURED),
    "two outputs": Row({"n": 2}, Obstacle.OUTPUTS),
    "log probabilities": Row({"logprobs": 3}, Obstacle.LOGPROBS),
    "log probabilities of the sampled": Row({"logprobs": 0}, Obstacle.LOGPROBS),
}


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS.keys())
def test_the_gate_takes_for_continuable_what_the_engines_continue(row: Row) -> None:
    """Were the gate's rule wider, a request could be stopped that nobody can go on with; were it
    narrower, one would be lost that could be saved."""
    sampling = sampling_pb2.SamplingParams(**row.sampling)
    assert obstacle_of(sampling) is row.obstacle
    assert engines.continuable(to_sampling(sampling)) == (row.obstacle is None)


def test_every_field_of_sampling_is_in_the_table() -> None:
    """A field that is added later needs a word on whether it can be continued."""
    known = {name for row in ROWS.values() for name in row.sampling}
    assert known == {field.name for field in sampling_pb2.SamplingParams.DESCRIPTOR.fields}


def test_the_tail_is_whole_characters_and_no_longer_than_the_engines_take() -> None:
    assert TAIL_BYTES_MAX == engines.TAIL_BYTES_MAX
    assert tail_of("") == ""
    assert tail_of("a" * 3000) == "a" * TAIL_BYTES_MAX
    for text in ("é" * 2000, "x" + "日" * 999, "😀" * 700 + "end"):
        tail = tail_of(text)
        assert text.endswith(tail)
        assert TAIL_BYTES_MAX - 4 < len(tail.encode()) <= TAIL_BYTES_MAX


@pytest.mark.parametrize("piece", ["a", "é", "日本", "😀", "word and space "])
def test_what_is_kept_of_a_long_text_is_its_size_and_its_end(piece: str) -> None:
    kept, text = Kept(), ""
    for _ in range(3000):
        kept.append(piece)
        text += piece
        assert len(kept.parts) < 1_000
        assert len(kept.tail) <= TAIL_BYTES_MAX
    for _ in range(2):
        message = kept.continuation("f")
        assert message.delivered_text_bytes == len(text.encode())
        assert message.delivered_text_tail == tail_of(text)
