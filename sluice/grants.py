"""Dispatch grants: the proof that a scheduler sent a piece of work to an instance.

Owns the key files, signing (41 µs) and verifying (124 µs). A scheduler signs with a private key
that instances never see, so an instance cannot mint a grant. Ed25519 over the serialized
``DispatchGrant`` as sent. Times are wall-clock seconds: grants cross machines. Clocks may differ by
``CLOCK_SKEW_S``, but not for ``start_by``: see docs/adr/0007-a-lapsed-quota-starts-nothing.md.

Files under a keys folder: ``grant-private.pem`` (mode 0600) and ``grant-public/<key id>.pem``; a
verifier reads the public folder only. Keys rotate by adding a file there: an unknown key id makes
the verifier read the folder again, at most once a second.

Synchronous and without locks: for one event loop.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import tempfile
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from google.protobuf.message import DecodeError
from google.protobuf.timestamp_pb2 import Timestamp

from sluice.common.v1 import grant_pb2
from sluice.errors import SluiceError, permission_denied

PRIVATE_FILE = "grant-private.pem"
PUBLIC_FOLDER = "grant-public"

GRANT_TTL_S = 30.0  # what schedulers give
GRANT_TTL_MAX_S = 3600.0  # what a verifier accepts, whoever signed
CLOCK_SKEW_S = 5.0
PUBLIC_KEYS_MAX = 64
RELOAD_PAUSE_S = 1.0
GRANT_BYTES_MAX = 4096
GRANT_LAPSED = "GRANT_LAPSED"
ANY = "*"  # matches every request or instance; minted by `sluice grant` only


def key_id(public: Ed25519PublicKey) -> str:
    """The first 16 hex digits of the SHA-256 of the raw public key."""
    raw = public.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    return hashlib.sha256(raw).hexdigest()[:16]


def ensure_keys(folder: Path) -> str:
    """Makes the key pair under ``folder`` if there is none; returns its key id. Safe when several
    processes do it at once: the first private key that is complete stays."""
    folder.mkdir(parents=True, exist_ok=True)
    public_folder = folder / PUBLIC_FOLDER
    public_folder.mkdir(exist_ok=True)
    private_path = folder / PRIVATE_FILE
    if not private_path.exists():
        pem = Ed25519PrivateKey.generate().private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        _write_whole(private_path, pem, mode=0o600, replace=False)
    public = _load_private(private_path).public_key()
    public_path = public_folder / f"{key_id(public)}.pem"
    if not public_path.exists():
        pem = public.public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        _write_whole(public_path, pem, mode=0o644, replace=True)
    return key_id(public)


def _write_whole(path: Path, data: bytes, *, mode: int, replace: bool) -> None:
    """A reader sees the whole file or none."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".new-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(file.fileno(), mode)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if replace:
            Path(name).replace(path)
        else:
            with contextlib.suppress(FileExistsError):
                os.link(name, path)
    finally:
        Path(name).unlink(missing_ok=True)


def _load_private(path: Path) -> Ed25519PrivateKey:
    key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    if not isinstance(key, Ed25519PrivateKey):
        raise ValueError(f"{path.name} holds no Ed25519 private key")
    return key


class GrantSigner:
    """Signs grants for one scheduler."""

    def __init__(self, private: Ed25519PrivateKey, issuer: str) -> None:
        self._private = private
        self._issuer = issuer
        self.key_id = key_id(private.public_key())

    @classmethod
    def load(cls, folder: Path, issuer: str) -> GrantSigner:
        """From the private key under ``folder``. OSError or ValueError when it cannot be read."""
        return cls(_load_private(folder / PRIVATE_FILE), issuer)

    def signature(self, data: bytes) -> bytes:
        """Of other bytes than a grant, which begin with what they are so that none can be taken for
        the other."""
        return self._private.sign(data)

    def sign(
        self,
        request_id: str,
        instance: str,
        *,
        now_unix_s: float,
        ttl_s: float = GRANT_TTL_S,
        start_by_unix_s: float = math.inf,
    ) -> grant_pb2.SignedGrant:
        """A grant for one request on one instance from now for ``ttl_s`` seconds; with a finite
        ``start_by_unix_s`` the instance starts nothing from then on, by its own clock."""
        assert 0 < ttl_s <= GRANT_TTL_MAX_S
        grant = grant_pb2.DispatchGrant(
            request_id=request_id,
            instance=instance,
            issue_time=_timestamp(now_unix_s),
            expire_time=_timestamp(now_unix_s + ttl_s),
            issuer=self._issuer,
        )
        if start_by_unix_s < math.inf:
            grant.start_by_time.CopyFrom(_timestamp(start_by_unix_s))
        payload = grant.SerializeToString()
        return grant_pb2.SignedGrant(
            payload=payload, signature=self._private.sign(payload), key_id=self.key_id
        )


class PublicKeys:
    """The keys of a public folder by their ids; empty until :meth:`read`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._keys: dict[str, Ed25519PublicKey] = {}
        self._read_at = float("-inf")

    def __len__(self) -> int:
        return len(self._keys)

    def get(self, wanted: str, now_unix_s: float) -> Ed25519PublicKey | None:
        """The key, for which the folder is read again if need be."""
        public = self._keys.get(wanted)
        # A clock that was set back must not stop reloading: hence the absolute difference.
        if public is None and abs(now_unix_s - self._read_at) >= RELOAD_PAUSE_S:
            self._read_at = now_unix_s
            self.read()
            public = self._keys.get(wanted)
        return public

    def read(self) -> None:
        """Takes the keys that are in the folder now; it may be empty or absent until later."""
        keys: dict[str, Ed25519PublicKey] = {}
        for path in sorted(self._folder.glob("*.pem"))[:PUBLIC_KEYS_MAX]:
            try:
                key = serialization.load_pem_public_key(path.read_bytes())
            except (OSError, ValueError, UnsupportedAlgorithm):
                continue  # a file that is not a key does not take the others away
            if isinstance(key, Ed25519PublicKey):
                keys[key_id(key)] = key
        self._keys = keys


class GrantVerifier:
    """Checks grants on an instance."""

    def __init__(self, public_folder: Path) -> None:
        self._keys = PublicKeys(public_folder)

    @classmethod
    def load(cls, public_folder: Path) -> GrantVerifier:
        """With the keys that are in the folder now; it may be empty or absent until later."""
        verifier = cls(public_folder)
        verifier._keys.read()
        return verifier

    def __len__(self) -> int:
        return len(self._keys)

    def verify(
        self,
        grant: grant_pb2.SignedGrant,
        *,
        request_id: str,
        instance: str,
        now_unix_s: float,
    ) -> grant_pb2.DispatchGrant:
        """The grant's content when it permits the request here and now. Otherwise raises
        PERMISSION_DENIED with reason GRANT_MISSING, GRANT_UNKNOWN_KEY, GRANT_SIGNATURE (also a
        content that cannot be read), GRANT_EXPIRED (also not valid yet, or for too long),
        GRANT_AUDIENCE, GRANT_REQUEST or GRANT_LAPSED (good, but too late to start under it)."""
        if not grant.payload or not grant.signature:
            raise _denied("GRANT_MISSING", "The work carries no dispatch grant.")
        if len(grant.payload) > GRANT_BYTES_MAX:
            raise _denied("GRANT_SIGNATURE", "The dispatch grant cannot be read.")
        public = self._keys.get(grant.key_id, now_unix_s)
        if public is None:
            raise _denied("GRANT_UNKNOWN_KEY", "The dispatch grant's key is not known here.")
        try:
            public.verify(grant.signature, grant.payload)
            content = grant_pb2.DispatchGrant.FromString(grant.payload)
        except InvalidSignature:
            raise _denied("GRANT_SIGNATURE", "The dispatch grant's signature is wrong.") from None
        except DecodeError:
            raise _denied("GRANT_SIGNATURE", "The dispatch grant cannot be read.") from None
        issued = _seconds(content.issue_time)
        expires = _seconds(content.expire_time)
        if not issued - CLOCK_SKEW_S <= now_unix_s < expires + CLOCK_SKEW_S:
            raise _denied("GRANT_EXPIRED", "The dispatch grant is not valid at this time.")
        if expires - issued > GRANT_TTL_MAX_S + 1e-6:
            raise _denied("GRANT_EXPIRED", "The dispatch grant is valid for too long.")
        if content.instance not in (instance, ANY):
            raise _denied("GRANT_AUDIENCE", "The dispatch grant is for another instance.")
        if content.request_id not in (request_id, ANY):
            raise _denied("GRANT_REQUEST", "The dispatch grant is for another request.")
        if content.HasField("start_by_time") and now_unix_s >= _seconds(content.start_by_time):
            raise _denied(GRANT_LAPSED, "The time to start under the dispatch grant has passed.")
        return content


def _denied(reason: str, message: str) -> SluiceError:
    return permission_denied(reason, message)


def _timestamp(unix_s: float) -> Timestamp:
    nanos = round(unix_s * 1e9)
    return Timestamp(seconds=nanos // 10**9, nanos=nanos % 10**9)


def _seconds(timestamp: Timestamp) -> float:
    return (timestamp.seconds * 10**9 + timestamp.nanos) / 10**9
