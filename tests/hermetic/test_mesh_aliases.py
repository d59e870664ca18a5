"""Versions of a model behind one name, changed while requests run.

Goal: an alias shares requests exactly by weight, an answer says which version gave it, a change and
its taking back reach the next requests within a second, a tenant's models hold for alias and
version alike, and what would send requests astray is refused. Method: one scheduler, two models
that generate and one that embeds on an instance each, a state service. Oracle: the model in each
answer. Seed: none, the shares are exact.

Seen to fail on the mutants in tests/mutants: alias_always_first, alias_opens_every_version.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from pathlib import Path

import grpc
import pytest

from sluice.common.v1 import sampling_pb2
from sluice.errors import Code, SluiceError
from sluice.scheduler.v1 import admin_pb2, generate_pb2
from sluice.status import from_rpc_error
from tests.hermetic.admin_client import AdminClient, refused
from tests.hermetic.mesh import Shape, mesh
from tests.hermetic.mesh_client import MeshClient, client_of

SHAPE = Shape(
    {
        "one": {"model": "m-v1"},
        "two": {"model": "m-v2"},
        "three": {"model": "e", "generate": False, "embedding_dimensions": 8},
    },
    scheduler={"aliases": ["fixed=m-v1"]},
    state={},
)
CHANGE_S = 1.0


async def model_of(client: MeshClient, name: str, key: str = "") -> str:
    """The model that answered; raises SluiceError."""
    request = generate_pb2.GenerateTextRequest(
        prompt="Hello", model=name, sampling=sampling_pb2.SamplingParams(max_tokens=1)
    )
    metadata = (("authorization", f"Bearer {key}"),) if key else client.mesh.metadata
    try:
        answer = await client.stub.GenerateText(request, metadata=metadata, timeout=10)
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from None
    return answer.model


async def until(client: MeshClient, wanted: set[str], name: str, key: str = "") -> None:
    """Waits until ten requests in a row get just these models; "" stands for a refusal."""
    end = time.monotonic() + CHANGE_S + 1.0  # the ten themselves take time too
    while True:
        seen = set()
        for _ in range(10):
            try:
                seen.add(await model_of(client, name, key))
            except SluiceError:
                seen.add("")
        if seen == wanted:
            return
        assert time.monotonic() < end, f"{seen}, not {wanted}"


def pointing(alias: str, **weights: int) -> admin_pb2.SetAliasRequest:
    request = admin_pb2.SetAliasRequest(alias=alias)
    for model, weight in weights.items():
        request.targets.add(model=model.replace("_", "-"), weight=weight)
    return request


async def test_an_alias_shares_by_weight_is_taken_back_and_says_who_answered(
    tmp_path: Path,
) -> None:
    with mesh(tmp_path, SHAPE) as running:
        admin = AdminClient(running)
        async with client_of(running) as client:
            await admin.call("SetAlias", pointing("chat", m_v1=1))
            await until(client, {"m-v1"}, "chat")
            await admin.call("SetAlias", pointing("chat", m_v1=9, m_v2=1))
            await until(client, {"m-v1", "m-v2"}, "chat")
            answers = await asyncio.gather(*(model_of(client, "chat") for _ in range(100)))
            assert Counter(answers) == {"m-v1": 90, "m-v2": 10}
            streamed = await client.generate(model="chat", sampling={"max_tokens": 1})
            assert streamed.ok.started.model in ("m-v1", "m-v2")
            await admin.call("RollbackAlias", admin_pb2.RollbackAliasRequest(alias="chat"))
            await until(client, {"m-v1"}, "chat")
            error = await refused(admin.call("SetAlias", pointing("chat", m_v3=1)))
            assert error.code is Code.INVALID_ARGUMENT
            assert [one.field for one in error.fields] == ["targets[0].model"]
            error = await refused(admin.call("SetAlias", pointing("m-v1", m_v2=1)))
            assert [one.field for one in error.fields] == ["alias"]
            error = await refused(admin.call("SetAlias", pointing("chat", m_v1=9, e=1)))
            assert [one.field for one in error.fields] == ["targets[1].model"]
            await until(client, {"m-v1"}, "chat")
            listed = await client.stub.ListModels(
                generate_pb2.ListModelsRequest(), metadata=running.metadata
            )
            assert {one.name: list(one.aliases) for one in listed.models} == {
                "e": [],
                "m-v1": ["chat", "fixed"],
                "m-v2": [],
            }
            await rights(admin, client)
            await admin.call("DeleteAlias", admin_pb2.DeleteAliasRequest(alias="chat"))
            await until(client, {""}, "chat")
            error = await refused(
                admin.call("DeleteAlias", admin_pb2.DeleteAliasRequest(alias="fixed"))
            )
            assert (error.code, error.reason) == (Code.FAILED_PRECONDITION, "ALIAS_CONFIGURED")
        await admin.close()


async def rights(admin: AdminClient, client: MeshClient) -> None:
    """Who may use what, by the names in a tenant's `models`."""
    await admin.call("SetAlias", pointing("chat", m_v1=1, m_v2=1))
    for name, models in (("by-alias", ["chat"]), ("by-version", ["m-v1"])):
        await admin.tenant(name, models=models)
    alias_key = (await admin.key("by-alias")).key
    version_key = (await admin.key("by-version")).key
    await until(client, {"m-v1", "m-v2"}, "chat", alias_key)
    await until(client, {"m-v1"}, "m-v1", version_key)
    # One version is not permitted: then the alias, which may give it, is not either.
    for name, key in (("m-v1", alias_key), ("m-v2", version_key), ("chat", version_key)):
        with pytest.raises(SluiceError) as raised:
            await model_of(client, name, key)
        assert (raised.value.code, raised.value.reason) == (Code.NOT_FOUND, "MODEL_UNKNOWN")
