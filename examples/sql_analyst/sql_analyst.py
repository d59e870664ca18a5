"""A data analyst over a SQLite database: ``.venv/bin/python examples/sql_analyst/sql_analyst.py
[question]``, after make_database.py.

The tool ``sales`` of sluice.toml can only read: the database is opened read-only, and one SELECT
is all that it takes. The answer is typed: JSON that follows a schema.
"""

import json
import os
import sys
import uuid
from pathlib import Path

import grpc

from sluice.command.cli_support import run_paths
from sluice.command.first_files import api_key_path
from sluice.common.v1 import input_pb2
from sluice.scheduler.v1 import runs_pb2, scheduler_pb2_grpc

PRODUCTS = 4  # of the sample database; a small model would go on with more
SALE = {
    "type": "object",
    "properties": {"product": {"type": "string", "maxLength": 40}, "amount": {"type": "number"}},
    "required": ["product", "amount"],
    "additionalProperties": False,
}
SCHEMA = {
    "type": "object",
    "properties": {"sales": {"type": "array", "items": SALE, "maxItems": PRODUCTS}},
    "required": ["sales"],
    "additionalProperties": False,
}
HINT = (
    "The table orders has the columns product, amount and ordered_on."
    " A query is for example: SELECT product, SUM(amount) FROM orders GROUP BY product."
    " Query the database, then answer. "
)

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
question = sys.argv[1] if len(sys.argv) > 1 else "List what we sold of each product."

request = runs_pb2.RunAgentRequest(
    messages=[
        input_pb2.ChatMessage(role="system", content="Answer from the data."),
        input_pb2.ChatMessage(role="user", content=HINT + question),
    ],
    tools=["sales"],
    tool_choice=runs_pb2.TOOL_CHOICE_EACH,
    answer_schema_json=json.dumps(SCHEMA),
    request_id=str(uuid.uuid4()),
)
request.budget.steps_max = 8

with grpc.insecure_channel(address) as channel:
    stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
    try:
        calls = stub.RunAgent(request, metadata=(("authorization", f"Bearer {key}"),), timeout=600)
        for message in calls:
            event = message.event
            if event.HasField("tool_call_started"):
                print(f"sales {event.tool_call_started.call.arguments_json}")
            elif event.HasField("tool_call_ended"):
                ended = event.tool_call_ended
                print(f"-> {ended.result_json or ended.status.message}")
            elif event.HasField("ended"):
                if not event.ended.answer:
                    print(event.ended.status.message)
                for sale in json.loads(event.ended.answer or '{"sales": []}')["sales"]:
                    print(f"{sale['product']}: {sale['amount']:.2f}")
    except grpc.RpcError as error:
        sys.exit(f"{address}: {error.code().name}: {error.details()}")
