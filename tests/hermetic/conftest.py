"""The mesh that tests share which kill nothing and change nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from tests.hermetic.agent_mesh import REPLIES, agent_mesh, answers
from tests.hermetic.mesh import Mesh, Shape, mesh
from tests.hermetic.mesh_client import MeshClient, client_of

SHARED = Shape(
    instances={
        "sim-0": {"decode_step_ms": 4.0},
        "embed-0": {"generate": False, "embedding_dimensions": 8, "model": "sim-embed"},
    },
    # One instance of a model, which fails as tests say: a breaker would bar it from the next test.
    scheduler={
        "inter_token_limit_s": 1.0,
        "aliases": ["fast=sim"],
        "breaker_faults": 1000,
        "breaker_volume": 100000,
        "retry_budget_max": 10000.0,
    },
    tenants="""
[[tenant]]
name = "narrow"
key_sha256 = ["cc6a3ad1d53969fb5d3a189f595a99cd34e965a52377c1563174af3f0047448a"]
models = ["sim-embed"]
""",
)


@pytest.fixture(scope="session")
def shared_mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """One mesh for the session: the generating model `sim` (alias `fast`), the embedding model
    `sim-embed`; the key `narrow-key` may use the latter only."""
    with mesh(tmp_path_factory.mktemp("shared-mesh"), SHARED) as running:
        yield running


@pytest_asyncio.fixture
async def client(shared_mesh: Mesh) -> AsyncIterator[MeshClient]:
    """A client of the shared mesh; afterwards nothing of the test may be left in it."""
    async with client_of(shared_mesh) as made:
        yield made
    shared_mesh.until_idle()


@pytest.fixture(scope="session")
def shared_agent_mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """One mesh for the session with an agent service, the tools of sluice.toml, a generating model
    that answers as agent_mesh.REPLIES say, and an embedding model."""
    with agent_mesh(tmp_path_factory.mktemp("shared-agent-mesh")) as running:
        answers(running, REPLIES)
        yield running
