"""The embedding contract on the real engine."""

from __future__ import annotations

from collections.abc import AsyncIterator

import psutil
import pytest_asyncio

from inference_svc.adapters.vllm_engine.settings import EngineTask
from inference_svc.ports import TextPrompt
from sluice.errors import Code
from tests.contract.engine_contract import refused
from tests.contract.engine_contract_more import EmbeddingContract
from tests.contract.engine_harness import EngineHarness
from tests.contract.vllm_support import EMBEDDING_MODEL, MARKS, harness_of, running_engine, settings

pytestmark = MARKS


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def harness() -> AsyncIterator[EngineHarness]:
    """The embedding model."""
    async with running_engine(settings(EMBEDDING_MODEL, EngineTask.EMBED)) as engine:
        yield harness_of(engine, EMBEDDING_MODEL)


class TestVllmEmbeddingContract(EmbeddingContract):
    """Every case of the contract."""


class TestVllmEmbeddings:
    """What only a real model shows."""

    async def test_a_cat_is_nearer_to_a_kitten_than_to_revenue(
        self, harness: EngineHarness
    ) -> None:
        words = [TextPrompt("cat"), TextPrompt("kitten"), TextPrompt("revenue")]
        (cat, kitten, revenue), _ = await harness.engine.embed("words", words)
        near = sum(a * b for a, b in zip(cat, kitten, strict=True))
        far = sum(a * b for a, b in zip(cat, revenue, strict=True))
        assert near > far + 0.2

    async def test_the_description_is_that_of_an_embedding_model(
        self, harness: EngineHarness
    ) -> None:
        model = harness.engine.describe()
        assert model.embedding_dimensions == 384
        assert model.kv_tokens == 0
        assert not model.generate
        assert not model.chat
        assert not model.continuation

    async def test_a_model_that_embeds_does_not_generate(self, harness: EngineHarness) -> None:
        error = await refused(harness, "Once upon a time")
        assert error.code is Code.FAILED_PRECONDITION

    async def test_close_leaves_no_process(self, harness: EngineHarness) -> None:
        """The last case: it ends the module's engine."""
        await harness.engine.close()
        assert psutil.Process().children(recursive=True) == []
