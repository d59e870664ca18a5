"""Kinds of GPU: the speed, size and price of an engine, read from TOML.

Frozen values; the presets are in ``kinds.toml``. A wrong file is a ValueError that names kind and
field.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

PRESETS = Path(__file__).with_name("kinds.toml")


@dataclass(frozen=True, slots=True)
class GpuKind:
    """One kind of engine. Units as in ``kinds.toml``; ``provenance`` says where the numbers come
    from."""

    name: str
    provenance: str = ""
    prefill_tokens_per_s: float = 20_000.0
    decode_step_ms: float = 10.0
    decode_step_ms_per_sequence: float = 0.05
    sequences_max: int = 128
    kv_tokens: int = 262_144
    kv_block_tokens: int = 16
    step_tokens_max: int = 8_192
    context_tokens: int = 8_192
    price_per_hour: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = _LEAST.get(field.name)
            if least is not None and not value >= least:
                raise ValueError(f"kind {self.name}: {field.name} must be at least {least}")
        if self.kv_tokens < self.context_tokens:
            raise ValueError(f"kind {self.name}: kv_tokens must hold context_tokens")
        if self.step_tokens_max < self.sequences_max:
            raise ValueError(f"kind {self.name}: step_tokens_max must be at least sequences_max")

    @property
    def unloaded_tpot_s(self) -> float:
        """Time per output token of a request that is alone."""
        return (self.decode_step_ms + self.decode_step_ms_per_sequence) / 1_000.0


_LEAST: Mapping[str, float] = {
    "prefill_tokens_per_s": 1.0,
    "decode_step_ms": 0.01,
    "decode_step_ms_per_sequence": 0.0,
    "sequences_max": 1,
    "kv_tokens": 1,
    "kv_block_tokens": 1,
    "step_tokens_max": 1,
    "context_tokens": 2,
    "price_per_hour": 0.0,
}


def load_kinds(path: Path | None = None) -> dict[str, GpuKind]:
    """The presets, and the kinds of ``path``, which go before presets of the same name."""
    kinds = _read(PRESETS)
    if path is not None:
        kinds |= _read(path)
    return kinds


def _read(path: Path) -> dict[str, GpuKind]:
    with path.open("rb") as file:
        try:
            document = tomllib.load(file)
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"{path}: {error}") from None
    tables = document.pop("kind", {})
    if document or not isinstance(tables, dict):
        raise ValueError(f"{path}: only tables [kind.NAME] may stand here")
    return {name: _kind(name, table) for name, table in tables.items()}


def _kind(name: str, table: Mapping[str, object]) -> GpuKind:
    kind = GpuKind(name)
    known = {field.name: getattr(kind, field.name) for field in fields(kind)} | {"name": None}
    changes: dict[str, object] = {}
    for key, value in table.items():
        if known.get(key) is None:
            raise ValueError(f"kind {name}: {key} is not a setting of a kind")
        if type(known[key]) is float and type(value) is int:
            value = float(value)
        if type(value) is not type(known[key]):
            raise ValueError(f"kind {name}: {key} must be of type {type(known[key]).__name__}")
        changes[key] = value
    return replace(kind, **changes)  # type: ignore[arg-type]
