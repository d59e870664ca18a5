"""A support agent over a folder of documents: ``.venv/bin/python
examples/support_agent/support_agent.py [question]``.

Stores the folder beside this file in the collection that the tool ``handbook`` of sluice.toml
searches, waits until it can be found, and starts a run that looks things up before it answers.
"""

import json
import os
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import grpc

from sluice.command.cli_support import run_paths
from sluice.command.first_files import api_key_path
from sluice.scheduler.v1 import data_pb2, runs_pb2, scheduler_pb2_grpc

FOLDER = Path(__file__).with_name("handbook")
KINDS = {".md": "text/markdown", ".html": "text/html", ".txt": "text/plain"}
LIMIT_S = 600

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
identity = (("authorization", f"Bearer {key}"),)
question = sys.argv[1] if len(sys.argv) > 1 else "Within how many days may an item be returned?"


def store(stub: scheduler_pb2_grpc.SchedulerServiceStub, path: Path) -> None:
    """Stores a document, or replaces it; a durable run cuts, embeds and indexes it."""
    request = data_pb2.PutDocumentRequest(
        collection="handbook",
        document_id=path.name,
        content=path.read_bytes(),
        media_type=KINDS[path.suffix],
        request_id=str(uuid.uuid4()),
    )
    run_id = stub.PutDocument(request, metadata=identity, timeout=30).run_id
    watch = runs_pb2.WatchRunRequest(run_id=run_id)
    for message in stub.WatchRun(watch, metadata=identity, timeout=LIMIT_S):
        if message.event.HasField("ended"):
            state = runs_pb2.RunState.Name(message.event.ended.state)
            print(f"{path.name}: {state.removeprefix('RUN_STATE_').lower()}")


def ask(stub: scheduler_pb2_grpc.SchedulerServiceStub) -> Iterator[runs_pb2.RunEvent]:
    """Starts a run. The model must look into the handbook, and then answer."""
    request = runs_pb2.RunAgentRequest(
        task=f"Answer the customer from the handbook in one sentence. {question}",
        tools=["handbook"],
        tool_choice=runs_pb2.TOOL_CHOICE_EACH,
        request_id=str(uuid.uuid4()),
    )
    for message in stub.RunAgent(request, metadata=identity, timeout=LIMIT_S):
        yield message.event


with grpc.insecure_channel(address) as channel:
    stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
    try:
        for path in sorted(FOLDER.iterdir()):
            store(stub, path)
        for event in ask(stub):
            if event.HasField("tool_call_started"):
                call = event.tool_call_started.call
                print(f"{call.name} {call.arguments_json}")
            elif event.HasField("tool_call_ended"):
                print(f"-> {event.tool_call_ended.result_json[:300]}")
            elif event.HasField("ended"):
                print(event.ended.answer or event.ended.status.message)
    except grpc.RpcError as error:
        sys.exit(f"{address}: {error.code().name}: {error.details()}")
