"""The mesh that security tests of the public service share, with agents and three tenants."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from sluice.scheduler.v1 import runs_pb2, scheduler_pb2_grpc
from tests.contract.mcp_rig import SCRIPT
from tests.hermetic.mesh import Mesh, Shape, mesh

OTHER_KEY = "sk-of-another-tenant-of-the-tests"
SMALL_KEY = "sk-of-a-tenant-with-two-runs-only"
SMALL_RUNS = 2
SESSION_MESSAGES = 6
TOOLS = ("calculator", "ask", "clock", "nobody", "desk", "papers")
DESK_BYTES = 100_000
COLLECTION = "secrets"  # what the tool `papers` searches


def _tenant(name: str, key: str, **more: object) -> str:
    digest = hashlib.sha256(key.encode()).hexdigest()
    lines = [f"{field} = {value}" for field, value in more.items()]
    tools = ", ".join(f'"{tool}"' for tool in TOOLS)
    return "\n".join(
        [
            "\n[[tenant]]",
            f'name = "{name}"',
            f'key_sha256 = ["{digest}"]',
            "agents = true",
            f"tools = [{tools}]",
            *lines,
            "",
        ]
    )


SHAPE = Shape(
    instances={
        "sim-0": {"decode_step_ms": 1.0},
        "embed-0": {"generate": False, "embedding_dimensions": 8, "model": "sim-embed"},
    },
    agents=1,
    scheduler={"decision_sample_ratio": 1.0},
    state={"session_messages_max": SESSION_MESSAGES},
    tenants=_tenant("other", OTHER_KEY) + _tenant("small", SMALL_KEY, concurrent_runs=SMALL_RUNS),
    tools=[
        {"name": "calculator", "description": "d", "effect": "read", "calculator": {}},
        {"name": "clock", "description": "d", "effect": "read", "clock": {}},
        {
            "name": "ask",
            "description": "d",
            "effect": "read",
            "needs_approval": True,
            "clock": {},
        },
        {
            "name": "nobody",
            "description": "d",
            "effect": "read",
            "mcp": {"command": ["python", "-c", "raise SystemExit(3)"]},
        },
        {
            "name": "papers",
            "description": "d",
            "effect": "read",
            "retrieval": {"collection": COLLECTION, "top_k": 20},
        },
        {
            "name": "desk",
            "description": "d",
            "effect": "read",
            "output_bytes_max": DESK_BYTES,
            "mcp": {"command": ["python", "-I", "-S", str(SCRIPT), "/dev/null"]},
        },
    ],
)


@pytest.fixture(scope="session")
def agent_mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """The tenants `dev` and `other` may use agents with TOOLS, `small` with SMALL_RUNS at once; a
    session holds SESSION_MESSAGES messages."""
    with mesh(tmp_path_factory.mktemp("agent-mesh"), SHAPE) as running:
        running.until(lambda: _takes_runs(running), "the scheduler has found an agent service")
        yield running


def _takes_runs(running: Mesh) -> bool:
    stub: Any = scheduler_pb2_grpc.SchedulerServiceStub(running.channel("scheduler-0"))
    request = runs_pb2.RunAgentRequest(task="Hello", request_id=str(uuid.uuid4()), background=True)
    try:
        list(stub.RunAgent(request, metadata=running.metadata, timeout=5))
    except grpc.RpcError:
        return False
    return True
