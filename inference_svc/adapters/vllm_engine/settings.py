"""How a vLLM engine is configured: the settings and their translation into vLLM's arguments.

Owns :class:`VllmSettings`, the process environment that vLLM reads at import, and the defaults that
Sluice sets on top of vLLM's. No concurrency: everything here runs once, before the engine starts.
vLLM is imported by :func:`engine_arguments` only, so that naming this module needs no vLLM.

Failure modes: an unknown or doubly given engine argument is :class:`EngineConfigError`, which names
it, before any process is started.
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any

from inference_svc.config import InstanceConfig

GIB = 1 << 30
CPU_KV_CACHE_GIB = 1.0  # on a CPU, where nothing else is set
_MEMORY_ARGS = {"kv_cache_memory_bytes", "gpu_memory_utilization", "num_gpu_blocks_override"}

# What vLLM reads from the environment when it is imported. An operator's own value wins.
_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",  # nothing is reported to anybody
    "DO_NOT_TRACK": "1",
    # Its other processes write to the service's stderr, where only faults are wanted; in this
    # process its records go to the service's own handlers (see ``adopt_logging``).
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "PYTHONWARNINGS": "ignore",  # of its processes: deprecations inside torch
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TOKENIZERS_PARALLELISM": "false",  # one prompt at a time, on one thread
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork would copy the service's threads and sockets
}
# These hold request content in their warnings (a template's own words, a constraint's text).
_LOGGERS_WITH_CONTENT = (
    "vllm.renderers.hf",
    "vllm.renderers.chat_utils",
    "vllm.v1.structured_output.backend_xgrammar",
)


class EngineTask(Enum):
    """What a model is served for."""

    GENERATE = "generate"
    EMBED = "embed"


class EngineConfigError(ValueError):
    """The engine's configuration is wrong; the text names the setting."""


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """One vLLM engine."""

    path: str
    """Model folder, or a model's name on the Hugging Face hub."""

    model: str
    """Served name, as requests and reports carry it."""

    task: EngineTask = EngineTask.GENERATE
    dtype: str = "auto"
    """Number format of the weights as run: auto, float32, bfloat16, float16."""

    quantization: str = ""
    """Quantization method; empty: what the model's own configuration says."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    max_model_len: int | None = None
    """Most tokens of prompt and output together; None: the model's own limit."""

    kv_cache_gib: float | None = None
    """KV cache size per worker, GiB; None: vLLM's choice on a GPU, 1 GiB on a CPU."""

    enforce_eager: bool = False
    """No graph capture and no compilation: starts faster, decodes slower on a GPU."""

    engine_args: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))
    """Further arguments of vLLM's AsyncEngineArgs by name; they win over Sluice's defaults."""

    start_s_max: float = 1800.0
    """Longest start, seconds: large models load and compile for many minutes."""

    stall_s_max: float = 60.0
    """Seconds without an engine step, while there is work, after which the engine counts as hung.
    Far above the longest step: a full prefill step takes seconds on a CPU."""

    constraint_s_max: float = 5.0
    """Longest compilation of one structured-output constraint, seconds."""

    constraint_memory_gib: float = 1.0
    """Most memory that compiling one constraint may take, GiB."""


def settings_of(config: InstanceConfig) -> VllmSettings:
    """The settings of an ``[[instance]]``: what of its engine_args has a setting here is taken out.
    Raises EngineConfigError."""
    args = dict(config.engine_args)
    runner = args.pop("runner", "generate")
    if runner not in ("generate", "pooling"):
        raise EngineConfigError(f"engine_args.runner must be generate or pooling, is {runner!r}")
    length = args.pop("max_model_len", None)
    if length is not None and (type(length) is not int or length < 1):
        raise EngineConfigError(f"engine_args.max_model_len must be 1 or more, is {length!r}")
    eager = args.pop("enforce_eager", False)
    if not isinstance(eager, bool):
        raise EngineConfigError(f"engine_args.enforce_eager must be true or false, is {eager!r}")
    return VllmSettings(
        path=config.path,
        model=config.model,
        task=EngineTask.EMBED if runner == "pooling" else EngineTask.GENERATE,
        dtype=config.dtype,
        quantization=config.quantization,
        tensor_parallel_size=config.tensor_parallel_size,
        pipeline_parallel_size=config.pipeline_parallel_size,
        max_model_len=length,
        enforce_eager=eager,
        engine_args=args,
    )


def prepare_environment(settings: VllmSettings, environ: MutableMapping[str, str]) -> None:
    """Sets what vLLM reads at import; has no effect on a vLLM that is imported already."""
    for name, value in _ENVIRONMENT.items():
        environ.setdefault(name, value)
    if Path(settings.path).is_dir():
        # Everything is on disk, and a look at the hub hangs where there is no network.
        environ.setdefault("HF_HUB_OFFLINE", "1")
    if settings.enforce_eager:
        # vLLM compiles a few small operations even so: the first request for log probabilities
        # then waits 20 s for a C++ compiler.
        environ.setdefault("TORCH_COMPILE_DISABLE", "1")


def adopt_logging() -> None:
    """Sends vLLM's records of this process to the service's handlers; after vLLM set up its own."""
    logger = logging.getLogger("vllm")
    logger.handlers.clear()
    logger.propagate = True
    for name in _LOGGERS_WITH_CONTENT:
        logging.getLogger(name).setLevel(logging.CRITICAL)


def engine_arguments(settings: VllmSettings) -> Any:  # vLLM's AsyncEngineArgs
    """Translates the settings into vLLM's arguments; the environment was prepared before. Raises
    EngineConfigError."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform

    own: dict[str, object] = {
        "model": settings.path,
        "served_model_name": settings.model,
        "dtype": settings.dtype,
        "quantization": settings.quantization or None,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "pipeline_parallel_size": settings.pipeline_parallel_size,
        "enforce_eager": settings.enforce_eager,
        "runner": "pooling" if settings.task is EngineTask.EMBED else "generate",
    }
    if settings.max_model_len is not None:
        own["max_model_len"] = settings.max_model_len
    if settings.kv_cache_gib is not None:
        own["kv_cache_memory_bytes"] = int(settings.kv_cache_gib * GIB)
    elif current_platform.is_cpu() and not _MEMORY_ARGS & set(settings.engine_args):
        # Left to itself vLLM takes 92 % of the machine's memory, or does not start.
        gib = float(os.environ.get("VLLM_CPU_KVCACHE_SPACE") or CPU_KV_CACHE_GIB)
        own["kv_cache_memory_bytes"] = int(gib * GIB)
    known = {item.name for item in dataclasses.fields(AsyncEngineArgs)}
    check_engine_args(settings.engine_args, own, known)
    defaults: dict[str, object] = {
        # Only our own statistics reader is installed; the default one prints.
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        # vLLM's "auto" compiles what xgrammar lacks with a second backend, but keeps the first
        # backend that it ever used and then ignores parts of a schema. A refusal is better.
        # Compact JSON: free to, small models write line breaks until max_tokens.
        "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
    }
    return AsyncEngineArgs(**{**defaults, **own, **settings.engine_args})


def check_engine_args(
    given: Mapping[str, object], own: Mapping[str, object], known: set[str]
) -> None:
    """Refuses engine arguments that vLLM does not have, or that a setting of its own exists for."""
    unknown = sorted(set(given) - known)
    if unknown:
        hints = []
        for name in unknown:
            close = difflib.get_close_matches(name, known, n=1)
            hints.append(f"{name} (did you mean {close[0]}?)" if close else name)
        raise EngineConfigError(f"engine_args: this vLLM has no argument {', '.join(hints)}")
    doubled = sorted(set(given) & set(own))
    if doubled:
        raise EngineConfigError(
            f"engine_args: {', '.join(doubled)} has a setting of its own beside engine_args"
        )
