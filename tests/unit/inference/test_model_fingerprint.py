"""What makes two models the same: weights, tokenizer, template, number format, quantization."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from inference_svc.adapters.vllm_engine.model_fingerprint import (
    EDGE_BYTES,
    fingerprint_folder,
    fingerprint_name,
)


def make_model(folder: Path) -> Path:
    """A folder that looks like a model."""
    folder.mkdir()
    (folder / "config.json").write_text('{"hidden_size": 8}')
    (folder / "tokenizer.json").write_text('{"model": {}}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    header = b'{"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}'
    weights = len(header).to_bytes(8, "little") + header + bytes(3 * EDGE_BYTES)
    (folder / "model.safetensors").write_bytes(weights)
    return folder


def fingerprint(folder: Path, dtype: str = "float32", quantization: str = "") -> str:
    """With defaults for what is not the folder's."""
    return fingerprint_folder(folder, dtype=dtype, quantization=quantization)


def _flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


CHANGES: dict[str, Callable[[Path], object]] = {
    "configuration": lambda folder: (folder / "config.json").write_text('{"hidden_size": 9}'),
    "tokenizer": lambda folder: (folder / "tokenizer.json").write_text('{"model": 1}'),
    "template": lambda folder: (folder / "chat_template.jinja").write_text("{{ other }}"),
    "template removed": lambda folder: (folder / "chat_template.jinja").unlink(),
    "weights' header": lambda folder: _flip(folder / "model.safetensors", 20),
    "weights' beginning": lambda folder: _flip(folder / "model.safetensors", EDGE_BYTES - 1),
    "weights' end": lambda folder: _flip(folder / "model.safetensors", -1),
    "a further file of weights": lambda folder: (folder / "more.safetensors").write_bytes(b"x"),
    "weights renamed": lambda folder: (folder / "model.safetensors").rename(
        folder / "other.safetensors"
    ),
}


def test_a_copy_has_the_same_fingerprint(tmp_path: Path) -> None:
    one, other = make_model(tmp_path / "one"), make_model(tmp_path / "other")
    (other / "README.md").write_text("not part of the model")
    assert fingerprint(one) == fingerprint(other)
    assert len(fingerprint(one)) == 64


@pytest.mark.parametrize("change", CHANGES)
def test_every_part_of_a_model_enters(tmp_path: Path, change: str) -> None:
    folder = make_model(tmp_path / "model")
    before = fingerprint(folder)
    CHANGES[change](folder)
    assert fingerprint(folder) != before


def test_number_format_and_quantization_enter(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    distinct = {
        fingerprint(folder),
        fingerprint(folder, dtype="bfloat16"),
        fingerprint(folder, quantization="fp8"),
        fingerprint_folder(folder, dtype="float32", quantization="", extra="overrides"),
    }
    assert len(distinct) == 4


def test_a_small_and_a_broken_weight_file_have_a_fingerprint_too(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    for content in (b"", b"short", b"\xff" * 8 + b"a header longer than the file"):
        (folder / "model.safetensors").write_bytes(content)
        assert fingerprint(folder)


def test_a_model_by_name_differs_by_name_and_commit() -> None:
    distinct = {
        fingerprint_name(name, commit, dtype="float32", quantization="")
        for name in ("org/one", "org/two")
        for commit in ("a", "b")
    }
    assert len(distinct) == 4
