"""Live text in Redis or Valkey: a hash and a string per run, volatile, gone minutes after the last
word; new text is published on the hash's name. See ``live_text.lua``."""

from __future__ import annotations

from typing import Final

from redis.asyncio import Redis

from state_svc.adapters.valkey_link import Argument, Script, ValkeyLink, text
from state_svc.domain.run_values import Lease, LeaseLostError
from state_svc.ports import TenantDeletedError
from state_svc.run_ports import LiveText

KEPT_S: Final = 600
TEXT_BYTES_MAX: Final = 1 << 20
_SCRIPT: Final = Script("tenant_guard.lua", "live_text.lua")


def text_channel(tenant: str, run_id: str) -> str:
    """Where new text of a run is published, and the key of what is known of it."""
    return f"sluice:{{{tenant}}}:run:{run_id}:text"


class ValkeyTexts:
    """A :class:`state_svc.run_ports.TextStore`."""

    def __init__(self, link: ValkeyLink) -> None:
        self._link = link

    async def publish(
        self, lease: Lease, sequence: int, step: int, text: str, *, replaces: bool
    ) -> None:
        """See :class:`state_svc.run_ports.TextStore`."""
        key = text_channel(lease.tenant, lease.run_id)
        arguments: list[Argument] = [lease.token, sequence, step, int(replaces), text.encode()]
        arguments += [KEPT_S, TEXT_BYTES_MAX, key]
        try:
            await self._link.script(_SCRIPT, [key, f"{key}:whole"], arguments)
        except TenantDeletedError as error:
            raise LeaseLostError from error

    async def whole(self, tenant: str, run_id: str) -> LiveText | None:
        """See :class:`state_svc.run_ports.TextStore`."""
        key = text_channel(tenant, run_id)

        async def read(client: Redis) -> list[object]:
            async with client.pipeline(transaction=True) as pipeline:
                pipeline.hmget(key, ["version", "sequence", "step"])
                pipeline.get(f"{key}:whole")
                return await pipeline.execute()

        numbers, whole = await self._link.run(read)
        assert isinstance(numbers, list)
        if numbers[0] is None:
            return None
        version, sequence, step = (int(number) for number in numbers)
        assert whole is None or isinstance(whole, bytes | str)
        return LiveText(version, sequence, step, 0, "" if whole is None else text(whole))


def parse(message: bytes) -> LiveText:
    """A message of ``live_text.lua``."""
    version, sequence, step, offset, words = message.split(b" ", 4)
    return LiveText(int(version), int(sequence), int(step), int(offset), words.decode())
