"""Results of MCP tools as JSON for the model. Pure functions.

Text stays text; structured content is the result where there is any. What a model cannot read
(images, sounds, binary resources) is named with its type and size, never passed on.
"""

from __future__ import annotations

import json
from typing import Any, Final

from mcp_types import (
    AudioContent,
    BlobResourceContents,
    CallToolResult,
    ContentBlock,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
    TextResourceContents,
)

ERROR_BYTES_MAX: Final = 4096  # of what a failed tool says


def result_json(result: CallToolResult) -> str:
    """The result: its structured content, its only text, or ``{"content": [...]}``."""
    texts = [block for block in result.content if isinstance(block, TextContent)]
    others = [_block(block) for block in result.content if not isinstance(block, TextContent)]
    if result.structured_content is not None:
        # Texts beside it repeat it, as the protocol asks of servers.
        if not others:
            return _dump(result.structured_content)
        return _dump({"structured": result.structured_content, "content": others})
    if len(texts) == 1 and not others:
        return _dump(texts[0].text)
    return _dump({"content": [_block(block) for block in result.content]})


def error_json(said: str) -> str:
    """What a failed tool says, as a JSON string of at most ERROR_BYTES_MAX bytes and quotes."""
    text = said.encode("utf-8", "replace")[:ERROR_BYTES_MAX].decode("utf-8", "ignore")
    while len((dumped := _dump(text)).encode()) > ERROR_BYTES_MAX + 2:
        text = text[: len(text) * 3 // 4]  # what has to be escaped takes more
    return dumped


def error_text(result: CallToolResult) -> str:
    """The texts of a result."""
    return "\n".join(block.text for block in result.content if isinstance(block, TextContent))


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _block(block: ContentBlock) -> str | dict[str, object]:
    match block:
        case TextContent():
            return block.text
        case ImageContent() | AudioContent():
            return _binary(block.type, block.mime_type, block.data)
        case ResourceLink():
            return {
                "type": "resource_link",
                "uri": str(block.uri),
                "name": block.name,
                "description": block.description or "",
                "media_type": block.mime_type or "",
            }
        case EmbeddedResource(resource=resource):
            return _resource(resource)


def _resource(resource: TextResourceContents | BlobResourceContents) -> dict[str, object]:
    if isinstance(resource, TextResourceContents):
        return {"type": "resource", "uri": str(resource.uri), "text": resource.text}
    shown = _binary("resource", resource.mime_type or "", resource.blob)
    return shown | {"uri": str(resource.uri)}


def _binary(kind: str, media_type: str, base64: str) -> dict[str, object]:
    """``bytes``: of the content itself."""
    size = len(base64) * 3 // 4 - base64[-2:].count("=")
    return {"type": kind, "media_type": media_type, "bytes": size, "note": "not shown"}
