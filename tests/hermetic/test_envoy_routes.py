"""What the edge lets through, and what it makes of who asks.

With the real Envoy before a scripted scheduler.
"""

from __future__ import annotations

import base64
import json
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from sluice.scheduler.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    generate_pb2,
    scheduler_pb2_grpc,
)
from tests.certificates import self_signed
from tests.hermetic.edge_harness import (
    Edge,
    edge,
    edge_with_stub,
    free_port,
    script,
    stub,
    wait_until,
)
from tests.hermetic.raw_h2 import GENERATE_TEXT, RawH2, generate_body, grpc_frame

GRPCURL = Path(sys.executable).with_name("grpcurl")
HIDDEN = (
    "/sluice.scheduler.v1.SchedulerMeshService/GenerateStep",
    "/sluice.execution.v1.ExecutionService/Execute",
    "/sluice.execution.v1.ExecutionService/ExecuteFrames",
    "/sluice.inference.v1.InferenceService/Generate",
    "/sluice.inference.v1.InferenceService/WatchLoad",
    "/sluice.state.v1.StateService/Get",
    "/grpc.health.v1.Health/Watch",
    "/grpc.reflection.v1alpha.Other/Call",
    "/sluice.scheduler.v1.SchedulerServiceX/Generate",
    "/SLUICE.scheduler.v1.SchedulerService/Generate",
    "/test.Control/Call",
    "/",
    "/stats",
    "/ready",
    "/v1",
    "/v1/generate/more",
    "/chat/",
    "//chat",
    "/v1//generate",
    "/v1/../stats",
    "/sluice.scheduler.v1.SchedulerService/../../test.Control/Call",
    "/v1/generate/..;/stats",
)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Edge]:
    with edge_with_stub(tmp_path_factory.mktemp("edge")) as running:
        yield running


@pytest.fixture
def channel(shared: Edge) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(shared.target) as opened:
        yield opened


def echo_json(running: Edge, headers: Any = (), **values: Any) -> dict[str, Any]:
    """What the scheduler saw of a JSON request."""
    answer = httpx.post(f"{running.url}/chat", json={"prompt": "x"}, headers=headers, **values)
    assert answer.status_code == 200, answer.text
    return {**json.loads(answer.json()["text"]), "answer": answer}


def echo_grpc(channel: grpc.Channel, metadata: Any = (), timeout: float | None = None) -> Any:
    """What the scheduler saw of a gRPC request."""
    call = scheduler_pb2_grpc.SchedulerServiceStub(channel).GenerateText
    request = generate_pb2.GenerateTextRequest(prompt="x")
    return json.loads(call(request, metadata=metadata, timeout=timeout).text)


def names(seen: dict[str, Any]) -> set[str]:
    return {name for name, _ in seen["metadata"]}


@pytest.mark.parametrize("path", HIDDEN)
def test_a_path_that_is_not_public_is_not_found_and_reaches_nobody(shared: Edge, path: str) -> None:
    before = shared.stubs[0].control()["unexpected"]
    for method in ("GET", "POST", "DELETE"):
        raw = httpx.URL(shared.url).copy_with(raw_path=path.encode())
        answer = httpx.request(method, raw)
        assert answer.status_code == 404
        assert answer.json()["code"] == 5
        assert answer.json()["details"][0]["reason"] == "NO_ROUTE"
    with RawH2(shared.settings.port) as client:
        outcome = client.outcome(client.request(path, generate_body("x")))
    assert outcome["grpc-status"] == "12"
    assert shared.stubs[0].control()["unexpected"] == before


def test_an_escaped_slash_is_refused(shared: Edge) -> None:
    url = httpx.URL(shared.url).copy_with(raw_path=b"/chat%2F..%2Fstats")
    assert httpx.post(url).status_code == 400


def test_a_public_method_as_plain_http_is_not_found(shared: Edge) -> None:
    assert httpx.post(f"{shared.url}{GENERATE_TEXT}", json={"prompt": "x"}).status_code == 404


def test_an_unknown_method_of_a_public_service_is_unimplemented(channel: grpc.Channel) -> None:
    call: Any = channel.unary_unary("/sluice.scheduler.v1.SchedulerService/Nothing")
    with pytest.raises(grpc.RpcError) as caught:
        call(b"")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_grpc_in_clear_text_and_http_1_share_the_port(shared: Edge, channel: grpc.Channel) -> None:
    assert echo_grpc(channel)["server"] == "a"
    assert httpx.get(f"{shared.url}/v1/models").http_version == "HTTP/1.1"
    with httpx.Client(http1=False, http2=True) as client:
        answer = client.get(f"{shared.url}/v1/models")
    assert (answer.status_code, answer.http_version) == (200, "HTTP/2")


def test_health_of_public_services_can_be_asked(channel: grpc.Channel) -> None:
    call: Any = channel.unary_unary(
        "/grpc.health.v1.Health/Check",
        health_pb2.HealthCheckRequest.SerializeToString,
        health_pb2.HealthCheckResponse.FromString,
    )
    request = health_pb2.HealthCheckRequest(service="sluice.scheduler.v1.SchedulerService")
    assert call(request).status == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(grpc.RpcError) as caught:
        call(health_pb2.HealthCheckRequest(service="sluice.execution.v1.ExecutionService"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
def test_both_versions_of_reflection_list_public_services(
    channel: grpc.Channel, version: str
) -> None:
    call: Any = channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        reflection_pb2.ServerReflectionRequest.SerializeToString,
        reflection_pb2.ServerReflectionResponse.FromString,
    )
    answers = call(iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=5)
    found = {each.name for answer in answers for each in answer.list_services_response.service}
    assert "sluice.scheduler.v1.SchedulerService" in found
    assert not [name for name in found if "execution" in name or "inference" in name]


def test_the_smallest_grpcurl_call_works(shared: Edge) -> None:
    command = [str(GRPCURL), "-plaintext", "-H", "authorization: Bearer k"]
    prompt = json.dumps({"prompt": script("stream", count=3)})
    method = "sluice.scheduler.v1.SchedulerService/Generate"
    done = subprocess.run(
        [*command, "-d", prompt, shared.target, method], capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count('"sequence"') == 3
    listed = subprocess.run(
        [*command, shared.target, "list"], capture_output=True, text=True, timeout=30
    )
    assert "sluice.scheduler.v1.SchedulerService" in listed.stdout.split()


@pytest.mark.parametrize("text", [False, True])
def test_grpc_web_streams_with_its_trailers_in_the_body(shared: Edge, text: bool) -> None:
    body = generate_body(script("stream", count=2))
    kind = "application/grpc-web-text" if text else "application/grpc-web+proto"
    answer = httpx.post(
        f"{shared.url}/sluice.scheduler.v1.SchedulerService/Generate",
        content=base64.b64encode(body) if text else body,
        headers={"content-type": kind, "x-grpc-web": "1", "accept": kind},
    )
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith(kind.removesuffix("+proto"))
    payload = answer.content
    if text:
        # Each chunk is padded on its own.
        chunks = [payload[at : at + 4] for at in range(0, len(payload), 4)]
        payload = b"".join(map(base64.b64decode, chunks))
    message = generate_pb2.GenerateResponse(
        sequence=1, delta=generate_pb2.GenerateDelta(text="x" * 8)
    )
    assert payload.startswith(grpc_frame(message.SerializeToString()))
    assert b"grpc-status:0" in payload
    assert payload.count(b"xxxxxxxx") == 2


def test_what_a_client_says_about_itself_is_stripped(shared: Edge, channel: grpc.Channel) -> None:
    forged = {
        "x-envoy-retry-on": "5xx",
        "x-envoy-upstream-rq-timeout-ms": "1",
        "x-envoy-anything": "1",
        "x-envoy-original-path": "/forged",
        "x-tenant-id": "other",
        "x-tenant": "other",
        "x-sluice-tenant": "other",
        "x-forwarded-for": "6.6.6.6",
        "x-forwarded-host": "forged",
        "x-forwarded-proto": "forged",
        "forwarded": "for=6.6.6.6",
        "x-real-ip": "6.6.6.6",
    }
    kept = {"authorization": "Bearer k", "x-app": "mine"}
    for seen in (
        echo_json(shared, {**forged, **kept}),
        echo_grpc(channel, tuple({**forged, **kept}.items())),
    ):
        values = " ".join(value for _, value in seen["metadata"])
        assert not [word for word in ("forged", "6.6.6.6", "other", "5xx") if word in values]
        assert names(seen) & set(forged) <= {
            "x-forwarded-for",
            "x-forwarded-proto",
            "x-envoy-original-path",
        }
        assert dict(seen["metadata"])["authorization"] == "Bearer k"
        assert dict(seen["metadata"])["x-app"] == "mine"


@pytest.mark.parametrize("good", ["r1", "~!" * 64])
def test_a_sane_request_id_is_kept(shared: Edge, good: str) -> None:
    seen = echo_json(shared, {"x-request-id": good})
    assert dict(seen["metadata"])["x-request-id"] == good
    assert seen["answer"].headers["x-request-id"] == good


@pytest.mark.parametrize("bad", [None, "", "a b", "x" * 129, "é"])
def test_another_request_id_is_replaced(shared: Edge, bad: str | None) -> None:
    headers = {} if bad is None else {"x-request-id": bad.encode("latin-1")}
    seen = echo_json(shared, headers)
    assigned = dict(seen["metadata"])["x-request-id"]
    assert assigned != bad
    assert len(assigned) == 36
    assert seen["answer"].headers["x-request-id"] == assigned


@pytest.mark.parametrize(
    ("sent", "least_s", "most_s"),
    [
        ("5S", 4, 5),
        ("1H", 3_590, 3_600),
        ("2H", 3_590, 3_600),
        ("3601S", 3_590, 3_600),
        ("99999999M", 3_590, 3_600),
        ("99999999n", 0, 0.11),
        ("3600000m", 3_590, 3_600),
        ("5000000m", 3_590, 3_600),
    ],
)
def test_a_deadline_is_capped(shared: Edge, sent: str, least_s: float, most_s: float) -> None:
    with RawH2(shared.settings.port) as client:
        stream = client.request(GENERATE_TEXT, generate_body("x"), [("grpc-timeout", sent)])
        outcome = client.outcome(stream)
    assert outcome["grpc-status"] == "0", outcome
    answer = generate_pb2.GenerateTextResponse.FromString(outcome["data"][5:])
    assert least_s <= json.loads(answer.text)["remaining"] <= most_s


def test_a_request_without_deadline_stays_without(shared: Edge, channel: grpc.Channel) -> None:
    assert echo_json(shared)["remaining"] is None
    assert echo_grpc(channel)["remaining"] is None


def list_tenants(target: str) -> Any:
    with grpc.insecure_channel(target) as channel:
        call = admin_pb2_grpc.SchedulerAdminServiceStub(channel).ListTenants
        return call(admin_pb2.ListTenantsRequest(), timeout=5)


def test_the_admin_api_is_reachable_in_clear_text_unless_switched_off(
    shared: Edge, tmp_path: Path
) -> None:
    assert list_tenants(shared.target).tenants[0].name == "dev"
    with (
        edge(tmp_path, shared.stubs, admin_api="off") as closed,
        pytest.raises(grpc.RpcError) as caught,
    ):
        list_tenants(closed.target)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_the_tls_listener_serves_grpc_and_http_without_the_admin_api(tmp_path: Path) -> None:
    chain, private = self_signed(tmp_path)
    with stub() as one:
        tls: dict[str, Any] = {"tls_certificate": str(chain), "tls_private_key": str(private)}
        with edge(tmp_path, [one], tls_host="127.0.0.1", tls_port=free_port(), **tls) as running:
            target = f"127.0.0.1:{running.settings.tls_port}"
            context = ssl.create_default_context(cafile=str(chain))
            with httpx.Client(verify=context, http2=True) as client:
                answer = client.post(f"https://{target}/chat", json={"prompt": "x"})
            assert (answer.status_code, answer.http_version) == (200, "HTTP/2")
            credentials = grpc.ssl_channel_credentials(chain.read_bytes())
            with grpc.secure_channel(target, credentials) as channel:
                assert echo_grpc(channel)["server"] == "a"
                with pytest.raises(grpc.RpcError) as caught:
                    admin_pb2_grpc.SchedulerAdminServiceStub(channel).ListTenants(
                        admin_pb2.ListTenantsRequest(), timeout=5
                    )
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
            with pytest.raises(httpx.TransportError):
                httpx.post(f"http://{target}/chat", json={"prompt": "x"})


def test_pages_of_listed_origins_may_call_and_others_may_not(shared: Edge, tmp_path: Path) -> None:
    preflight = {
        "origin": "https://app.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,x-grpc-web,content-type",
    }
    with edge(tmp_path, shared.stubs, cors_origins=("https://app.example",)) as running:
        path = f"{running.url}/sluice.scheduler.v1.SchedulerService/Generate"
        allowed = httpx.options(path, headers=preflight)
        refused = httpx.options(path, headers={**preflight, "origin": "https://evil.example"})
    assert allowed.headers["access-control-allow-origin"] == "https://app.example"
    assert "access-control-allow-origin" not in refused.headers
    closed = httpx.options(f"{shared.url}/chat", headers=preflight)
    assert "access-control-allow-origin" not in closed.headers


def test_the_access_log_has_neither_query_nor_key_and_bounds_the_path(shared: Edge) -> None:
    marks = {"x-request-id": "log-test-1", "authorization": "Bearer secret-key"}
    httpx.get(f"{shared.url}/{'p' * 500}?token=secret-token", headers=marks)
    httpx.post(f"{shared.url}/chat?token=secret-token", json={"prompt": "secret-p"}, headers=marks)
    httpx.post(f"{shared.url}/chat", json={"prompt": "secret-prompt"}, headers=marks)

    def lines() -> list[dict[str, Any]]:
        found = [line for line in shared.access_log() if line.get("request_id") == "log-test-1"]
        return found if len(found) == 3 else []

    logged = wait_until(lines, what="three lines")
    assert "secret" not in json.dumps(logged)
    assert [line["status"] for line in logged] == [404, 400, 200]
    assert len(logged[0]["path"]) == 128
    assert (logged[2]["path"], logged[2]["route"]) == ("/chat", "POST /chat")
