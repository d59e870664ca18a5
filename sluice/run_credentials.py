"""Run credentials: what a durable run's model calls show instead of a client's key.

A scheduler signs one at admission: which run, whose, in which class, with which models, until when.
Ed25519 with the scheduler's key for grants (:mod:`sluice.grants`), over a fixed prefix and the
serialized ``RunCredential`` as sent, so that neither can be taken for the other. An agent service
sees only signed bytes and can neither make nor widen one. Times are wall-clock seconds; clocks may
differ by ``CLOCK_SKEW_S``.

Any scheduler renews one whose run is still open, also long after its time: a run may wait for a
person for days. What bounds a credential that leaked is its run.

Synchronous; for one event loop.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from cryptography.exceptions import InvalidSignature
from google.protobuf.message import DecodeError
from google.protobuf.timestamp_pb2 import Timestamp

from sluice.common.v1 import policy_pb2
from sluice.errors import SluiceError, unauthenticated
from sluice.grants import CLOCK_SKEW_S, GrantSigner, PublicKeys
from sluice.scheduler.v1 import mesh_pb2

PREFIX: Final = b"sluice.scheduler.v1.RunCredential\0"
CREDENTIAL_TTL_S: Final = 3_600.0
RENEWABLE_S: Final = 30 * 86_400.0
CREDENTIAL_BYTES_MAX: Final = 8_192
MODELS_MAX: Final = 16


class CredentialSigner:
    """Signs for one scheduler."""

    def __init__(self, signer: GrantSigner) -> None:
        self._signer = signer

    def sign(
        self,
        *,
        run_id: str,
        tenant: str,
        priority_class: policy_pb2.PriorityClass.ValueType,
        models: Sequence[str],
        now_unix_s: float,
    ) -> mesh_pb2.SignedRunCredential:
        """A credential for :data:`CREDENTIAL_TTL_S` from now. ``models``: 1 to 16 names, as they
        are served."""
        assert 1 <= len(models) <= MODELS_MAX
        content = mesh_pb2.RunCredential(
            run_id=run_id, tenant=tenant, priority_class=priority_class, models=models
        )
        return self.renew(content, now_unix_s=now_unix_s)

    def renew(
        self, content: mesh_pb2.RunCredential, *, now_unix_s: float
    ) -> mesh_pb2.SignedRunCredential:
        """The same rights from now on."""
        fresh = mesh_pb2.RunCredential()
        fresh.CopyFrom(content)
        nanos = math.ceil((now_unix_s + CREDENTIAL_TTL_S) * 1e9)
        fresh.expire_time.CopyFrom(Timestamp(seconds=nanos // 10**9, nanos=nanos % 10**9))
        payload = fresh.SerializeToString(deterministic=True)
        return mesh_pb2.SignedRunCredential(
            payload=payload,
            signature=self._signer.signature(PREFIX + payload),
            key_id=self._signer.key_id,
        )


class CredentialVerifier:
    """Checks credentials of all schedulers whose keys are in a public folder; 130 µs each."""

    def __init__(self, public_folder: Path) -> None:
        self._keys = PublicKeys(public_folder)

    def verify(
        self, credential: mesh_pb2.SignedRunCredential, *, now_unix_s: float
    ) -> mesh_pb2.RunCredential:
        """What it permits now. Otherwise raises UNAUTHENTICATED with reason CREDENTIAL_MISSING,
        CREDENTIAL_UNKNOWN_KEY, CREDENTIAL_SIGNATURE (also a content that cannot be read) or
        CREDENTIAL_EXPIRED (also one that is valid for too long)."""
        return self._verified(credential, now_unix_s, late_s=CLOCK_SKEW_S)

    def verify_for_renewal(
        self, credential: mesh_pb2.SignedRunCredential, *, now_unix_s: float
    ) -> mesh_pb2.RunCredential:
        """The same for one that may have expired :data:`RENEWABLE_S` ago at most."""
        return self._verified(credential, now_unix_s, late_s=RENEWABLE_S)

    def _verified(
        self, credential: mesh_pb2.SignedRunCredential, now_unix_s: float, late_s: float
    ) -> mesh_pb2.RunCredential:
        if not credential.payload or not credential.signature:
            raise _refused("CREDENTIAL_MISSING", "The call carries no run credential.")
        if len(credential.payload) > CREDENTIAL_BYTES_MAX:
            raise _refused("CREDENTIAL_SIGNATURE", "The run credential cannot be read.")
        public = self._keys.get(credential.key_id, now_unix_s)
        if public is None:
            raise _refused("CREDENTIAL_UNKNOWN_KEY", "The run credential's key is not known here.")
        try:
            public.verify(credential.signature, PREFIX + credential.payload)
            content = mesh_pb2.RunCredential.FromString(credential.payload)
        except InvalidSignature:
            raise _refused(
                "CREDENTIAL_SIGNATURE", "The run credential's signature is wrong."
            ) from None
        except DecodeError:
            raise _refused("CREDENTIAL_SIGNATURE", "The run credential cannot be read.") from None
        expires = content.expire_time.seconds + content.expire_time.nanos / 1e9
        if not now_unix_s < expires + late_s:
            raise _refused("CREDENTIAL_EXPIRED", "The run credential has expired.")
        if expires - now_unix_s > CREDENTIAL_TTL_S + CLOCK_SKEW_S:
            raise _refused("CREDENTIAL_EXPIRED", "The run credential is valid for too long.")
        return content


def _refused(reason: str, message: str) -> SluiceError:
    return unauthenticated(reason, message)
