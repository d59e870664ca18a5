"""A scheduler for tests of the edge only: a real gRPC server whose answers the prompt scripts.

Run as a process: ``python -m tests.hermetic.edge_stub --port 0 --name a`` prints its port and
serves until it is told to end. A prompt is a JSON object with ``op``:

* ``echo``: answers with what arrived (metadata, remaining time, prompt bytes) as JSON text;
* ``fail``: ends with ``code`` and details, and a ``retry-after`` trailer if ``retry_after`` is
  given; with ``initial`` response headers leave before;
* ``refuse``: ends with ``code`` and ``reason`` as the services refuse;
* ``stream``: ``count`` deltas of ``bytes`` each, ``pause_ms`` between them;
* ``hang``: nothing until the caller goes away.

``EmbedRequest.texts`` = ["n"] answers with n floats. Anything that is not a public method is
answered with success and counted, so that a route which should not exist cannot pass for one that
is not there. ``Control`` (a JSON call on the stub's own port) reads counters and sets the health.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
from google.protobuf import any_pb2, duration_pb2, json_format, message_factory
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from grpc_status import rpc_status

from sluice.errors import Code, SluiceError
from sluice.reasons import complete
from sluice.scheduler.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    generate_pb2,
    runs_pb2,
    scheduler_pb2,
    scheduler_pb2_grpc,
)
from sluice.server_limits import ServerLimits, server_options
from sluice.status import abort

CONTROL = "/test.Control/Call"
PUBLIC = ("sluice.scheduler.v1.SchedulerService", "sluice.scheduler.v1.SchedulerAdminService")


def _status(code: grpc.StatusCode, reason: str, retry_after: float) -> status_pb2.Status:
    packed = []
    details: list[Any] = [error_details_pb2.ErrorInfo(reason=reason, domain="sluice")]
    if retry_after:
        delay = duration_pb2.Duration(seconds=int(retry_after))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field="sampling.top_p", description="must be more than 0"
        )
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    for detail in details:
        wrapped = any_pb2.Any()
        wrapped.Pack(detail)
        packed.append(wrapped)
    return status_pb2.Status(code=code.value[0], message=f"refused: {reason}", details=packed)


class Scheduler(scheduler_pb2_grpc.SchedulerServiceServicer):
    """The scripted service."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.seen: dict[str, Any] = {}
        self.counters: dict[str, Any] = {
            "calls": 0,
            "active": 0,
            "cancelled": 0,
            "written": 0,
            "unexpected": 0,
        }

    async def _fail(self, context: Any, script: dict[str, Any]) -> None:
        if script.get("initial"):
            await context.send_initial_metadata((("x-stub", "early"),))
        code = getattr(grpc.StatusCode, script["code"])
        retry_after = script.get("retry_after", 0)
        status = rpc_status.to_status(_status(code, script.get("reason", "SCRIPTED"), retry_after))
        trailers = list(status.trailing_metadata)
        if retry_after:
            trailers.append(("retry-after", str(retry_after)))
        await context.abort(status.code, status.details, trailing_metadata=tuple(trailers))

    async def _refuse(self, context: Any, script: dict[str, Any]) -> None:
        error = SluiceError(
            Code[script["code"]],
            script["reason"],
            "refused",
            retry_after_s=script.get("retry_after_s"),
        )
        await abort(context, complete(error))

    def _echo(self, context: Any, prompt: str) -> str:
        metadata = [(key, str(value)) for key, value in context.invocation_metadata()]
        seen = {"metadata": metadata, "remaining": context.time_remaining(), "server": self.name}
        return json.dumps({**seen, "prompt_bytes": len(prompt)})

    async def _hang(self) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.counters["cancelled"] += 1
            raise

    async def GenerateText(self, request: Any, context: Any) -> generate_pb2.GenerateTextResponse:
        self.counters["calls"] += 1
        script = json.loads(request.prompt) if request.prompt.startswith("{") else {"op": "echo"}
        if script["op"] == "fail":
            await self._fail(context, script)
        if script["op"] == "refuse":
            await self._refuse(context, script)
        if script["op"] == "hang":
            await self._hang()
        if script["op"] == "text":
            text = "x" * int(script["bytes"])
        else:
            text = self._echo(context, request.prompt)
        return generate_pb2.GenerateTextResponse(text=text, instance=self.name)

    async def Generate(
        self, request: Any, context: Any
    ) -> AsyncIterator[generate_pb2.GenerateResponse]:
        self.counters["calls"] += 1
        self.counters["active"] += 1
        script = json.loads(request.prompt)
        try:
            if script["op"] == "fail":
                await self._fail(context, script)
            if script["op"] == "hang":
                await self._hang()
            for sequence in range(1, script.get("count", 0) + 1):
                delta = generate_pb2.GenerateDelta(text="x" * script.get("bytes", 8))
                yield generate_pb2.GenerateResponse(sequence=sequence, delta=delta)
                self.counters["written"] += 1
                if script.get("pause_ms"):
                    await asyncio.sleep(script["pause_ms"] / 1e3)
        finally:
            self.counters["active"] -= 1

    async def Embed(self, request: Any, context: Any) -> generate_pb2.EmbedResponse:
        values = [0.1] * int(request.texts[0])
        return generate_pb2.EmbedResponse(embeddings=[generate_pb2.Embedding(values=values)])

    async def ListModels(self, request: Any, context: Any) -> generate_pb2.ListModelsResponse:
        return generate_pb2.ListModelsResponse(models=[generate_pb2.Model(name="stub")])


def _echo_rest(scheduler: Scheduler) -> None:
    """Gives the scheduler every method that it has not: each keeps what it was asked, as JSON under
    its name, and answers with the message that has nothing set; streams with three events."""
    service = scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"]
    for name, method in service.methods_by_name.items():
        if name in vars(Scheduler):
            continue
        answer = message_factory.GetMessageClass(method.output_type)

        def keep(request: Any, name: str = name) -> None:
            scheduler.seen[name] = json.loads(
                json_format.MessageToJson(request, preserving_proto_field_name=True)
            )
            scheduler.counters["calls"] += 1

        async def unary(request: Any, context: Any, keep: Any = keep, answer: Any = answer) -> Any:
            keep(request)
            return answer()

        async def stream(
            request: Any, context: Any, keep: Any = keep, answer: Any = answer
        ) -> AsyncIterator[Any]:
            keep(request)
            for sequence in range(1, 4):
                yield answer(event=runs_pb2.RunEvent(sequence=sequence))
                scheduler.counters["written"] += 1
                await asyncio.sleep(0.3)

        setattr(scheduler, name, stream if method.server_streaming else unary)


class Admin(admin_pb2_grpc.SchedulerAdminServiceServicer):
    """Answers one call, to show that it was reached."""

    async def ListTenants(self, request: Any, context: Any) -> admin_pb2.ListTenantsResponse:
        return admin_pb2.ListTenantsResponse(tenants=[admin_pb2.Tenant(name="dev")])


class Rest(grpc.GenericRpcHandler):
    """Control, and success for everything that nobody else serves."""

    def __init__(self, scheduler: Scheduler, servicer: health.aio.HealthServicer) -> None:
        self._scheduler = scheduler
        self._health = servicer

    def service(self, handler_call_details: Any) -> Any:
        if handler_call_details.method == CONTROL:
            return grpc.unary_unary_rpc_method_handler(self._control)
        if handler_call_details.method.startswith(tuple(f"/{name}/" for name in PUBLIC)):
            return None
        return grpc.unary_unary_rpc_method_handler(self._unexpected)

    async def _control(self, request: bytes, context: Any) -> bytes:
        command = json.loads(request)
        if "serving" in command:
            kind = health_pb2.HealthCheckResponse
            value = kind.SERVING if command["serving"] else kind.NOT_SERVING
            for name in ("", *PUBLIC):
                await self._health.set(name, value)
        return json.dumps({**self._scheduler.counters, "seen": self._scheduler.seen}).encode()

    async def _unexpected(self, request: bytes, context: Any) -> bytes:
        self._scheduler.counters["unexpected"] += 1
        return b""


async def serve(port: int, name: str, limits: ServerLimits) -> None:
    """Serves on loopback until the process ends."""
    server = grpc.aio.server(options=server_options(limits))
    scheduler = Scheduler(name)  # type: ignore[abstract]  # the rest is added here
    _echo_rest(scheduler)
    admin = Admin()  # type: ignore[abstract]
    servicer = health.aio.HealthServicer()
    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(scheduler, server)
    admin_pb2_grpc.add_SchedulerAdminServiceServicer_to_server(admin, server)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    reflection.enable_server_reflection((*PUBLIC, reflection.SERVICE_NAME), server)
    server.add_generic_rpc_handlers((Rest(scheduler, servicer),))
    for known in ("", *PUBLIC):
        await servicer.set(known, health_pb2.HealthCheckResponse.SERVING)
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    print(bound, flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--name", default="a")
    parser.add_argument("--ping-min-s", type=float, default=ServerLimits().ping_min_s)
    options = parser.parse_args()
    limits = ServerLimits(ping_min_s=options.ping_min_s)
    asyncio.run(serve(options.port, options.name, limits))
