"""docs/CONFIGURATION.md: every setting that the services declare, as one page; and their check.

Owns where settings are declared, and the form of the page. Pure but for importing the modules that
declare them, and for reading the file to check it; a service that is not installed is left out.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from itertools import groupby
from typing import Final

from sluice.config import SECTIONS, SettingInfo, all_settings, load
from sluice.mesh_config import MeshFile

PAGE: Final = "docs/CONFIGURATION.md"
# The services' own are found by name, since nothing here imports one.
MODULES: Final = (
    "sluice.mesh_config",
    "sluice.edge_config",
    "scheduler_svc.config",
    "execution_svc.config",
    "agent_svc.config",
    "inference_svc.config",
    "state_svc.config",
)
_HEAD: Final = """# Configuration

Written by `sluice config --markdown`; a test compares. `sluice config` prints the values in force.

A value comes from the environment, else from [sluice.toml](../sluice.toml), else it is the default.
A list in the environment is separated by commas. An unknown name, a value of another type or out of
range refuses the start with exit status 78 and names the setting; `sluice config` and `sluice up`
refuse it before any process starts. An `[[instance]]` is explained where it stands, in
[sluice.toml](../sluice.toml).
"""


def declared() -> Iterator[SettingInfo]:
    """Every setting, section by section, in the order in which they are declared."""
    sections = _sections()  # before: importing a module is what makes its settings known
    known = list(all_settings())
    for section in sections:
        yield from (info for info in known if info.section == section)


def check(file: MeshFile) -> None:
    """Reads every section as its service will, so that a setting is refused before any process
    starts. Raises ConfigError for the first that is wrong."""
    for section in _sections():
        load(SECTIONS[section], section, path=file.path, environ=file.environ)


def _sections() -> list[str]:
    sections: list[str] = []
    for name in MODULES:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        sections += [s for s, cls in SECTIONS.items() if cls.__module__ == module.__name__]
    return sections


def render() -> str:
    """The page."""
    parts = [_HEAD]
    for section, infos in groupby(declared(), key=lambda info: info.section):
        parts.append(f"\n## [{section}]\n")
        parts.append("| setting | default | permitted | environment | |\n|---|---|---|---|---|")
        parts += [_row(info) for info in infos]
    return "\n".join(parts) + "\n"


def _row(info: SettingInfo) -> str:
    unit = f", {info.unit}" if info.unit else ""
    permitted = info.range if info.choices else f"{info.kind}, {info.range}" if info.range else ""
    cells = (
        f"`{info.name}`",
        f"`{info.default_text}`",
        permitted or info.kind + unit,
        f"`{info.variable}`",
        info.help,
    )
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
