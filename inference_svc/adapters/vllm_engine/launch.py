"""Starting and stopping vLLM, and describing what it serves.

Functions without state. They block, and run on the engine's own thread, never on the event loop.
vLLM is imported inside them.

Failure modes: whatever vLLM raises when a model does not load.
"""

from __future__ import annotations

import asyncio
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

from inference_svc.adapters.vllm_engine.model_fingerprint import (
    fingerprint_folder,
    fingerprint_name,
)
from inference_svc.adapters.vllm_engine.settings import (
    EngineTask,
    VllmSettings,
    adopt_logging,
    engine_arguments,
    prepare_environment,
)
from inference_svc.ports import GenerationEnd, ModelDescription
from sluice import logs

if TYPE_CHECKING:
    from inference_svc.adapters.vllm_engine.stats import SchedulerStatistics

_log = logs.get(__name__)

CONTEXT_S_MAX = 2.0  # for ZeroMQ to end; a thread that waits longer is left to itself
VLLM_GRACE_S = 5.0  # given to vLLM itself, within the engine's SHUTDOWN_S_MAX


def import_vllm(settings: VllmSettings) -> None:
    """Imports vLLM, which takes seconds. A step of its own: some library keeps a traceback of its
    import, and with it every caller's variables, for good."""
    prepare_environment(settings, os.environ)
    for library in ("torch", "vllm"):
        warnings.filterwarnings("ignore", category=FutureWarning, module=library)
    import vllm.v1.engine.async_llm  # noqa: F401

    adopt_logging()


def make_llm(
    settings: VllmSettings,
    clock: Callable[[], float],
    made: Callable[[SchedulerStatistics], None],
) -> Any:  # vllm AsyncLLM
    """Starts vLLM's processes and waits until the model is loaded: seconds to minutes."""
    arguments = engine_arguments(settings)
    from vllm.v1.engine.async_llm import AsyncLLM

    from inference_svc.adapters.vllm_engine.stats import statistics_factory

    llm = AsyncLLM.from_engine_args(arguments, stat_loggers=[statistics_factory(clock, made)])
    adopt_logging()  # the start may have set it up once more
    return llm


def describe(settings: VllmSettings, llm: Any, chat: bool) -> ModelDescription:
    """What it serves, from vLLM's configuration as it came out of the start."""
    import vllm

    model, cache, parallel = (
        llm.model_config,
        llm.vllm_config.cache_config,
        llm.vllm_config.parallel_config,
    )
    scheduler = llm.vllm_config.scheduler_config
    generates = settings.task is EngineTask.GENERATE
    replicas = int(parallel.data_parallel_size)
    blocks = int(cache.num_gpu_blocks or 0) if generates else 0
    return ModelDescription(
        model=settings.model,
        fingerprint=fingerprint(settings, model),
        engine=f"vllm {vllm.__version__}",
        simulated=False,
        generate=generates,
        embed=not generates,
        chat=generates and chat,
        structured_output=generates,
        continuation=generates,
        context_tokens=int(model.max_model_len),
        kv_tokens=blocks * int(cache.block_size) * replicas,
        kv_block_tokens=int(cache.block_size or 0),
        sequences_max=int(scheduler.max_num_seqs) * replicas,
        step_tokens_max=int(scheduler.max_num_batched_tokens),
        dtype=str(model.dtype).removeprefix("torch."),
        quantization=str(model.quantization or ""),
        tensor_parallel_size=int(parallel.tensor_parallel_size),
        pipeline_parallel_size=int(parallel.pipeline_parallel_size),
        embedding_dimensions=0,
    )


def fingerprint(settings: VllmSettings, model: Any) -> str:  # vllm ModelConfig
    """The identity of the model as run; reads the beginning and end of every weight file."""
    run = {
        "dtype": str(model.dtype),
        "quantization": str(model.quantization or ""),
        # Changes the weights' meaning without a file: overrides from engine_args.
        "extra": repr(
            {
                name: settings.engine_args[name]
                for name in ("hf_overrides", "override_generation_config", "kv_cache_dtype")
                if name in settings.engine_args
            }
        ),
    }
    folder = Path(settings.path)
    if folder.is_dir():
        return fingerprint_folder(folder, **run)
    commit = str(getattr(model.hf_config, "_commit_hash", None) or model.revision or "")
    return fingerprint_name(settings.path, commit, **run)


def end_tokens(llm: Any) -> frozenset[int]:
    """Token ids that end an output: the tokenizer's and the generation configuration's."""
    found = set()
    if (token := llm.renderer.get_eos_token_id()) is not None:
        found.add(int(token))
    more = llm.model_config.try_get_generation_config().get("eos_token_id")
    if isinstance(more, int):
        found.add(more)
    elif more is not None:
        found.update(int(token) for token in more)
    return frozenset(found)


def serialized_tokenizer(llm: Any) -> str | None:
    """What the constraint compiler needs to know of the tokenizer; None where xgrammar cannot say
    (vLLM then checks constraints by parsing only)."""
    import xgrammar

    try:
        information = xgrammar.TokenizerInfo.from_huggingface(
            llm.renderer.tokenizer, vocab_size=llm.model_config.get_vocab_size()
        )
        return str(information.serialize_json())
    except Exception as error:
        _log.failure("output constraints are parsed but not compiled before the engine", error)
        return None


@dataclass(slots=True)
class WarmUpSink:
    """Waits for the end of the first generation."""

    over: asyncio.Event
    error: Exception | None = None

    def delta(self, *_args: object, **_kwargs: object) -> None:
        """Whatever it says."""

    def ended(self, end: GenerationEnd) -> None:
        """Done, or failed."""
        self.error = end.error
        self.over.set()


def shut_down(llm: Any) -> None:  # vllm AsyncLLM
    """Ends vLLM in order and frees what it holds in this process."""
    llm.shutdown(timeout=VLLM_GRACE_S)
    # Its sockets are closed on the event loop by now; the context is left open by vLLM.
    resources = getattr(llm.engine_core, "resources", None)
    if resources is not None:
        ending = Thread(target=resources.ctx.term, daemon=True)
        ending.start()
        ending.join(CONTEXT_S_MAX)
