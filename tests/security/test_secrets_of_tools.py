"""Secrets, arguments and results of tools stay where they belong.

Goal: no secret of a tool is in a result, and neither secret nor argument nor result is in a log, a
span, a metric or an error. Method: a canary in each place, every way for a call to end, logs at
debug, telemetry to a real receiver. Oracle: the canaries are nowhere but at the tool's server and
in the result of the call. Deterministic.

Mutants: secrets_not_hidden, secrets_spelt_with_escapes, runner_logs_arguments,
runner_passes_exception_texts, headers_beside_secrets.
"""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_svc.adapters.egress import EgressGuard
from agent_svc.adapters.tools.run_tools import RunTools
from agent_svc.ports import ToolContext, ToolError
from sluice import logs
from sluice.telemetry import Telemetry
from sluice.telemetry_names import SPAN_TOOL
from tests.fakes import FixedRights
from tests.otlp_receiver import otlp_receiver
from tests.security.http_server import Answer, endless, fixed, serving, silent
from tests.security.test_ssrf_of_tools import SECRET, Loopback, box, declaration

ARGUMENT = "canary-argument-4402"
FILE = "canary-file-1177"  # of the operator's configuration: for its log alone
RESULT = "canary-result-9917"
TRACE = f"00-{'c' * 32}-{'d' * 16}-01"
SCHEMA = json.dumps({"type": "object", "properties": {"q": {"type": "string"}}})
ANSWERS: dict[str, Answer] = {
    "/ok": fixed(json.dumps({"a": RESULT}).encode()),
    "/echo": fixed(f"Bearer {SECRET} {SECRET}".encode(), media_type="text/plain"),
    # As some servers spell characters in JSON: hidden in the text is not hidden in what is parsed.
    "/escaped": fixed(b'{"a": ["%s"]}' % "".join(f"\\u{ord(one):04x}" for one in SECRET).encode()),
    "/large": fixed(json.dumps(RESULT * 1000).encode()),
    "/huge": endless(RESULT.encode() * 1000, 1 << 24),
    "/500": fixed(RESULT.encode(), "500 Oops"),
    "/302": fixed(b"", "302 Found", location=f"http://127.0.0.1:1/{RESULT}"),
    "/type": fixed(RESULT.encode(), media_type="image/png"),
    "/silent": silent,
}


async def every_end(telemetry: Telemetry) -> tuple[list[str], list[ToolError], set[str]]:
    """Results, errors and what was told of the trace, of all ways for a call to end."""
    async with serving(ANSWERS) as server:
        place = f"api.example.org:{server.port}"

        def http(name: str, path: str, host: str = place) -> Any:
            return declaration(
                name,
                http={
                    "method": "GET",
                    "url": f"http://{host}{path}",
                    "parametersJson": SCHEMA,
                    "secretHeaders": {"Authorization": "TOOL_SECRET_API"},
                },
                egress={"hosts": [host], "privateAllowed": [f"{place}", "127.0.0.1/32", "::1/128"]},
                timeout="0.5s",
                outputBytesMax=100_000,
                previewBytes=1000,
            )

        tools = [http(path.strip("/"), path) for path in ANSWERS]
        tools += [
            http("closed", "/", "127.0.0.1:1"),
            declaration(
                "inside",
                http={"method": "GET", "url": "http://in.example.org/", "parametersJson": SCHEMA},
                egress={"hosts": ["in.example.org"]},
            ),
            declaration("calc", calculator={}),
            declaration("data", sql={"url": f"sqlite:////nowhere/{FILE}.db"}),
        ]
        results: list[str] = []
        errors: list[ToolError] = []
        async with box(tools, telemetry=telemetry) as tool_box:
            names = [tool.name for tool in tools]
            run = RunTools("t", "run", names, tool_box, FixedRights(names))
            for index, name in enumerate([*names, "nobody"]):
                context = ToolContext("t", "run", f"run:{index}", 5.0, traceparent=TRACE)
                argument = {"calc": "expression", "data": "sql"}.get(name, "q")
                arguments = {argument: ARGUMENT}
                try:
                    result = await run.call(name, json.dumps(arguments), context)
                except ToolError as error:
                    errors.append(error)
                else:
                    results.append(result.content_json)
        assert {asked.headers["authorization"] for asked in server.asked} == {f"Bearer {SECRET}"}
        assert any(ARGUMENT in asked.target for asked in server.asked)
        parents = {asked.headers["traceparent"] for asked in server.asked}
    return results, errors, parents


@pytest.fixture
def written() -> Iterator[io.StringIO]:
    """What this process logs, as every service does, at debug."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    stream = io.StringIO()
    logs.setup("agent", "debug", stream)
    yield stream
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)


async def test_canaries_are_in_no_log_span_metric_or_error(
    written: io.StringIO, capfd: pytest.CaptureFixture[str]
) -> None:
    with otlp_receiver() as receiver:
        telemetry = Telemetry.setup("agent", receiver.endpoint, 1.0, metric_interval_s=0.1)
        results, errors, parents = await every_end(telemetry)
        await telemetry.shutdown()
        spans = [span for span in receiver.spans() if span.name == SPAN_TOOL]
        told = [one for one in (SECRET, ARGUMENT, RESULT) if receiver.contains(one)]
        assert receiver.contains("sluice.tool.calls")
    assert {span.error for span in spans} >= {
        *("", "TOOL_LOST", "TOOL_TIMEOUT", "TOOL_UNAVAILABLE", "TOOL_FAILED", "EGRESS_REFUSED"),
        *("TOOL_OUTPUT_TOO_LARGE", "TOOL_OUTPUT_INVALID", "TOOL_REFUSED"),
    }
    assert {span.trace_id for span in spans} == {"c" * 32}
    assert parents <= {f"00-{span.trace_id}-{span.span_id}-01" for span in spans}
    output = capfd.readouterr()
    assert told == []
    seen = written.getvalue() + output.out + output.err
    seen += "".join(f"{error!r} {error} {error.message} {error.__cause__!r}" for error in errors)
    assert len(errors) >= 9 and len(results) >= 3
    for canary in (SECRET, ARGUMENT, RESULT):
        assert canary not in seen
    assert FILE in seen
    assert not any(FILE in f"{error} {error.message}" for error in errors)
    assert SECRET not in "".join(results) + "".join(error.content_json for error in errors)
    assert any(RESULT in one for one in results)  # it was a test


async def test_no_argument_stands_beside_a_secret_or_a_key_in_a_header(
    tmp_path: Path,
) -> None:
    names = ["x-api-key", "idempotency-key", "user-agent"]
    told = [{"name": one, "in": "header", "schema": {"type": "string"}} for one in names]
    document = {
        "openapi": "3.1.0",
        "info": {"title": "t", "version": "1"},
        "paths": {"/a": {"get": {"operationId": "a", "parameters": told}}},
    }
    file = tmp_path / "api.json"
    file.write_text(json.dumps(document))
    async with serving({"/a": fixed(b"{}")}) as server:
        place = f"api.example.org:{server.port}"
        one = declaration(
            openapi={
                "document": str(file),
                "baseUrl": f"http://{place}",
                "secretHeaders": {"X-Api-Key": "TOOL_SECRET_API"},
                "idempotencyHeader": "Idempotency-Key",
            },
            egress={"hosts": [place], "privateAllowed": [place]},
        )
        async with box([one]) as tools:
            (tool,) = await tools.resolve("t", ["x"])
            properties = tool.info.parameters["properties"]
            assert isinstance(properties, dict)
            arguments = dict.fromkeys(properties, ARGUMENT)
            await tool.call(arguments, ToolContext("t", "run", "run:1", 5.0))
        (asked,) = server.asked
    assert asked.headers["x-api-key"] == f"Bearer {SECRET}"
    assert asked.headers["idempotency-key"] == "run:1"
    assert asked.headers["user-agent"] == ARGUMENT


async def test_refusals_of_the_guard_are_counted_by_rule_without_names() -> None:
    guard = EgressGuard(Loopback())
    one = declaration(
        http={"method": "GET", "url": "http://in.example.org/"},
        egress={"hosts": ["in.example.org"]},
    )
    async with box([one]) as tools:
        (tool,) = await tools.resolve("t", ["x"])
        with pytest.raises(ToolError):
            await tool.call({}, ToolContext("t", "r", "k", 1.0))
        refusals = tools._sources._guard.refusals
    assert {rule.value: count for rule, count in refusals.items()} == {"address": 1}
    guard.close()
