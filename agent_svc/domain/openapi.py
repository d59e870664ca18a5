"""OpenAPI 3.0 and 3.1 documents as operations with one JSON schema each.

Pure. A document comes from strangers: references are followed only within it, at most
`REFERENCES_MAX` and `DEPTH_MAX` deep, and what is not understood leaves an operation out or, where
the declaration names it, is an error. Parameters in path, query and header become properties by
their names; a JSON body becomes the property ``body``. Schemas keep their references, moved to
``$defs``, so that recursive ones stay finite. Those of 3.0 are turned into JSON Schema:
``nullable`` and exclusive bounds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

OPERATIONS_MAX: Final = 256
PARAMETERS_MAX: Final = 64  # of one operation
REFERENCES_MAX: Final = 1000  # followed for one operation
DEPTH_MAX: Final = 32
DESCRIPTION_CHARS_MAX: Final = 1000
NAME_CHARS_MAX: Final = 64
BODY: Final = "body"

Json = Mapping[str, object]

_METHODS: Final = ("get", "post", "put", "patch", "delete")
_NAME: Final = re.compile(r"[^A-Za-z0-9_-]+")
_DROPPED: Final = frozenset(
    [
        "example",
        "examples",
        "discriminator",
        "xml",
        "externalDocs",
        "deprecated",
        "readOnly",
        "writeOnly",
        "nullable",
        "pattern",
        "patternProperties",
        "$schema",
        "$id",
        "$anchor",
        "$comment",
    ]
)
# Set by the transport or by secrets; OpenAPI itself says that the first three are ignored.
_HEADERS_LEFT_OUT: Final = frozenset(
    [
        "accept",
        "content-type",
        "authorization",
        "host",
        "content-length",
        "transfer-encoding",
        "connection",
        "cookie",
        "proxy-authorization",
        "te",
        "upgrade",
        "trailer",
        "expect",
        "accept-encoding",
        "traceparent",
    ]
)


class OpenApiError(Exception):
    """A document or operation that cannot be offered; the text is fixed but for names in it."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """Where an argument goes. ``place``: path, query or header; ``name``: as it is sent."""

    argument: str
    name: str
    place: str


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation that can be called. ``path`` holds {name} of path parameters."""

    id: str
    method: str
    path: str
    description: str
    parameters: tuple[Parameter, ...]
    schema: Json
    has_body: bool


def base_url(document: Json) -> str:
    """The first server's URL, with the defaults of its variables; empty where there is none."""
    servers = document.get("servers")
    first = servers[0] if isinstance(servers, list) and servers else None
    if not isinstance(first, Mapping) or not isinstance(first.get("url"), str):
        return ""
    url = str(first["url"])
    variables = first.get("variables")
    for name, variable in (variables if isinstance(variables, Mapping) else {}).items():
        if isinstance(variable, Mapping):
            url = url.replace("{" + str(name) + "}", str(variable.get("default", "")))
    return url


def operations(document: Json, wanted: Sequence[str]) -> list[Operation]:
    """The operations of the ids ``wanted``; none named: all GET ones that can be offered. Raises
    OpenApiError for a document of another kind and for a wanted operation that is not there or
    cannot be offered."""
    version = document.get("openapi")
    if not isinstance(version, str) or not re.match(r"3\.[01](\.|$)", version):
        raise OpenApiError("must be an OpenAPI 3.0 or 3.1 document")
    found: dict[str, Operation] = {}
    for method, path, item, raw in _raw(document):
        name = raw.get("operationId")
        told = name if isinstance(name, str) and name else f"{method}_{path}"
        if wanted and told not in wanted:
            continue
        if not wanted and method != "get":
            continue
        try:
            one = _Builder(document, version).build(told, method, path, item, raw)
        except OpenApiError:
            if wanted:
                raise
            continue
        if one.id in found:
            raise OpenApiError(f"two operations have the name {one.id}")
        found[one.id] = one
        if len(found) > OPERATIONS_MAX:
            raise OpenApiError(f"more than {OPERATIONS_MAX} operations: name those to offer")
    missing = {_name(name) for name in wanted} - set(found)
    if missing:
        raise OpenApiError("there is no operation " + ", ".join(sorted(missing)))
    return list(found.values())


def _raw(document: Json) -> Iterator[tuple[str, str, Json, Json]]:
    paths = document.get("paths")
    for path, item in (paths if isinstance(paths, Mapping) else {}).items():
        if not isinstance(item, Mapping) or not str(path).startswith("/"):
            continue
        for method in _METHODS:
            raw = item.get(method)
            if isinstance(raw, Mapping):
                yield method, str(path), item, raw


def _name(text: str) -> str:
    return _NAME.sub("_", text).strip("_")[:NAME_CHARS_MAX]


class _Builder:
    """Of one operation; counts the references that it follows."""

    def __init__(self, document: Json, version: str) -> None:
        self._document = document
        self._old = version.startswith("3.0")
        self._references = 0
        self._defs: dict[str, object] = {}
        self._names: dict[str, str] = {}
        self._waiting: list[tuple[str, str]] = []  # not in depth: chains of references are long

    def build(self, told: str, method: str, path: str, item: Json, raw: Json) -> Operation:
        """The operation. Raises OpenApiError."""
        properties: dict[str, object] = {}
        required: list[str] = []
        parameters: list[Parameter] = []
        for one in self._parameters(item, raw):
            name, place = str(one.get("name", "")), str(one.get("in", ""))
            if place == "header" and name.lower() in _HEADERS_LEFT_OUT:
                continue
            must = bool(one.get("required")) or place == "path"
            if place not in ("path", "query", "header") or not name or not self._plain(one, place):
                if must:
                    raise OpenApiError(f"{_name(told)}: the parameter {name!r} cannot be sent")
                continue
            argument = name if name not in properties and name != BODY else f"{place}_{name}"
            schema = self._schema(one.get("schema", {}), 0)
            properties[argument] = _described(schema, one.get("description"))
            parameters.append(Parameter(argument, name, place))
            if must:
                required.append(argument)
        named = {one.name for one in parameters if one.place == "path"}
        if named != set(re.findall(r"\{([^{}]+)\}", path)):
            raise OpenApiError(f"{_name(told)}: its path and its parameters do not fit")
        has_body = self._body(told, raw, properties, required)
        while self._waiting:
            moved, reference = self._waiting.pop()
            self._defs[moved] = self._schema(self._at(reference), 0)
        schema = {
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": False,
        }
        if self._defs:
            schema["$defs"] = self._defs
        texts = [str(raw[key]) for key in ("summary", "description") if raw.get(key)]
        description = " ".join(dict.fromkeys(texts)) or f"{method.upper()} {path}"
        return Operation(
            _name(told),
            method.upper(),
            path,
            description[:DESCRIPTION_CHARS_MAX],
            tuple(parameters),
            schema,
            has_body,
        )

    def _parameters(self, item: Json, raw: Json) -> list[Json]:
        """Those of the path, replaced by those of the operation with the same name and place."""
        found: dict[tuple[object, object], Json] = {}
        for holder in (item, raw):
            listed = holder.get("parameters")
            for one in listed if isinstance(listed, list) else []:
                parameter = self._follow(one)
                found[parameter.get("name"), parameter.get("in")] = parameter
        if len(found) > PARAMETERS_MAX:
            raise OpenApiError(f"an operation has more than {PARAMETERS_MAX} parameters")
        return list(found.values())

    def _plain(self, one: Json, place: str) -> bool:
        """Whether it is sent as a scalar, or in the query as a list of them, as by default."""
        usual = {"path": "simple", "query": "form", "header": "simple"}[place]
        explode = one.get("explode", place == "query")
        kind = self._follow(one.get("schema", {})).get("type")
        kinds = kind if isinstance(kind, list) else [kind]
        lists = "array" in kinds
        if "content" in one or one.get("style", usual) != usual or "object" in kinds:
            return False
        return not lists or (place == "query" and explode is True)

    def _body(
        self, told: str, raw: Json, properties: dict[str, object], required: list[str]
    ) -> bool:
        if not raw.get("requestBody"):
            return False
        body = self._follow(raw["requestBody"])
        content = body.get("content")
        for media_type, form in (content if isinstance(content, Mapping) else {}).items():
            if str(media_type).partition(";")[0].strip() == "application/json":
                schema = form.get("schema", {}) if isinstance(form, Mapping) else {}
                properties[BODY] = _described(self._schema(schema, 0), body.get("description"))
                if body.get("required"):
                    required.append(BODY)
                return True
        if body.get("required"):
            raise OpenApiError(f"{_name(told)}: its body is not JSON")
        return False

    def _follow(self, node: object) -> Json:
        """The object that a reference means; itself where it is none."""
        for _ in range(DEPTH_MAX):
            if not isinstance(node, Mapping):
                raise OpenApiError("an object is needed where there is none")
            reference = node.get("$ref")
            if reference is None:
                return node
            node = self._at(reference)
        raise OpenApiError("references go round in circles")

    def _at(self, reference: object) -> object:
        self._references += 1
        if self._references > REFERENCES_MAX:
            raise OpenApiError(f"an operation follows more than {REFERENCES_MAX} references")
        if not isinstance(reference, str) or not reference.startswith("#/"):
            raise OpenApiError("a reference leaves the document")
        node: object = self._document
        for part in reference[2:].split("/"):
            key = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(node, Mapping) or key not in node:
                raise OpenApiError("a reference leads nowhere")
            node = node[key]
        return node

    def _schema(self, node: object, depth: int) -> object:
        """A schema with its references in ``$defs`` and as JSON Schema."""
        if depth > DEPTH_MAX:
            raise OpenApiError(f"a schema is more than {DEPTH_MAX} deep")
        if isinstance(node, list):
            return [self._schema(one, depth + 1) for one in node]
        if not isinstance(node, Mapping):
            return node
        if "$ref" in node:
            return {"$ref": self._moved(str(node["$ref"]))}
        made: dict[str, object] = {}
        for key, value in node.items():
            if key in ("properties", "$defs", "definitions", "dependentSchemas"):
                named = value if isinstance(value, Mapping) else {}
                made[key] = {str(k): self._schema(v, depth + 1) for k, v in named.items()}
            elif key in ("enum", "const", "default", "required", "type"):
                made[key] = value
            elif key not in _DROPPED and not str(key).startswith("x-"):
                made[str(key)] = self._schema(value, depth + 1)
        return _of_30(made, node) if self._old else made

    def _moved(self, reference: str) -> str:
        name = self._names.get(reference)
        if name is None:
            stem = _name(reference.rpartition("/")[2]) or "schema"
            name = stem if stem not in self._defs else f"{stem}_{len(self._defs)}"
            self._names[reference] = name
            self._defs[name] = {}  # taken
            self._waiting.append((name, reference))
        return f"#/$defs/{name}"


def _of_30(made: dict[str, object], node: Json) -> dict[str, object]:
    for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if isinstance(made.get(exclusive), bool) and made.pop(exclusive) and bound in made:
            made[exclusive] = made.pop(bound)
    if node.get("nullable") is True and isinstance(made.get("type"), str):
        made["type"] = [made["type"], "null"]
        listed = made.get("enum")
        if isinstance(listed, list) and None not in listed:
            made["enum"] = [*listed, None]
    return made


def _described(schema: object, description: object) -> object:
    if not description or not isinstance(schema, Mapping) or "$ref" in schema:
        return schema
    return {"description": str(description)[:DESCRIPTION_CHARS_MAX], **schema}
