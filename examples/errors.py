"""Reading a refusal: its code, reason, field and retry delay."""

import json
import os
import sys
from pathlib import Path

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from sluice.command.cli_support import run_paths
from sluice.command.first_files import api_key_path
from sluice.scheduler.v1 import generate_pb2, scheduler_pb2_grpc

# Address and key of the mesh that `sluice` means here; SLUICE_ENDPOINT and SLUICE_KEY_FILE name
# others.
paths = run_paths(None)
record = paths.record("envoy")
running = json.loads(record.read_text())["ports"]["http"] if record.exists() else "localhost:8080"
address = os.environ.get("SLUICE_ENDPOINT") or running
key_file = Path(os.environ.get("SLUICE_KEY_FILE") or api_key_path(paths.runtime))
try:
    key = key_file.read_text().strip()
except OSError as error:
    sys.exit(f"{key_file}: {error.strerror}: `make up` makes it, SLUICE_KEY_FILE names another")

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
