"""Starting vLLM, describing what it serves, and making sure that its processes end.

Functions without state. All but :func:`children` block; they run on the engine's own thread, never
on the event loop. vLLM is imported inside them.

Failure modes: whatever vLLM raises when a model does not load; a process that outlives its shutdown
is killed.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from inference_svc.adapters.model_fingerprint import fingerprint_folder, fingerprint_name
from inference_svc.adapters.vllm_settings import (
    EngineTask,
    VllmSettings,
    adopt_logging,
    engine_arguments,
)
from inference_svc.ports import GenerationEnd, ModelDescription

if TYPE_CHECKING:
    from inference_svc.adapters.vllm_stats import SchedulerStatistics

_log = logging.getLogger(__name__)

KILL_S_MAX = 5.0
VLLM_GRACE_S = 10.0  # given to vLLM itself, within the engine's SHUTDOWN_S_MAX


def make_llm(
    settings: VllmSettings,
    clock: Callable[[], float],
    made: Callable[[SchedulerStatistics], None],
) -> Any:  # vllm AsyncLLM
    """Starts vLLM's processes and waits until the model is loaded: seconds to minutes."""
    arguments = engine_arguments(settings)
    from vllm.v1.engine.async_llm import AsyncLLM

    from inference_svc.adapters.vllm_stats import statistics_factory

    adopt_logging()
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
    except Exception:
        _log.exception("constraints of this model are parsed but not compiled ahead of the engine")
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


def children() -> list[psutil.Process]:
    """All processes below this one."""
    return list(psutil.Process().children(recursive=True))


def shut_down(llm: Any) -> None:  # vllm AsyncLLM
    """Ends vLLM in order and frees what it holds in this process."""
    llm.shutdown(timeout=VLLM_GRACE_S)


def end_all(processes: Sequence[psutil.Process]) -> None:
    """Kills those that are left and waits for them. A process is known by pid and start time, so
    a pid in new use is not touched."""
    gc.collect()  # vLLM's objects refer to each other, and complain when found at exit
    tracker = resource_tracker._resource_tracker._pid  # type: ignore[attr-defined]  # no public way
    left = [one for one in processes if one.pid != tracker and one.is_running()]
    for process in left:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(left, timeout=KILL_S_MAX)
    if all(one.pid == tracker for one in children()):
        _stop_resource_tracker()


def _stop_resource_tracker() -> None:
    """Ends the helper process that Python starts beside spawned ones; it is started anew on demand.

    Killed instead, it would make Python warn of leaks the next time. Only when no child is left:
    each holds its pipe open, and this waits for its end."""
    stop = getattr(resource_tracker._resource_tracker, "_stop", None)  # no public way
    if stop is not None:
        stop()
