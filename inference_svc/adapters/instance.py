"""What all calls of one instance share. Made once in ``main``."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from inference_svc.adapters.counts import Counts
from inference_svc.adapters.engine_host import EngineHost
from inference_svc.adapters.room import RoomKeeper
from sluice.common.v1 import grant_pb2
from sluice.grants import GrantVerifier
from sluice.telemetry import Telemetry


@dataclass(frozen=True, slots=True)
class Instance:
    """``name`` is the instance's name in grants; ``verifier`` is ``None`` when grants are off."""

    name: str
    host: EngineHost
    room: RoomKeeper
    verifier: GrantVerifier | None
    telemetry: Telemetry
    counts: Counts = field(default_factory=Counts)

    def __post_init__(self) -> None:
        self.host.watch(lambda: self.room.resize(self.host.capacity))

    def verify(self, grant: grant_pb2.SignedGrant, request_id: str) -> None:
        """Raises PERMISSION_DENIED unless the grant permits the request here and now."""
        if self.verifier is not None:
            self.verifier.verify(
                grant, request_id=request_id, instance=self.name, now_unix_s=time.time()
            )
