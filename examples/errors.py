"""Reading a refusal: its code, reason, field and retry delay."""

import json
import os
from pathlib import Path

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from sluice.scheduler.v1 import generate_pb2, scheduler_pb2_grpc

# The address of the mesh that `make up` started here; SLUICE_ENDPOINT names another.
record = Path(".sluice/run/envoy.json")
running = json.loads(record.read_text())["ports"]["http"] if record.exists() else "localhost:8080"
address = os.environ.get("SLUICE_ENDPOINT") or running
key = Path(os.environ.get("SLUICE_KEY_FILE", ".sluice/api-key")).read_text().strip()

request = generate_pb2.GenerateTextRequest(prompt="Hello")
request.sampling.temperature = 9.0  # out of range

with grpc.insecure_channel(address) as channel:
    stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
    try:
        stub.GenerateText(request, metadata=(("authorization", f"Bearer {key}"),), timeout=60)
    except grpc.RpcError as error:
        print(f"code: {error.code().name}")
        status = rpc_status.from_call(error)  # type: ignore[arg-type]  # a failed call is both
        for detail in status.details if status is not None else ():
            info = error_details_pb2.ErrorInfo()
            fields = error_details_pb2.BadRequest()
            retry = error_details_pb2.RetryInfo()
            if detail.Unpack(info):
                print(f"reason: {info.reason}")
            elif detail.Unpack(fields):
                for violation in fields.field_violations:
                    print(f"field: {violation.field}: {violation.description}")
            elif detail.Unpack(retry):
                print(f"retry after: {retry.retry_delay.ToSeconds()} s")
