"""A process that holds a run and appends to it for ever. Settings: one JSON line on stdin. Says
what it did, one JSON line each."""

from __future__ import annotations

import asyncio
import json
import sys
import time
import uuid
from typing import Any

import grpc.aio
from google.protobuf.duration_pb2 import Duration

from sluice.channels import open_channel
from sluice.state.v1 import runs_pb2
from sluice.state.v1.runs_pb2_grpc import RunServiceStub
from sluice.status import from_rpc_error


def say(event: str, **more: Any) -> None:
    print(json.dumps({"event": event, "at": time.monotonic(), **more}), flush=True)


async def main() -> None:
    settings = json.loads(sys.stdin.readline())
    lease = Duration(seconds=2)
    async with open_channel(settings["address"]) as channel:
        await channel.channel_ready()
        stub: Any = RunServiceStub(channel)
        claim = runs_pb2.ClaimRunsRequest(holder=settings["name"], runs_max=1, lease=lease)
        while not (claimed := (await stub.ClaimRuns(claim)).runs):
            await asyncio.sleep(0.05)
        run, token = claimed[0].run, claimed[0].token
        last = run.last_sequence
        say("claimed", token=token, last=last)
        own = runs_pb2.Lease(tenant=run.tenant, run_id=run.run_id, token=token)
        while True:
            request = runs_pb2.AppendRunRequest(
                lease=own,
                expected_sequence=last,
                append_id=str(uuid.uuid4()),
                events=[f"{settings['name']} {token}".encode()],
            )
            try:
                last = (await stub.AppendRun(request)).last_sequence
            except grpc.aio.AioRpcError as error:
                say("refused", reason=from_rpc_error(error).reason)
                return
            renew = runs_pb2.RenewLeasesRequest(leases=[own], lease=lease)
            state = (await stub.RenewLeases(renew)).states[0]
            say("appended", token=token, last=last, held=state.held)
            await asyncio.sleep(0.02)


if __name__ == "__main__":
    asyncio.run(main())
