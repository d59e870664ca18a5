"""Configuration: frozen dataclasses whose fields say their unit, default, range and meaning.

Owns how values are found and checked: defaults, then a section of ``sluice.toml``, then the
environment (``SLUICE_<SECTION>_<FIELD>``). Anything that is not a setting, of the wrong type or out
of range refuses the start with a :class:`ConfigError` that names ``section.field``, the value, the
range and the unit. :class:`Reloadable` keeps the last good values when a reload fails.

Synchronous; read at start and on reload only. A secret's value never appears in an error.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import os
import tomllib
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

T = TypeVar("T")
C = TypeVar("C", bound=type)

CONFIG_VARIABLE = "SLUICE_CONFIG"  # path of sluice.toml for every service process
_META = "sluice"
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})

# Dotted section name -> its dataclass; filled by @section, read by documentation and tests.
SECTIONS: dict[str, type] = {}


class ConfigError(Exception):
    """A configuration that cannot be used. The text is for operators, never for clients."""

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(f"{where}: {problem}")
        self.where = where
        self.problem = problem


@dataclass(frozen=True, slots=True)
class SettingInfo:
    """What a field says about itself. ``kind`` is the type in words; ``range`` is empty when any
    value of the type will do; ``variable`` is the environment's name for it."""

    section: str
    name: str
    kind: str
    default: object
    unit: str
    ge: float | None
    le: float | None
    choices: tuple[str, ...]
    help: str
    secret: bool
    variable: str

    @property
    def where(self) -> str:
        """``section.field``."""
        return f"{self.section}.{self.name}"

    @property
    def range(self) -> str:
        """The permitted values in words."""
        unit = f" {self.unit}" if self.unit else ""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        if self.ge is not None and self.le is not None:
            return f"{self.ge:.15g} to {self.le:.15g}{unit}"
        if self.ge is not None:
            return f"at least {self.ge:.15g}{unit}"
        return f"at most {self.le:.15g}{unit}" if self.le is not None else ""

    @property
    def default_text(self) -> str:
        """The default as it would be written in TOML."""
        return '"(secret)"' if self.secret and self.default else _toml(self.default)


@dataclass(frozen=True, slots=True)
class _Meta:
    unit: str
    ge: float | None
    le: float | None
    choices: tuple[str, ...]
    help: str
    secret: bool


def setting(
    default: T,
    *,
    unit: str = "",
    ge: float | None = None,
    le: float | None = None,
    choices: Sequence[str] | None = None,
    help: str = "",  # noqa: A002 - reads as what it is where fields are declared
    secret: bool = False,
) -> T:
    """A field of a config dataclass. ``ge`` and ``le`` bound numbers, and the number of entries of
    a tuple; ``choices`` bounds strings and the entries of a tuple."""
    meta = _Meta(unit, ge, le, tuple(choices or ()), help, secret)
    field: T = dataclasses.field(default=default, metadata={_META: meta})
    return field


def section(name: str) -> Callable[[C], C]:
    """Class decorator: registers a config dataclass under its section, so that its documentation
    is generated and its ranges are tested."""

    def register(cls: C) -> C:
        known = SECTIONS.setdefault(name, cls)
        assert known.__qualname__ == cls.__qualname__, f"two dataclasses for section {name}"
        return cls

    return register


def describe(cls: type, name: str) -> list[SettingInfo]:
    """The settings of a config dataclass, in order."""
    hints = typing.get_type_hints(cls)
    infos = []
    for field in dataclasses.fields(cls):
        meta = field.metadata.get(_META) or _Meta("", None, None, (), "", False)
        hint = hints[field.name]
        enum_type = _enum_of(hint)
        infos.append(
            SettingInfo(
                section=name,
                name=field.name,
                kind=_kind(hint),
                default=None if field.default is dataclasses.MISSING else field.default,
                unit=meta.unit,
                ge=meta.ge,
                le=meta.le,
                choices=tuple(str(m.value) for m in enum_type) if enum_type else meta.choices,
                help=meta.help,
                secret=meta.secret,
                variable=_prefix(name) + field.name.upper(),
            )
        )
    return infos


def load(
    cls: type[T],
    section: str,
    *,
    path: Path | None = None,
    environ: Mapping[str, str] | None = None,
    subsections: Sequence[str] = (),
) -> T:
    """The section's values. ``path`` is the TOML file (``None``: no file); ``environ`` defaults to
    the process environment. ``subsections`` names tables inside the section that are loaded on
    their own. Raises ConfigError."""
    environ = os.environ if environ is None else environ
    infos = {info.name: info for info in describe(cls, section)}
    hints = typing.get_type_hints(cls)
    values: dict[str, object] = {}
    for name, value in (_table(path, section) if path is not None else {}).items():
        if name in subsections:
            continue
        if name not in infos:
            raise ConfigError(f"{section}.{name}", "there is no such setting")
        values[name] = _convert(infos[name], hints[name], value)
    prefix = _prefix(section)
    other_sections = [_prefix(f"{section}.{name}") for name in subsections]
    for variable in sorted(environ):
        name = variable.removeprefix(prefix).lower()
        if not variable.startswith(prefix) or any(map(variable.startswith, other_sections)):
            continue
        if name not in infos:
            raise ConfigError(variable, f"there is no setting {section}.{name}")
        values[name] = _convert(infos[name], hints[name], _parse(hints[name], environ[variable]))
    for name, info in infos.items():
        if name not in values:
            _check(info, info.default)
    try:
        return cls(**values)
    except (TypeError, ValueError) as error:
        raise ConfigError(section, str(error)) from error


class Reloadable(Generic[T]):
    """Values that can be read again while the service runs.

    ``current`` is a snapshot: take it once per request. A reload that fails keeps the last good
    one, adds one to ``failures`` and says why in ``last_error``."""

    def __init__(self, load: Callable[[], T]) -> None:
        self._load = load
        self._current = load()
        self.reloads = 0
        self.failures = 0
        self.last_error: ConfigError | None = None

    @property
    def current(self) -> T:
        """The last good values."""
        return self._current

    def reload(self) -> bool:
        """Reads again; whether the new values are in use. Never raises for bad content."""
        try:
            self._current = self._load()
        except ConfigError as error:
            self.failures += 1
            self.last_error = error
            return False
        except (OSError, ValueError) as error:
            self.failures += 1
            self.last_error = ConfigError("reload", type(error).__name__)
            return False
        self.reloads += 1
        self.last_error = None
        return True


def config_path(environ: Mapping[str, str] | None = None) -> Path | None:
    """The configuration file that the environment names, if any."""
    name = (os.environ if environ is None else environ).get(CONFIG_VARIABLE, "")
    return Path(name) if name else None


def _table(path: Path, section: str) -> Mapping[str, object]:
    try:
        document: object = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read ({error.strerror})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), f"is not TOML: {error}") from error
    for part in section.split("."):
        assert isinstance(document, dict)
        document = document.get(part, {})
        if not isinstance(document, dict):
            raise ConfigError(section, "must be a table")
    return cast("Mapping[str, object]", document)


def _prefix(section: str) -> str:
    return "SLUICE_" + section.upper().replace(".", "_").replace("-", "_") + "_"


def _members(hint: Any) -> tuple[Any, bool]:
    """(the type without None, whether None is allowed)."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        rest = [arg for arg in typing.get_args(hint) if arg is not types.NoneType]
        assert len(rest) == 1, f"unsupported type {hint}"
        return rest[0], True
    return hint, False


def _enum_of(hint: Any) -> type[enum.Enum] | None:
    base, _ = _members(hint)
    return base if isinstance(base, type) and issubclass(base, enum.Enum) else None


def _is_tuple(hint: Any) -> bool:
    if typing.get_origin(hint) is tuple:
        assert typing.get_args(hint) == (str, ...), f"unsupported type {hint}"
        return True
    return False


def _kind(hint: Any) -> str:
    base, optional = _members(hint)
    if _is_tuple(base):
        name = "list of strings"
    elif _enum_of(base):
        name = "string"
    else:
        assert base in _KINDS, f"unsupported type {hint}"
        name = _KINDS[base]
    return f"{name}, optional" if optional else name


_KINDS: dict[Any, str] = {
    int: "integer",
    float: "number",
    bool: "boolean",
    str: "string",
    Path: "path",
}


def _parse(hint: Any, text: str) -> object:
    """An environment variable's text as the value that TOML would hold; text that does not fit is
    returned as it is and refused by :func:`_convert`."""
    base, optional = _members(hint)
    if optional and text == "":
        return None
    if base is bool:
        lowered = text.strip().lower()
        return True if lowered in _TRUE else False if lowered in _FALSE else text
    if base in (int, float):
        try:
            return int(text) if base is int else float(text)
        except ValueError:
            return text
    if _is_tuple(base):
        return [entry.strip() for entry in text.split(",") if entry.strip()]
    return text


def _convert(info: SettingInfo, hint: Any, value: object) -> object:
    base, optional = _members(hint)
    if value is None and optional:
        return None
    enum_type = _enum_of(base)
    result: object = value
    fits = True
    if enum_type is not None:
        members = {str(member.value): member for member in enum_type}
        if str(value) not in members:
            raise _refuse(info, value)
        return members[str(value)]
    if base is float and isinstance(value, int) and not isinstance(value, bool):
        result = float(value)
    elif _is_tuple(base):
        fits = isinstance(value, list) and all(isinstance(entry, str) for entry in value)
        result = tuple(cast("list[str]", value)) if fits else value
    elif base is Path:
        fits = isinstance(value, str)
        result = Path(cast("str", value)).expanduser() if fits else value
    else:
        fits = type(value) is base
    if not fits:
        raise _refuse(info, value, f"must be of type {info.kind}")
    _check(info, result)
    return result


def _check(info: SettingInfo, value: object) -> None:
    """Range and choices of a value of the right type."""
    number: float | None = None
    if isinstance(value, tuple):
        number = len(value)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        number = value
        if not math.isfinite(number):
            raise _refuse(info, value, "must be finite")
    if number is not None and not (
        (info.ge is None or number >= info.ge) and (info.le is None or number <= info.le)
    ):
        raise _refuse(info, value)
    if info.choices and not isinstance(value, enum.Enum):
        entries = value if isinstance(value, tuple) else (value,)
        if value is not None and not all(str(entry) in info.choices for entry in entries):
            raise _refuse(info, value)


def _refuse(info: SettingInfo, value: object, problem: str = "") -> ConfigError:
    shown = "(secret)" if info.secret else repr(value)
    limits = f"; permitted: {info.range}" if info.range else ""
    return ConfigError(info.where, f"{shown} {problem or 'is out of range'}{limits}")


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml(entry) for entry in value) + "]"
    if value is None:
        return '""'
    text = value.value if isinstance(value, enum.Enum) else value
    return '"' + str(text).replace("\\", "\\\\").replace('"', '\\"') + '"'


def all_settings() -> Iterator[SettingInfo]:
    """The settings of every registered section, in the order of registration."""
    for name, cls in SECTIONS.items():
        yield from describe(cls, name)
