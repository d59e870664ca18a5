"""OpenAPI documents become operations with one schema each; strange ones are refused.

Mutant: openapi_references_leave_the_document.
"""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from agent_svc.adapters.tools.openapi import read_document
from agent_svc.domain.openapi import OpenApiError, Operation, Parameter, base_url, operations

DOCUMENT: dict[str, Any] = {
    "openapi": "3.0.3",
    "servers": [
        {"url": "https://{place}.example.org/v1", "variables": {"place": {"default": "api"}}}
    ],
    "paths": {
        "/pets/{petId}": {
            "parameters": [{"$ref": "#/components/parameters/Pet"}],
            "get": {
                "operationId": "getPet",
                "summary": "One pet.",
                "parameters": [
                    {
                        "name": "tags",
                        "in": "query",
                        "schema": {"type": "array", "items": {"type": "string"}},
                    },
                    {"name": "X-Trace", "in": "header", "schema": {"type": "string"}},
                    {"name": "Authorization", "in": "header", "schema": {"type": "string"}},
                    {"name": "petId", "in": "query", "schema": {"type": "integer"}},
                    {"name": "sid", "in": "cookie", "schema": {"type": "string"}},
                ],
            },
            "put": {
                "operationId": "put.pet!",
                "requestBody": {"$ref": "#/components/requestBodies/Pet"},
            },
        },
        "/pets": {"get": {"description": "All pets."}, "trace": {}},
        "/upload": {
            "get": {
                "operationId": "needsCookie",
                "parameters": [
                    {"name": "s", "in": "cookie", "required": True, "schema": {"type": "string"}}
                ],
            },
            "post": {
                "operationId": "upload",
                "requestBody": {"required": True, "content": {"image/png": {}}},
            },
        },
    },
    "components": {
        "parameters": {
            "Pet": {
                "name": "petId",
                "in": "path",
                "required": True,
                "schema": {"type": "string", "maxLength": 10},
            }
        },
        "requestBodies": {
            "Pet": {
                "required": True,
                "content": {
                    "application/json; charset=utf-8": {
                        "schema": {"$ref": "#/components/schemas/Pet"}
                    }
                },
            }
        },
        "schemas": {
            "Pet": {
                "type": "object",
                "required": ["name"],
                "properties": {
                    "name": {"type": "string", "nullable": True, "example": "Rex"},
                    "age": {"type": "integer", "minimum": 0, "exclusiveMinimum": True},
                    "parent": {"$ref": "#/components/schemas/Pet"},
                    "kind": {"type": "string", "enum": ["cat"], "nullable": True},
                },
            }
        },
    },
}


def changed(**paths: Any) -> dict[str, Any]:
    document = copy.deepcopy(DOCUMENT)
    document.update(paths)
    return document


def one(document: dict[str, Any], name: str) -> Operation:
    (found,) = operations(document, [name])
    return found


def test_all_get_operations_that_can_be_sent_are_offered_where_none_is_named() -> None:
    assert [found.id for found in operations(DOCUMENT, [])] == ["getPet", "get__pets"]
    assert base_url(DOCUMENT) == "https://api.example.org/v1"


def test_parameters_become_properties() -> None:
    found = one(DOCUMENT, "getPet")
    assert (found.method, found.path, found.description) == ("GET", "/pets/{petId}", "One pet.")
    assert found.parameters == (
        Parameter("petId", "petId", "path"),
        Parameter("tags", "tags", "query"),
        Parameter("X-Trace", "X-Trace", "header"),
        Parameter("query_petId", "petId", "query"),
    )
    assert found.schema["required"] == ["petId"]
    assert found.schema["properties"] == {
        "petId": {"type": "string", "maxLength": 10},
        "tags": {"type": "array", "items": {"type": "string"}},
        "X-Trace": {"type": "string"},
        "query_petId": {"type": "integer"},
    }
    assert not found.has_body


def test_a_body_keeps_its_references_and_becomes_json_schema() -> None:
    found = one(DOCUMENT, "put.pet!")
    assert (found.id, found.has_body) == ("put_pet", True)
    schema = json.loads(json.dumps(found.schema))
    assert schema["properties"]["body"] == {"$ref": "#/$defs/Pet"}
    assert schema["$defs"]["Pet"]["properties"]["name"] == {"type": ["string", "null"]}
    assert schema["$defs"]["Pet"]["properties"]["age"] == {"type": "integer", "exclusiveMinimum": 0}
    Draft202012Validator.check_schema(schema)
    validator = Draft202012Validator(schema)
    good = {"petId": "1", "body": {"name": None, "parent": {"name": "x"}, "kind": None}}
    assert validator.is_valid(good)
    for body in ({}, {"name": 1}, {"name": "a", "age": 0}, {"name": "a", "parent": {"age": 1}}):
        assert not validator.is_valid({"petId": "1", "body": body}), body


@pytest.mark.parametrize(
    ("document", "name", "text"),
    [
        ({"swagger": "2.0"}, "x", "OpenAPI 3"),
        ({"openapi": "4.0.0"}, "x", "OpenAPI 3"),
        ({"openapi": 3.0}, "x", "OpenAPI 3"),
        (DOCUMENT, "nobody", "no operation nobody"),
        (DOCUMENT, "upload", "not JSON"),
        (DOCUMENT, "needsCookie", "cannot be sent"),
        (changed(components={}), "getPet", "leads nowhere"),
        (
            changed(paths={"/a/{b}": {"get": {"operationId": "a"}}}),
            "a",
            "path and its parameters",
        ),
        (
            changed(components={"parameters": {"Pet": {"$ref": "#/components/parameters/Pet"}}}),
            "getPet",
            "circles",
        ),
        (
            changed(components={"parameters": {"Pet": {"$ref": "https://evil.org/p.json"}}}),
            "getPet",
            "leaves the document",
        ),
        (
            changed(components={"parameters": {"Pet": {"$ref": "file:///etc/passwd"}}}),
            "getPet",
            "leaves the document",
        ),
        (changed(components={"parameters": {"Pet": 3}}), "getPet", "object"),
    ],
)
def test_what_cannot_be_offered_is_refused_when_it_is_named(
    document: dict[str, Any], name: str, text: str
) -> None:
    with pytest.raises(OpenApiError, match=text):
        operations(document, [name])


def test_schemas_that_are_deep_or_many_are_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(60):
        deep = {"type": "array", "items": deep}
    wide = {
        f"S{i}": {"properties": {"a": {"$ref": f"#/components/schemas/S{i + 1}"}}}
        for i in range(1500)
    }
    for schema, schemas in ((deep, {}), ({"$ref": "#/components/schemas/S0"}, wide)):
        body = {"content": {"application/json": {"schema": schema}}}
        paths = {"/a": {"post": {"operationId": "a", "requestBody": body}}}
        with pytest.raises(OpenApiError):
            operations(changed(paths=paths, components={"schemas": schemas}), ["a"])


def test_documents_are_json_or_yaml_without_anchors() -> None:
    assert read_document('{"openapi": "3.1.0"}') == {"openapi": "3.1.0"}
    assert read_document("openapi: 3.1.0\npaths: {}\n") == {"openapi": "3.1.0", "paths": {}}
    dates = read_document("openapi: 3.1.0\nx: 2020-01-01\nresponses: {200: ok}\n")
    assert dates == {"openapi": "3.1.0", "x": "2020-01-01", "responses": {"200": "ok"}}
    bomb = "a: &a [x,x]\n" + "".join(
        f"{new}: &{new} [*{old},*{old}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
    )
    for text in (
        bomb,
        "[1]",
        "a: [",
        "!!python/object:os.system {}",
        "a: .nan",
        "? [a]\n: 1",
        "[" * 100_000,
        "x" * (2 << 20),
    ):
        with pytest.raises(OpenApiError):
            read_document(text)
