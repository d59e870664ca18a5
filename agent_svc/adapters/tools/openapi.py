"""Operations of an OpenAPI document as tools, one each, named ``declaration__operation``.

The document is read once; what it says is understood by domain/openapi.py. Requests go through the
declaration's transport, so that a server in the document opens nothing that the declaration's
egress does not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import yaml

from agent_svc.adapters.tools.exchange import Exchange
from agent_svc.adapters.tools.url_template import as_text, with_query
from agent_svc.domain.model import Effect, ToolInfo
from agent_svc.domain.openapi import BODY, OpenApiError, Operation
from agent_svc.ports import ToolContext, ToolError, ToolResult
from sluice.tool_rules import DOCUMENT_BYTES_MAX


def read_document(text: str) -> Mapping[str, object]:
    """A document in JSON or YAML. YAML's anchors are refused: a few of them make gigabytes. Raises
    OpenApiError."""
    if len(text.encode()) > DOCUMENT_BYTES_MAX:
        raise OpenApiError(f"must be at most {DOCUMENT_BYTES_MAX} bytes")
    try:
        document = json.loads(text)
    except RecursionError:
        raise OpenApiError("is nested too deeply") from None
    except ValueError:
        document = _yaml(text)
    if not isinstance(document, dict):
        raise OpenApiError("must be an object")
    return document


def _yaml(text: str) -> object:
    try:
        for token in yaml.scan(text, Loader=yaml.CSafeLoader):
            if isinstance(token, yaml.AliasToken | yaml.AnchorToken):
                raise OpenApiError("must have no YAML anchors")
        document = yaml.load(text, Loader=yaml.CSafeLoader)
        # As JSON has it: names are texts, dates too, and there is no NaN.
        return json.loads(json.dumps(document, default=str, allow_nan=False))
    except (yaml.YAMLError, RecursionError, ValueError, TypeError):
        raise OpenApiError("is neither JSON nor YAML") from None


class OpenApiOperation:
    """See Tool."""

    def __init__(
        self, info: ToolInfo, operation: Operation, base_url: str, exchange: Exchange
    ) -> None:
        self._info = info
        self._operation = operation
        self._base_url = base_url.rstrip("/")
        self._exchange = exchange

    @property
    def info(self) -> ToolInfo:
        """See Tool."""
        return self._info

    async def call(self, arguments: dict[str, Any], context: ToolContext) -> ToolResult:
        """See Tool."""
        path, query, headers = self._operation.path, [], {}
        for one in self._operation.parameters:
            value = arguments.get(one.argument)
            if value is None and one.place != "path":
                continue
            if one.place == "path":
                path = path.replace("{" + one.name + "}", _segment(value))
            elif one.place == "query":
                query.append((one.name, value))
            else:
                headers[one.name] = _header(value)
        body = arguments.get(BODY) if self._operation.has_body else None
        url = with_query(self._base_url + path, query)
        return await self._exchange.call(
            self._operation.method, url, context, headers=headers, body=body
        )


def _segment(value: object) -> str:
    text = as_text(value)
    if text.strip() in ("", ".", ".."):
        raise ToolError("TOOL_REFUSED", "An argument does not fit into the path.", made=False)
    return quote(text, safe="")


def _header(value: object) -> str:
    text = as_text(value)
    if not text.isascii() or not text.isprintable():
        raise ToolError("TOOL_REFUSED", "An argument does not fit into a header.", made=False)
    return text


def info_of(
    declaration: str, operation: Operation, effect: Effect, needs_approval: bool
) -> ToolInfo:
    """What the model and the rules know of an operation. GET only reads, whatever the document's
    other operations do."""
    return ToolInfo(
        name=f"{declaration}__{operation.id}"[:64],
        description=operation.description,
        parameters=operation.schema,
        effect=Effect.READ if operation.method == "GET" else effect,
        needs_approval=needs_approval,
    )
