"""A streamed answer with the Python stub: ``.venv/bin/python examples/stream.py [question]``."""

import json
import os
import sys
from pathlib import Path

import grpc

from sluice.scheduler.v1 import generate_pb2, scheduler_pb2_grpc

# The address of the mesh that `make up` started here; SLUICE_ENDPOINT names another.
record = Path(".sluice/run/envoy.json")
running = json.loads(record.read_text())["ports"]["http"] if record.exists() else "localhost:8080"
address = os.environ.get("SLUICE_ENDPOINT") or running
key = Path(os.environ.get("SLUICE_KEY_FILE", ".sluice/api-key")).read_text().strip()
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
        sys.exit(f"{error.code().name}: {error.details()}")
