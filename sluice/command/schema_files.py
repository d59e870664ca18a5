"""Files with a JSON schema, as options name them."""

from __future__ import annotations

from pathlib import Path

import typer


def schema_text(path: Path, option: str, *, applied: bool = False) -> str:
    """The schema in a file, as it stands there. ``applied``: the mesh itself checks answers by it,
    not an engine, so it must be one that can be. Raises BadParameter, which names ``option`` and
    the file."""
    from sluice import json_schemas

    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise typer.BadParameter(f"{path}: {error.strerror}", param_hint=option) from None
    except UnicodeDecodeError:
        raise typer.BadParameter(f"{path} is not UTF-8 text", param_hint=option) from None
    schema = json_schemas.parse_object(text)
    if schema is None:
        raise typer.BadParameter(f"{path} does not hold a JSON object", param_hint=option)
    if applied and (problem := json_schemas.check_schema(schema)):
        raise typer.BadParameter(f"{path}: the schema {problem}", param_hint=option)
    return text
