"""Embeddings on vLLM: one pooling request per input, all in the engine at once.

Owns nothing between calls. Cancelling the caller aborts what runs. Vectors are normalised as the
model's own recipe says (vLLM reads it from the model folder).

Failure modes: INVALID_ARGUMENT naming the input's index, before any input is sent to the engine;
UNAVAILABLE with reason ENGINE_FAILED when the engine dies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

from vllm.exceptions import VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.pooling_params import PoolingParams
from vllm.v1.engine.exceptions import EngineDeadError

from inference_svc.adapters.vllm_engine.generation import engine_failed
from inference_svc.adapters.vllm_engine.text import TextWorker
from inference_svc.ports import ChatPrompt, Prompt
from sluice.errors import invalid


async def embed(
    llm: Any,  # vllm AsyncLLM
    text: TextWorker,
    context_tokens: int,
    request_id: str,
    prompts: Sequence[Prompt],
) -> tuple[list[list[float]], int]:
    """Vectors in the order of the prompts, and the tokens read."""

    def tokenize(index: int, prompt: Prompt) -> list[int]:
        path = f"inputs[{index}]"
        if isinstance(prompt, ChatPrompt):
            raise invalid(path, "conversations are not embedded: send text or token ids")
        ids = text.tokenize(prompt, context_tokens, path)
        if len(ids) > context_tokens:
            raise invalid(
                path,
                f"{len(ids)} tokens are over the model's context of {context_tokens} tokens",
                reason="CONTEXT_LENGTH",
            )
        return ids

    ids = [await text.run(partial(tokenize, index, prompt)) for index, prompt in enumerate(prompts)]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(_embed_one(llm, one, f"{request_id}/{index}"))
                for index, one in enumerate(ids)
            ]
    except* EngineDeadError:
        raise engine_failed() from None
    except* VLLMClientError:
        raise invalid("inputs", "the engine does not accept these inputs") from None
    return [task.result() for task in tasks], sum(len(one) for one in ids)


async def _embed_one(llm: Any, token_ids: list[int], request_id: str) -> list[float]:
    vector: list[float] = []
    async for output in llm.encode(
        tokens_input(token_ids), PoolingParams(task="embed"), request_id
    ):
        vector = output.outputs.data.tolist()
    return vector
