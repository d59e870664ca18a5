"""The ``[[instance]]`` table of this process."""

from __future__ import annotations

from pathlib import Path

import pytest

from inference_svc.config import EngineKind, load_instance
from sluice.config import ConfigError

GOOD = """
[[instance]]
name = "a"
address = "127.0.0.1:1"
engine = "simulated"
model = "m"

[[instance]]
name = "b"
address = "127.0.0.1:2"
engine = "vllm"
model = "n"
path = "/models/n"
aliases = ["x"]
tensor_parallel_size = 2
engine_args = { max_model_len = 10 }
cpu = { dtype = "float32" }
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "sluice.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_named_instance_is_read_and_the_first_by_default(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    assert load_instance(path, "").name == "a"
    b = load_instance(path, "b")
    assert (b.engine, b.path, b.aliases) == (EngineKind.VLLM, "/models/n", ("x",))
    assert (b.tensor_parallel_size, b.pipeline_parallel_size, b.dtype) == (2, 1, "auto")
    assert b.engine_args == {"max_model_len": 10}
    assert b.simulated == {}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (('engine = "simulated"', ""), "instance.a.engine"),
        (('engine = "simulated"', 'engine = "other"'), "instance.a.engine"),
        (('model = "m"', ""), "instance.a.model"),
        (('model = "m"', "model = 3"), "instance.a.model"),
        (('model = "m"', 'model = "m"\nmodle = "m"'), "instance.a.modle"),
        (('model = "m"', 'model = "m"\naliases = [""]'), "instance.a.aliases"),
        (('model = "m"', 'model = "m"\ntensor_parallel_size = 0'), "tensor_parallel_size"),
        (('model = "m"', 'model = "m"\ntensor_parallel_size = true'), "tensor_parallel_size"),
        (('engine = "simulated"', 'engine = "vllm"'), "instance.a.path"),
        (("[[instance]]", "[instance"), "TOML"),
    ],
)
def test_a_wrong_setting_is_named(tmp_path: Path, change: tuple[str, str], named: str) -> None:
    path = write(tmp_path, GOOD.replace(*change, 1))
    with pytest.raises(ConfigError) as caught:
        load_instance(path, "a")
    assert named in str(caught.value)


def test_an_instance_that_is_not_there_is_named_with_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'c' \(known: a, b\)"):
        load_instance(write(tmp_path, GOOD), "c")
    with pytest.raises(ConfigError):
        load_instance(None, "")
    with pytest.raises(ConfigError):
        load_instance(tmp_path / "absent.toml", "")
