"""A process that reserves quota as a scheduler does. Settings: one JSON line on stdin. Says what it
does, one JSON line each, with the time of the system-wide monotonic clock.

mode "load": reserves ``rate_per_s`` times a second for ``seconds``, settling each after ``hold_s``;
mode "hold": makes ``count`` reservations, keeps them, and starts them one by one after SIGUSR1.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from typing import Any

from scheduler_svc.adapters.quota_client import GrpcQuotaTransport, QuotaClient
from scheduler_svc.domain.quota import QuotaTimes, Reservation
from sluice.channels import open_channel
from sluice.errors import SluiceError
from sluice.quota.exchange import Limits


def say(event: str, **more: Any) -> None:
    print(json.dumps({"event": event, "at": time.monotonic(), **more}), flush=True)


async def load(client: QuotaClient, settings: dict[str, Any]) -> None:
    gap_s = 1.0 / settings["rate_per_s"]
    begin = time.monotonic()
    n = 0

    async def one() -> None:
        try:
            asked_at = time.monotonic()
            made = client.try_reserve("t", settings["tokens"])
            local = made is not None
            if made is None:
                made = await client.reserve("t", settings["tokens"])
        except SluiceError as error:
            say("refused", reason=error.reason, waited=time.monotonic() - asked_at)
            return
        may = client.may_start(made)
        say("reserved", local=local, waited=time.monotonic() - asked_at, may_start=may)
        if may <= 0:
            client.release(made)
            return
        client.started(made)
        await asyncio.sleep(settings.get("hold_s", 0.05))
        client.settle(made, settings["tokens"])

    async with asyncio.TaskGroup() as group:
        while (now := time.monotonic()) < begin + settings["seconds"]:
            while begin + n * gap_s <= now:
                # What a stop has missed is not caught up with.
                n = max(n + 1, int((now - begin) / gap_s))
                group.create_task(one())
            await asyncio.sleep(min(gap_s, 0.01))


async def hold(client: QuotaClient, settings: dict[str, Any]) -> None:
    go = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, go.set)
    held: list[Reservation] = []
    for _ in range(settings["count"]):
        try:
            held.append(await client.reserve("t", settings["tokens"]))
        except SluiceError as error:
            say("refused", reason=error.reason)
    say("holding", count=len(held))
    await go.wait()
    may = [client.may_start(one) for one in held]
    say("may_start", seconds=may)


async def main() -> None:
    settings = json.loads(sys.stdin.readline())
    channel = open_channel(settings["address"])
    await channel.channel_ready()
    client = QuotaClient(
        f"{settings['name']}:{time.time_ns()}",
        GrpcQuotaTransport(channel),
        time.monotonic,
        QuotaTimes(wait_s=settings.get("wait_s", QuotaTimes().wait_s)),
    )
    limits = Limits(**settings["limits"])
    client.set_tenant("t", limits, fail_open=settings.get("fail_open", False))
    running = asyncio.create_task(client.run())
    await {"load": load, "hold": hold}[settings["mode"]](client, settings)
    await asyncio.sleep(1.5)  # leases end and are given back
    running.cancel()
    await channel.close()
    say("ended")


if __name__ == "__main__":
    asyncio.run(main())
