"""Settings of a vLLM engine, without vLLM."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from inference_svc.adapters.vllm_engine.settings import (
    EngineConfigError,
    EngineTask,
    VllmSettings,
    check_engine_args,
    prepare_environment,
    settings_of,
)
from inference_svc.config import EngineKind, InstanceConfig

CONFIG = InstanceConfig(
    name="chat-0",
    address="127.0.0.1:1",
    engine=EngineKind.VLLM,
    model="a-model",
    path="/models/a-model",
    aliases=(),
    dtype="float32",
    quantization="fp8",
    tensor_parallel_size=4,
    pipeline_parallel_size=2,
    engine_args={},
    simulated={},
)


def test_everything_of_an_instance_reaches_the_settings() -> None:
    config = replace(
        CONFIG,
        engine_args={"max_model_len": 2048, "enforce_eager": True, "gpu_memory_utilization": 0.5},
    )
    settings = settings_of(config)
    assert settings == VllmSettings(
        path="/models/a-model",
        model="a-model",
        dtype="float32",
        quantization="fp8",
        tensor_parallel_size=4,
        pipeline_parallel_size=2,
        max_model_len=2048,
        enforce_eager=True,
        engine_args={"gpu_memory_utilization": 0.5},
    )
    assert settings.task is EngineTask.GENERATE


def test_the_pooling_runner_means_embeddings() -> None:
    settings = settings_of(replace(CONFIG, engine_args={"runner": "pooling"}))
    assert settings.task is EngineTask.EMBED
    assert "runner" not in settings.engine_args


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("runner", "draft"),
        ("max_model_len", 0),
        ("max_model_len", "2k"),
        ("max_model_len", True),
        ("enforce_eager", "yes"),
    ],
)
def test_a_wrong_argument_is_named(argument: str, value: object) -> None:
    with pytest.raises(EngineConfigError, match=argument):
        settings_of(replace(CONFIG, engine_args={argument: value}))


def test_an_unknown_engine_argument_is_named_with_a_likely_one() -> None:
    known = {"max_num_seqs", "dtype", "block_size"}
    with pytest.raises(EngineConfigError, match=r"max_num_seq \(did you mean max_num_seqs\?\)"):
        check_engine_args({"max_num_seq": 4}, {}, known)


def test_an_engine_argument_with_a_setting_of_its_own_is_not_given_twice() -> None:
    with pytest.raises(EngineConfigError, match="dtype"):
        check_engine_args({"dtype": "bfloat16"}, {"dtype": "float32"}, {"dtype"})


def test_an_operators_environment_wins() -> None:
    environ = {"VLLM_LOGGING_LEVEL": "DEBUG"}
    prepare_environment(VllmSettings(path="org/model", model="m"), environ)
    assert environ["VLLM_LOGGING_LEVEL"] == "DEBUG"
    assert environ["VLLM_NO_USAGE_STATS"] == "1"
    assert environ["DO_NOT_TRACK"] == "1"
    assert "HF_HUB_OFFLINE" not in environ  # a model of the hub has to be fetched


def test_a_model_on_disk_is_loaded_without_the_hub(tmp_path: object) -> None:
    environ: dict[str, str] = {}
    prepare_environment(VllmSettings(path=str(tmp_path), model="m", enforce_eager=True), environ)
    assert environ["HF_HUB_OFFLINE"] == "1"
    assert environ["TORCH_COMPILE_DISABLE"] == "1"


def test_making_an_engine_imports_neither_vllm_nor_torch() -> None:
    program = (
        "import sys\n"
        "from inference_svc.adapters.vllm_engine import engine as vllm_engine\n"
        "assert not {'vllm', 'torch', 'transformers'} & set(sys.modules), sorted(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
