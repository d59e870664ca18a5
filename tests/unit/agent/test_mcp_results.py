"""Results of MCP tools as JSON."""

from __future__ import annotations

import json

import pytest
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

from agent_svc.adapters.tools.mcp_results import (
    ERROR_BYTES_MAX,
    error_json,
    error_text,
    result_json,
)

PIXEL = "iVBORw0KGgo="  # 8 bytes


def result(*content: ContentBlock, structured: object = None) -> CallToolResult:
    return CallToolResult(content=list(content), structured_content=structured)


def say(text: str) -> TextContent:
    return TextContent(text=text)


IMAGE = ImageContent(data=PIXEL, mime_type="image/png")
SHOWN_IMAGE = {"type": "image", "media_type": "image/png", "bytes": 8, "note": "not shown"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (result(say("hi")), "hi"),
        (result(), {"content": []}),
        (result(say("a"), say("b")), {"content": ["a", "b"]}),
        (result(say('{"a":1}'), structured={"a": 1}), {"a": 1}),
        (result(structured=[1, 2]), [1, 2]),
        (result(structured=0), 0),
        (result(say("x"), IMAGE), {"content": ["x", SHOWN_IMAGE]}),
        (
            result(say("x"), IMAGE, structured={"a": 1}),
            {"structured": {"a": 1}, "content": [SHOWN_IMAGE]},
        ),
        (
            result(AudioContent(data="AAAA", mime_type="audio/wav")),
            {"content": [SHOWN_IMAGE | {"type": "audio", "media_type": "audio/wav", "bytes": 3}]},
        ),
        (
            result(ResourceLink(uri="file:///a", name="a", mime_type="text/plain")),
            {
                "content": [
                    {
                        "type": "resource_link",
                        "uri": "file:///a",
                        "name": "a",
                        "description": "",
                        "media_type": "text/plain",
                    }
                ]
            },
        ),
        (
            result(EmbeddedResource(resource=TextResourceContents(uri="file:///b", text="in"))),
            {"content": [{"type": "resource", "uri": "file:///b", "text": "in"}]},
        ),
        (
            result(EmbeddedResource(resource=BlobResourceContents(uri="file:///c", blob="AAA="))),
            {
                "content": [
                    {
                        "type": "resource",
                        "media_type": "",
                        "bytes": 2,
                        "note": "not shown",
                        "uri": "file:///c",
                    }
                ]
            },
        ),
    ],
)
def test_what_a_model_can_read_is_passed_on_and_the_rest_is_named(
    given: CallToolResult, expected: object
) -> None:
    assert json.loads(result_json(given)) == expected


def test_texts_stay_as_they_are() -> None:
    assert result_json(result(say("龜 <b>"))) == '"龜 <b>"'


@pytest.mark.parametrize(
    "text", ["short", "x" * 10_000, '"\n' * 5_000, "龜" * 5_000, "\x00" * 5000]
)
def test_what_a_failed_tool_says_is_cut_to_its_bound(text: str) -> None:
    said = error_json(text)
    assert text.startswith(json.loads(said))
    assert len(said.encode()) <= ERROR_BYTES_MAX + 2
    assert len(text) > 100 or json.loads(said) == text


def test_the_error_of_a_result_is_its_texts() -> None:
    assert error_text(result(say("no"), IMAGE, say("such"))) == "no\nsuch"
