"""Settings of the inference service: section ``[inference]`` and one ``[[instance]]`` of
``sluice.toml``.

Read once at start. What an instance serves comes from the file only; the environment says which of
them this process is. Anything unknown, of the wrong type or out of range is a ConfigError.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, cast

from sluice.config import ConfigError, section, setting

PARALLEL_MAX = 1024
NAME_CHARS_MAX = 128


class EngineKind(Enum):
    """What answers. There is no default: answers of the simulated engine must be asked for."""

    VLLM = "vllm"
    SIMULATED = "simulated"


@section("inference")
@dataclass(frozen=True, slots=True)
class InferenceConfig:
    """Everything that is common to all instances; times in seconds unless said."""

    instance: str = setting("", help="Which [[instance]] this process is. Empty: the first.")
    bind: str = setting("", help="Address it serves on. Empty: the address of its [[instance]].")
    keys_dir: Path = setting(
        Path(".sluice/keys/grant-public"),
        help="Folder with the public keys of schedulers, by which dispatch grants are verified.",
    )
    require_grant: bool = setting(
        True, help="Refuse a start without a valid dispatch grant. Off only for experiments."
    )
    drain_grace_s: float = setting(
        120.0, unit="s", ge=0.0, le=3600.0, help="Longest wait for open work at shutdown."
    )
    probe_lag_s: float = setting(
        1.0, unit="s", ge=0.0, le=60.0, help="From NOT_SERVING to the start of the drain."
    )
    generate_deadline_s: float = setting(
        300.0, unit="s", ge=0.1, le=86400.0, help="Deadline of a plain Generate that sets none."
    )
    embed_deadline_s: float = setting(
        60.0, unit="s", ge=0.1, le=3600.0, help="Deadline of an Embed that sets none."
    )


@dataclass(frozen=True, slots=True)
class InstanceConfig:
    """One ``[[instance]]``: a model, the engine that runs it, and where it serves.

    ``path`` is the model's folder (empty for the simulated engine); ``engine_args`` are passed to
    vLLM, ``simulated`` to the simulated engine, whose own settings they are."""

    name: str
    address: str
    engine: EngineKind
    model: str
    path: str
    aliases: tuple[str, ...]
    dtype: str
    quantization: str
    tensor_parallel_size: int
    pipeline_parallel_size: int
    engine_args: Mapping[str, object]
    simulated: Mapping[str, object]


def load_instance(path: Path | None, name: str) -> InstanceConfig:
    """The instance of that name, or the first for an empty one. Raises ConfigError."""
    if path is None:
        raise ConfigError("instance", "no configuration file: set SLUICE_CONFIG to one")
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read ({error.strerror})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), f"is not TOML: {error}") from error
    tables = document.get("instance", [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ConfigError("instance", "must be an array of tables: [[instance]]")
    for table in tables:
        if not name or table.get("name") == name:
            return _Table(table).read()
    known = ", ".join(str(table.get("name")) for table in tables) or "none"
    raise ConfigError("inference.instance", f"there is no [[instance]] {name!r} (known: {known})")


class _Table:
    """One table as it stands in the file; takes fields out and refuses what is left."""

    # Resolved before a service reads the file, and ignored when it was not.
    _NOT_OURS = ("cpu", "gpu", "env")

    def __init__(self, table: Mapping[str, object]) -> None:
        self._rest = {key: value for key, value in table.items() if key not in self._NOT_OURS}
        self._where = f"instance.{table.get('name', '?')}"

    def read(self) -> InstanceConfig:
        config = InstanceConfig(
            name=self._text("name", least=1),
            address=self._text("address", least=1),
            engine=self._engine(),
            model=self._text("model", least=1),
            path=self._text("path"),
            aliases=self._texts("aliases"),
            dtype=self._text("dtype") or "auto",
            quantization=self._text("quantization"),
            tensor_parallel_size=self._parallel("tensor_parallel_size"),
            pipeline_parallel_size=self._parallel("pipeline_parallel_size"),
            engine_args=self._table("engine_args"),
            simulated=self._table("simulated"),
        )
        for key in self._rest:
            raise ConfigError(f"{self._where}.{key}", "there is no such setting")
        if config.engine is EngineKind.VLLM and not config.path:
            raise ConfigError(f"{self._where}.path", "is required for the engine vllm")
        return config

    def _take(self, key: str, kind: type, default: object) -> object:
        value = self._rest.pop(key, default)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ConfigError(f"{self._where}.{key}", f"must be a {kind.__name__}, is {value!r}")
        return value

    def _text(self, key: str, least: int = 0) -> str:
        text = cast("str", self._take(key, str, ""))
        limit = NAME_CHARS_MAX if least else 4096
        if not least <= len(text) <= limit:
            raise ConfigError(f"{self._where}.{key}", f"must be {least} to {limit} characters")
        return text

    def _texts(self, key: str) -> tuple[str, ...]:
        texts = cast("list[object]", self._take(key, list, []))
        if not all(isinstance(text, str) and 1 <= len(text) <= NAME_CHARS_MAX for text in texts):
            raise ConfigError(
                f"{self._where}.{key}", f"must hold strings of 1 to {NAME_CHARS_MAX} characters"
            )
        return tuple(cast("list[str]", texts))

    def _parallel(self, key: str) -> int:
        size = cast("int", self._take(key, int, 1))
        if not 1 <= size <= PARALLEL_MAX:
            raise ConfigError(f"{self._where}.{key}", f"must be 1 to {PARALLEL_MAX}, is {size}")
        return size

    def _table(self, key: str) -> Mapping[str, Any]:
        return cast("Mapping[str, Any]", self._take(key, dict, {}))

    def _engine(self) -> EngineKind:
        name = self._text("engine", least=1)
        try:
            return EngineKind(name)
        except ValueError:
            names = " or ".join(kind.value for kind in EngineKind)
            raise ConfigError(f"{self._where}.engine", f"must be {names}, is {name!r}") from None
