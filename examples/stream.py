"""A streamed answer with the Python stub: ``.venv/bin/python examples/stream.py [question]``."""

import json
import os
import sys
from pathlib import Path

import grpc

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
question = sys.argv[1] if len(sys.argv) > 1 else "What is the capital of France?"

request = generate_pb2.GenerateRequest(prompt=question)
request.sampling.max_tokens = 64
request.sampling.temperature = 0.0

with grpc.insecure_channel(address) as channel:
    stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
    try:
        # The deadline travels with the call: past it nothing is computed any more.
        stream = stub.Generate(request, metadata=(("authorization", f"Bearer {key}"),), timeout=60)
        for message in stream:
            if message.HasField("delta"):
                print(message.delta.text, end="", flush=True)
            elif message.HasField("finished"):
                usage = message.finished.usage
                label = " (SIMULATED)" if message.finished.simulated else ""
                print(f"\n[{usage.completion_tokens} tokens on {message.finished.instance}{label}]")
    except grpc.RpcError as error:
        sys.exit(f"{address}: {error.code().name}: {error.details()}")
