"""What a declaration of a tool must be, as ``protos/sluice/agent/v1/tools.proto`` says.

The one source for the agent service, which reads declarations from the configuration and of
tenants, and for the scheduler, which takes those of tenants from operators. A declaration that
was registered reaches no file, no program and no private address: those belong to the machine,
and only its configuration may offer them. Pure functions over the proto.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

from google.protobuf.duration_pb2 import Duration

from sluice.agent.v1 import tools_pb2
from sluice.egress_rules import EgressRules, PrivateRule, parse_host, parse_private
from sluice.errors import SluiceError, invalid
from sluice.json_schemas import check_schema

NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
JOINT: Final = "__"  # between a declaration's name and that of one of its tools
DESCRIPTION_BYTES_MAX: Final = 4096
TIMEOUT_S: Final = 30.0
TIMEOUT_S_MAX: Final = 3600.0
OUTPUT_BYTES: Final = 1 << 20
OUTPUT_BYTES_MAX: Final = 4 << 20  # a result is kept as one blob
PREVIEW_BYTES: Final = 8 << 10
PREVIEW_BYTES_MAX: Final = 256 << 10  # of one event of a run
EGRESS_MAX: Final = 64  # entries of each list
HEADERS_MAX: Final = 16
DOCUMENT_BYTES_MAX: Final = 1 << 20
PARAMETERS_BYTES_MAX: Final = 16 << 10
URL_CHARS_MAX: Final = 2048
NAMES_MAX: Final = 256  # operations or tools that are offered
COMMAND_MAX: Final = 64  # words
ROWS: Final = 200
ROWS_MAX: Final = 10_000
TOP_K: Final = 3
TOP_K_MAX: Final = 20
METHODS: Final = ("GET", "POST", "PUT", "PATCH", "DELETE")
SECRET_VARIABLE: Final = re.compile(r"TOOL_SECRET_[A-Z0-9_]{1,100}")
COLLECTION: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_HEADER: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,64}")
# Headers that decide where a message ends or who it is for: the transport's own.
HEADERS_OF_TRANSPORT: Final = frozenset(
    [
        "host",
        "content-length",
        "transfer-encoding",
        "connection",
        "keep-alive",
        "upgrade",
        "te",
        "trailer",
        "expect",
        "proxy-authorization",
        "proxy-connection",
        "accept-encoding",
    ]
)
PLACEHOLDER: Final = re.compile(r"\{([A-Za-z0-9_-]{1,64})\}")
_PRIVATE: Final = (
    "names a private address: only tools of sluice.toml may reach private addresses, by"
    " egress.private_allowed; registered ones what mesh.registered_private_allowed names"
)

Declaration = tools_pb2.ToolDeclaration


def check(
    tool: Declaration,
    where: str = "tool",
    *,
    configured: bool,
    private: Sequence[PrivateRule] = (),
) -> None:
    """Raises INVALID_ARGUMENT that names the field below ``where``. ``configured``: whether it
    stands in the configuration and so may use what belongs to the machine. ``private``: what the
    operator lets registered ones reach (``mesh.registered_private_allowed``)."""
    if not NAME.fullmatch(tool.name) or JOINT in tool.name:
        raise invalid(f"{where}.name", f"must be [a-zA-Z0-9_-], 1 to 64 characters, no {JOINT}")
    if not 1 <= len(tool.description.encode()) <= DESCRIPTION_BYTES_MAX:
        raise invalid(f"{where}.description", f"must be 1 to {DESCRIPTION_BYTES_MAX} bytes")
    if tool.effect not in tools_pb2.ToolEffect.values():
        raise invalid(f"{where}.effect", "must be read, idempotent or once")
    _check_limits(tool, where)
    kind = tool.WhichOneof("kind")
    if kind is None:
        raise invalid(where, "must say what it is: " + ", ".join(_KINDS))
    rules = egress_rules(tool.egress, f"{where}.egress", () if configured else private)
    if tool.egress.private_allowed and not configured:
        raise only_configured(f"{where}.egress.private_allowed")
    _KINDS[kind](tool, f"{where}.{kind}", rules, configured)


def only_configured(field: str) -> SluiceError:
    """A field that a registered declaration may not set."""
    return invalid(field, "is only for tools of the configuration", "TOOL_FIELD_NOT_ALLOWED")


def timeout_s(tool: Declaration) -> float:
    """Longest call."""
    return _seconds(tool.timeout) if tool.HasField("timeout") else TIMEOUT_S


def output_bytes_max(tool: Declaration) -> int:
    """Most bytes of a result."""
    return tool.output_bytes_max or OUTPUT_BYTES


def preview_bytes(tool: Declaration) -> int:
    """Bytes of a result that the model sees."""
    return min(tool.preview_bytes or PREVIEW_BYTES, output_bytes_max(tool))


def egress_rules(
    egress: tools_pb2.Egress, where: str = "egress", private: Sequence[PrivateRule] = ()
) -> EgressRules:
    """Where its connections may go; ``private``: what it may reach besides, as the operator says of
    registered tools. Raises INVALID_ARGUMENT."""
    parts: dict[str, tuple[Any, ...]] = {}
    for field, parse in (("hosts", parse_host), ("private_allowed", parse_private)):
        texts = getattr(egress, field)
        if len(texts) > EGRESS_MAX:
            raise invalid(f"{where}.{field}", f"must hold at most {EGRESS_MAX} entries")
        parts[field] = tuple(
            _parsed(text, f"{where}.{field}[{i}]", parse) for i, text in enumerate(texts)
        )
    return EgressRules(parts["hosts"], (*parts["private_allowed"], *private))


def _parsed(text: str, field: str, parse: Callable[[str], object]) -> object:
    try:
        return parse(text)
    except ValueError as error:  # its text is fixed and holds nothing of the entry
        raise invalid(field, str(error)) from None


def _check_limits(tool: Declaration, where: str) -> None:
    if tool.output_bytes_max and tool.preview_bytes > tool.output_bytes_max:
        raise invalid(f"{where}.preview_bytes", "must not be more than output_bytes_max")
    if tool.HasField("timeout") and not 0.0 < _seconds(tool.timeout) <= TIMEOUT_S_MAX:
        raise invalid(f"{where}.timeout", f"must be above 0 and at most {TIMEOUT_S_MAX:g} s")
    for field, most in (
        ("output_bytes_max", OUTPUT_BYTES_MAX),
        ("preview_bytes", PREVIEW_BYTES_MAX),
    ):
        if getattr(tool, field) > most:
            raise invalid(f"{where}.{field}", f"must be at most {most}")


def _seconds(duration: Duration) -> float:
    return duration.seconds + duration.nanos / 1e9


def check_url(url: str, where: str, rules: EgressRules, *, template: bool = False) -> None:
    """An absolute http(s) URL whose host is allowed; with ``template``, {name} may stand in its
    path and query. Raises INVALID_ARGUMENT."""
    if not 1 <= len(url) <= URL_CHARS_MAX or not url.isascii() or not url.isprintable():
        raise invalid(where, f"must be 1 to {URL_CHARS_MAX} printable ASCII characters")
    if " " in url or "\\" in url:
        raise invalid(where, "must hold no space and no backslash")
    try:
        parts = urlsplit(url)
        port = parts.port
        host = parts.hostname or ""
    except ValueError:
        raise invalid(where, "is not a URL") from None
    if parts.scheme not in ("http", "https"):
        raise invalid(where, "must begin with http:// or https://")
    if parts.fragment or "@" in parts.netloc:
        raise invalid(where, "must have no user, password or fragment")
    if "{" in parts.netloc or (not template and "{" in url):
        raise invalid(where, "may hold {name} only in its path and query")
    if not rules.allows(parts.scheme, host, port):
        raise invalid(where, "names a host or port that egress.hosts does not allow")
    if not rules.may_reach(parts.scheme, host, port):
        raise invalid(where, _PRIVATE)


def _check_headers(headers: Mapping[str, str], field: str) -> None:
    if len(headers) > HEADERS_MAX:
        raise invalid(field, f"must hold at most {HEADERS_MAX} headers")
    for name, variable in headers.items():
        check_header(name, field)
        if not SECRET_VARIABLE.fullmatch(variable):
            raise invalid(field, "must name environment variables TOOL_SECRET_[A-Z0-9_]+")


def check_header(name: str, field: str) -> None:
    """A header that a tool may set. Raises INVALID_ARGUMENT."""
    if not _HEADER.fullmatch(name) or name.lower() in HEADERS_OF_TRANSPORT:
        raise invalid(field, "must hold names of headers, none of the transport's own")


def parameters_of(text: str, field: str) -> dict[str, Any]:
    """The JSON schema of a tool's arguments: an object. Empty text: no arguments. Raises
    INVALID_ARGUMENT."""
    if not text:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if len(text.encode()) > PARAMETERS_BYTES_MAX:
        raise invalid(field, f"must be at most {PARAMETERS_BYTES_MAX} bytes")
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError):
        raise invalid(field, "is not JSON") from None
    if not isinstance(schema, dict) or schema.get("type") != "object":
        raise invalid(field, 'must be a JSON schema of "type": "object"')
    if problem := check_schema(schema):
        raise invalid(field, problem)
    return schema


def _check_http(tool: Declaration, where: str, rules: EgressRules, _: bool) -> None:
    http = tool.http
    if http.method not in METHODS:
        raise invalid(f"{where}.method", "must be one of " + ", ".join(METHODS))
    check_url(http.url, f"{where}.url", rules, template=True)
    schema = parameters_of(http.parameters_json, f"{where}.parameters_json")
    properties = schema.get("properties", {})
    for name in PLACEHOLDER.findall(http.url):
        if name not in properties or name not in schema.get("required", ()):
            raise invalid(f"{where}.url", "names an argument that the schema does not require")
    if re.search(r"[{}]", PLACEHOLDER.sub("", http.url)):
        raise invalid(f"{where}.url", "holds a brace that is not around a name")
    _check_headers(http.secret_headers, f"{where}.secret_headers")
    if http.idempotency_header:
        check_header(http.idempotency_header, f"{where}.idempotency_header")


def _check_openapi(tool: Declaration, where: str, rules: EgressRules, _: bool) -> None:
    openapi = tool.openapi
    if not openapi.document or len(openapi.document.encode()) > DOCUMENT_BYTES_MAX:
        raise invalid(f"{where}.document", f"must be 1 to {DOCUMENT_BYTES_MAX} bytes")
    _check_names(openapi.operations, f"{where}.operations")
    if openapi.base_url:
        check_url(openapi.base_url, f"{where}.base_url", rules)
    _check_headers(openapi.secret_headers, f"{where}.secret_headers")
    if openapi.idempotency_header:
        check_header(openapi.idempotency_header, f"{where}.idempotency_header")


def _check_sql(tool: Declaration, where: str, _: EgressRules, configured: bool) -> None:
    if not configured:
        raise only_configured(f"{where}.url")
    if not re.fullmatch(r"sqlite:///[^?#]+", tool.sql.url):
        raise invalid(f"{where}.url", "must be sqlite:///PATH")
    if tool.sql.rows_max > ROWS_MAX:
        raise invalid(f"{where}.rows_max", f"must be at most {ROWS_MAX}")


def _check_mcp(tool: Declaration, where: str, rules: EgressRules, configured: bool) -> None:
    mcp = tool.mcp
    if bool(mcp.url) == bool(mcp.command):
        raise invalid(f"{where}.url", "exactly one of url and command is needed")
    if mcp.command and not configured:
        raise only_configured(f"{where}.command")
    if mcp.url:
        check_url(mcp.url, f"{where}.url", rules)
    if len(mcp.command) > COMMAND_MAX or "" in mcp.command[:1]:
        raise invalid(f"{where}.command", f"must be a program and at most {COMMAND_MAX - 1} words")
    _check_headers(mcp.secret_headers, f"{where}.secret_headers")
    _check_names(mcp.tools, f"{where}.tools")


def _check_names(names: Any, field: str) -> None:
    if len(names) > NAMES_MAX or not all(1 <= len(name) <= 256 for name in names):
        raise invalid(field, f"must hold at most {NAMES_MAX} names of 1 to 256 characters")


def _check_retrieval(tool: Declaration, where: str, _: EgressRules, __: bool) -> None:
    if not COLLECTION.fullmatch(tool.retrieval.collection):
        raise invalid(f"{where}.collection", "must be [A-Za-z0-9_-], 1 to 64 characters")
    if tool.retrieval.top_k > TOP_K_MAX:
        raise invalid(f"{where}.top_k", f"must be at most {TOP_K_MAX}")


def _check_nothing(_: Declaration, __: str, ___: EgressRules, ____: bool) -> None:
    """A kind without settings."""


_KINDS: Final[Mapping[str, Callable[[Declaration, str, EgressRules, bool], None]]] = {
    "http": _check_http,
    "openapi": _check_openapi,
    "sql": _check_sql,
    "mcp": _check_mcp,
    "retrieval": _check_retrieval,
    "calculator": _check_nothing,
    "clock": _check_nothing,
}
