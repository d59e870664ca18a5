"""The identity of a model as run: which instances may continue each other's outputs.

Two instances with the same fingerprint have the same weights, tokenizer, chat template, number
format and quantization; where and how (GPU or CPU, parallel sizes, context length) does not enter.
Runs once at start on a thread: it reads at most 2 MiB and a header of every weight file.

Failure modes: an unreadable file raises OSError; the engine then does not start.
"""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path

# Read of every weight file's beginning and end: renamed or re-trained weights differ there, and
# hashing 100 GB in full would add minutes to every start.
EDGE_BYTES = 1 << 20
# A safetensors header names every tensor with type, shape and place; real ones stay below this.
HEADER_BYTES_MAX = 64 << 20

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_SMALL_FILES = (
    "config.json",
    "generation_config.json",  # default sampling and end-of-sequence tokens
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tekken.json",
    "chat_template.jinja",
    "chat_template.json",
    "modules.json",
    "sentence_bert_config.json",
    "1_Pooling/config.json",
    "model.safetensors.index.json",
    "pytorch_model.bin.index.json",
)


def fingerprint_folder(folder: Path, *, dtype: str, quantization: str, extra: str = "") -> str:
    """The fingerprint of a model folder, 64 hex digits. Blocks on reads."""
    digest = hashlib.sha256()
    _add(digest, "run", f"{dtype}\0{quantization}\0{extra}".encode())
    for name in _SMALL_FILES:
        path = folder / name
        if path.is_file():
            _add(digest, name, path.read_bytes())
    weights = sorted(
        path for path in folder.iterdir() if path.suffix in _WEIGHTS and path.is_file()
    )
    for path in weights:
        _add(digest, path.name, _weight_identity(path))
    return digest.hexdigest()


def fingerprint_name(
    name: str, revision: str, *, dtype: str, quantization: str, extra: str = ""
) -> str:
    """The fingerprint of a model known by name and commit only."""
    digest = hashlib.sha256()
    _add(digest, "run", f"{dtype}\0{quantization}\0{extra}".encode())
    _add(digest, "name", f"{name}\0{revision}".encode())
    return digest.hexdigest()


def _add(digest: hashlib._Hash, label: str, content: bytes) -> None:
    """Adds a part with its label and length, so that no two sequences of parts look alike."""
    digest.update(f"{label}\0{len(content)}\0".encode())
    digest.update(content)


def _weight_identity(path: Path) -> bytes:
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        if path.suffix == ".safetensors":
            prefix = file.read(8)
            if len(prefix) == 8:
                header = min(struct.unpack("<Q", prefix)[0], HEADER_BYTES_MAX)
                digest.update(prefix + file.read(header))
            file.seek(0)
        digest.update(file.read(EDGE_BYTES))
        if size > EDGE_BYTES:
            file.seek(max(EDGE_BYTES, size - EDGE_BYTES))
            digest.update(file.read(EDGE_BYTES))
    return digest.digest()
