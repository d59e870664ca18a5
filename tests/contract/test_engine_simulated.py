"""The simulated engine passes the engine contract, exactly and at every cut."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping

import pytest
import pytest_asyncio

from inference_svc.adapters.simulated.engine import SimulatedEngine
from inference_svc.adapters.simulated.model import VOCABULARY_SIZE, decode, encode
from inference_svc.adapters.simulated.profile import SimulatedProfile
from inference_svc.ports import GenerateSpec, OutputSink, PreparedPrompt, RunningRequest
from tests.contract.engine_contract import GenerationContract
from tests.contract.engine_contract_more import ContinuationContract, EmbeddingContract
from tests.contract.engine_harness import EngineHarness

PROFILE = SimulatedProfile(
    model="contract",
    prefill_tokens_per_s=1_000_000.0,
    decode_step_ms=0.2,
    decode_step_ms_per_sequence=0.0,
    context_tokens=512,
    kv_tokens=4_096,
    embedding_dimensions=32,
)


class RecordingEngine(SimulatedEngine):
    """Remembers every spec, since cases look at more than the latest."""

    def __init__(self, profile: SimulatedProfile) -> None:
        super().__init__(profile)
        self.specs: dict[str, GenerateSpec] = {}

    def submit(self, prepared: PreparedPrompt, sink: OutputSink) -> RunningRequest:
        running = super().submit(prepared, sink)
        assert self.last_spec is not None
        self.specs[self.last_spec.request_id] = self.last_spec
        return running

    def sampling_of(self, request_id: str) -> Mapping[str, object]:
        sampling = self.specs[request_id].sampling
        return {name: getattr(sampling, name) for name in sampling.__dataclass_fields__}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def harness() -> AsyncIterator[EngineHarness]:
    engine = RecordingEngine(PROFILE)
    await engine.start()
    yield EngineHarness(
        engine=engine,
        encode=encode,
        decode=decode,
        vocabulary_size=VOCABULARY_SIZE,
        received=engine.sampling_of,
        defaults={"ignore_eos": False, "stop": (), "include_stop": False},
        timeout_s=10.0,
    )
    counters = engine.counters()
    assert counters.running == 0
    await engine.close()
    assert not engine.healthy


@pytest.mark.asyncio(loop_scope="module")
class TestSimulatedEngine(GenerationContract, ContinuationContract, EmbeddingContract):
    """All of the contract on one engine."""
