"""The examples of docs/TOOLS.md are read by the parser of the configuration and make tools.

Mutant seen to fail: an example with a field that does not exist.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from sluice.agent.v1.tools_pb2 import ToolDeclaration
from sluice.tool_declarations import parse

PAGE = Path(__file__).resolve().parents[3] / "docs" / "TOOLS.md"


def examples() -> list[ToolDeclaration]:
    blocks = re.findall(r"^```toml\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    tables: list[dict[str, Any]] = []
    for block in blocks:
        tables += tomllib.loads(block)["tool"]
    return [parse(table, f"tool[{index}]") for index, table in enumerate(tables)]


def test_every_example_is_a_declaration_and_every_kind_has_one() -> None:
    found = examples()
    kinds = {one.WhichOneof("kind") for one in found}
    assert kinds == {field.name for field in ToolDeclaration.DESCRIPTOR.oneofs[0].fields}
    assert len({one.name for one in found}) == len(found)


def test_the_page_names_every_field_of_a_declaration() -> None:
    text = PAGE.read_text()
    missing = []
    for message in (ToolDeclaration.DESCRIPTOR, *_parts()):
        for field in message.fields:
            name = {"timeout": "timeout_s", "parameters_json": "parameters"}.get(
                field.name, field.name
            )
            missing += [] if name in text else [f"{message.name}.{field.name}"]
    assert missing == []


def _parts() -> list[Any]:
    return [
        field.message_type
        for field in ToolDeclaration.DESCRIPTOR.fields
        if field.message_type is not None and field.message_type.file.name.endswith("tools.proto")
    ]
