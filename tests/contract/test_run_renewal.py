"""Runs' credentials at a scheduler's mesh port, with a scripted state service.

Goal: a run that goes on keeps its credential however long it waited; one that has ended, whose
tenant is gone or may not have such runs any more, does not. A scheduler that has not heard of a
tenant yet ends none of its runs. Oracle: reasons, and the rights of what comes back.

Seen to fail on mutants: tenant_not_known_yet_is_gone, tenant_gone_is_waited_for.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import grpc.aio
import pytest
import pytest_asyncio

from scheduler_svc.adapters.mesh_api import MeshApi
from scheduler_svc.adapters.run_rights import RunRights
from scheduler_svc.adapters.tenant import Tenant
from scheduler_svc.adapters.tenants import Tenants
from scheduler_svc.domain.model import PriorityClass
from sluice.channels import open_channel
from sluice.common.v1 import policy_pb2
from sluice.errors import Code, SluiceError
from sluice.grants import PUBLIC_FOLDER, GrantSigner, ensure_keys
from sluice.run_credentials import CREDENTIAL_TTL_S, CredentialSigner, CredentialVerifier
from sluice.scheduler.v1 import generate_pb2, mesh_pb2, mesh_pb2_grpc, runs_pb2, spec_pb2
from sluice.server import Health, MeshServer
from sluice.state.v1 import runs_pb2 as stored_pb2
from sluice.state.v1 import runs_pb2_grpc
from sluice.status import from_rpc_error
from tests.contract.fake_state import FakeRun, FakeRuns

TENANTS = """
[[tenant]]
name = "may"
agents = true
[[tenant]]
name = "plain"
[[tenant]]
name = "silent"
agents = true
sessions = false
"""
DAY_S = 86_400.0
SPEC = spec_pb2.RunSpec
TASK = spec_pb2.AgentTask
RUN = runs_pb2.RunAgentRequest


class Mesh:
    """The mesh port of a scheduler, and the state service behind it."""

    def __init__(self, folder: Path) -> None:
        ensure_keys(folder)
        file = folder / "tenants.toml"
        file.write_text(TENANTS)
        self.tenants = Tenants(file, awaits_state=True)
        self.runs = FakeRuns()  # type: ignore[abstract]  # what agents call is not needed
        self.signer = CredentialSigner(GrantSigner.load(folder, "scheduler-1"))
        self.verifier = CredentialVerifier(folder / PUBLIC_FOLDER)
        self.stub: Any = None

    def stored(
        self,
        tenant: str = "may",
        spec: spec_pb2.RunSpec | None = None,
        phase: stored_pb2.RunPhase.ValueType = stored_pb2.RUN_PHASE_WAITING,
        age_s: float = 0.0,
    ) -> mesh_pb2.SignedRunCredential:
        """Stores a run; its credential, signed some time ago."""
        run_id = str(uuid.uuid4())
        made = stored_pb2.StoredRun(
            run_id=run_id,
            tenant=tenant,
            phase=phase,
            spec=(spec or SPEC(task=TASK(request=RUN(task="x")))).SerializeToString(),
        )
        self.runs.runs[tenant, run_id] = FakeRun(made, stored_pb2.CreateRunRequest())
        return self.signer.sign(
            run_id=run_id,
            tenant=tenant,
            priority_class=policy_pb2.PRIORITY_CLASS_BATCH,
            models=["m"],
            now_unix_s=time.time() - age_s,
        )

    async def renew(self, credential: mesh_pb2.SignedRunCredential) -> mesh_pb2.SignedRunCredential:
        """A renewal."""
        request = mesh_pb2.RenewRunCredentialRequest(credential=credential)
        fresh: mesh_pb2.SignedRunCredential = (
            await self.stub.RenewRunCredential(request, timeout=5)
        ).credential
        return fresh

    async def refused(self, credential: mesh_pb2.SignedRunCredential) -> SluiceError:
        """The error of a renewal that fails."""
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.renew(credential)
        return from_rpc_error(caught.value)

    async def all_refused(self, credential: mesh_pb2.SignedRunCredential) -> SluiceError:
        """The same error of a renewal and of both kinds of step."""
        asked = generate_pb2.GenerateRequest(prompt="x")
        generate = mesh_pb2.GenerateStepRequest(credential=credential, request=asked)
        embed = mesh_pb2.EmbedStepRequest(
            credential=credential, request=generate_pb2.EmbedRequest(texts=["x"])
        )
        error = await self.refused(credential)
        for call in (
            self.stub.GenerateStep(generate, timeout=5).read(),
            self.stub.EmbedStep(embed, timeout=5),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            one = from_rpc_error(caught.value)
            assert (one.code, one.reason) == (error.code, error.reason)
            assert one.retry_after_s == error.retry_after_s
        return error


class Refusals:
    """What the mesh port needs of serving when it lets nothing through."""

    def refused(self, *_: Any) -> None:
        """Counts."""


@pytest_asyncio.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    made = Mesh(tmp_path)
    state = MeshServer("state", ["127.0.0.1:0"], Health())
    runs_pb2_grpc.add_RunServiceServicer_to_server(made.runs, state.grpc)
    await state.start()
    server = MeshServer("scheduler-mesh", ["127.0.0.1:0"], Health())
    async with open_channel(f"127.0.0.1:{state.ports[0]}") as channel:
        await channel.channel_ready()
        api = MeshApi(
            cast("Any", Refusals()), made.signer, made.verifier, RunRights(channel, made.tenants)
        )
        mesh_pb2_grpc.add_SchedulerMeshServiceServicer_to_server(api, server.grpc)
        await server.start()
        async with open_channel(f"127.0.0.1:{server.ports[0]}") as client:
            await client.channel_ready()
            made.stub = mesh_pb2_grpc.SchedulerMeshServiceStub(client)
            yield made
        await server.stop(0)
    await state.stop(0)


@pytest.mark.parametrize("age_s", [0.0, CREDENTIAL_TTL_S, 10 * DAY_S])
async def test_a_credential_is_renewed_while_its_run_is_open(mesh: Mesh, age_s: float) -> None:
    old = mesh.stored(age_s=age_s)
    content = mesh.verifier.verify(await mesh.renew(old), now_unix_s=time.time())
    rights = mesh_pb2.RunCredential.FromString(old.payload)
    assert content.expire_time.seconds - time.time() > CREDENTIAL_TTL_S - 10
    for each in (content, rights):
        each.ClearField("expire_time")
    assert content == rights


@pytest.mark.parametrize(
    "phase",
    [
        stored_pb2.RUN_PHASE_SUCCEEDED,
        stored_pb2.RUN_PHASE_FAILED,
        stored_pb2.RUN_PHASE_CANCELLED,
    ],
)
async def test_one_of_a_run_that_has_ended_is_not(
    mesh: Mesh, phase: stored_pb2.RunPhase.ValueType
) -> None:
    error = await mesh.refused(mesh.stored(phase=phase))
    assert (error.code, error.reason) == (Code.FAILED_PRECONDITION, "RUN_ENDED")


async def test_one_of_a_run_that_nobody_knows_is_not(mesh: Mesh) -> None:
    credential = mesh.stored()
    mesh.runs.runs.clear()
    error = await mesh.refused(credential)
    assert (error.code, error.reason) == (Code.NOT_FOUND, "RUN_UNKNOWN")


TURN = SPEC(task=TASK(request=RUN(task="x", session_id="s"), turn=True))
BOTH = SPEC(task=TASK(request=RUN(task="x", session_id="s", tools=["t"])))
INGEST = SPEC(ingest=spec_pb2.IngestTask(collection="c"))


@pytest.mark.parametrize(
    ("tenant", "spec", "permitted"),
    [
        ("may", BOTH, True),
        ("plain", None, False),
        ("plain", TURN, True),
        ("plain", INGEST, True),
        ("silent", None, True),
        ("silent", TURN, False),
        ("silent", BOTH, False),
    ],
)
async def test_the_tenant_must_still_have_the_right(
    mesh: Mesh, tenant: str, spec: spec_pb2.RunSpec | None, permitted: bool
) -> None:
    credential = mesh.stored(tenant, spec)
    if permitted:
        assert (await mesh.renew(credential)).payload
        return
    error = await mesh.refused(credential)
    assert (error.code, error.reason) == (Code.PERMISSION_DENIED, "RUN_NOT_PERMITTED")


@pytest.mark.parametrize("age_s", [0.0, CREDENTIAL_TTL_S / 2])
async def test_a_tenant_that_is_not_known_yet_is_waited_for(mesh: Mesh, age_s: float) -> None:
    """Another scheduler made it, and what this one follows is behind, for however long."""
    mesh.tenants.replace([], [])
    credential = mesh.stored("new", INGEST, age_s=age_s)
    error = await mesh.all_refused(credential)
    assert (error.code, error.reason) == (Code.UNAVAILABLE, "STATE_UNREACHABLE")
    assert error.retry_after_s == 1.0
    of_class = PriorityClass.STANDARD
    mesh.tenants.change([Tenant(name="new", ceiling=of_class, default_class=of_class)])
    assert (await mesh.renew(credential)).payload


@pytest.mark.parametrize("told", [True, False])
async def test_the_runs_of_a_tenant_that_is_gone_are_refused_for_good(
    mesh: Mesh, told: bool
) -> None:
    if told:
        mesh.tenants.replace([], [])
    credential = mesh.stored("gone")
    mesh.runs.runs.clear()  # they go with it
    error = await mesh.all_refused(credential)
    assert (error.code, error.reason) == (Code.PERMISSION_DENIED, "RUN_NOT_PERMITTED")


async def test_whether_a_tenant_is_gone_is_not_said_while_nobody_knows(mesh: Mesh) -> None:
    credential = mesh.stored("new")
    mesh.runs.away = True
    assert (await mesh.all_refused(credential)).code is Code.UNAVAILABLE


async def test_what_was_not_signed_is_not_looked_for(mesh: Mesh) -> None:
    credential = mesh.stored()
    credential.signature = b"x" * 64
    error = await mesh.refused(credential)
    assert (error.code, error.reason) == (Code.UNAUTHENTICATED, "CREDENTIAL_SIGNATURE")
    assert not mesh.runs.calls


async def test_a_state_service_that_does_not_answer_is_to_be_waited_out(mesh: Mesh) -> None:
    credential = mesh.stored()
    mesh.runs.away = True
    assert (await mesh.refused(credential)).code is Code.UNAVAILABLE
