"""Dispatch grants.

Goal: only what a scheduler signed for this request on this instance at this time passes. Method:
good grants changed in one respect each; every single-bit change of payload, signature and key id.
Oracle: the reason. Mutants seen to fail: expiry not checked; the audience compared with the
request; an unknown key accepted; the signature check skipped.
"""

from __future__ import annotations

import stat
import threading
from pathlib import Path

import pytest

from sluice.common.v1 import grant_pb2
from sluice.errors import Code, SluiceError
from sluice.grants import (
    ANY,
    CLOCK_SKEW_S,
    GRANT_TTL_MAX_S,
    PRIVATE_FILE,
    PUBLIC_FOLDER,
    GrantSigner,
    GrantVerifier,
    ensure_keys,
)

NOW = 1_800_000_000.25


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    ensure_keys(tmp_path)
    return tmp_path


@pytest.fixture
def signer(keys: Path) -> GrantSigner:
    return GrantSigner.load(keys, "scheduler-1")


@pytest.fixture
def verifier(keys: Path) -> GrantVerifier:
    return GrantVerifier.load(keys / PUBLIC_FOLDER)


def _reason(
    verifier: GrantVerifier,
    grant: grant_pb2.SignedGrant,
    request_id: str = "r1",
    instance: str = "a",
    now: float = NOW,
) -> str:
    try:
        verifier.verify(grant, request_id=request_id, instance=instance, now_unix_s=now)
    except SluiceError as error:
        return error.reason if error.code is Code.PERMISSION_DENIED else error.code.name
    return "OK"


def test_a_grant_passes_for_its_request_on_its_instance(
    signer: GrantSigner, verifier: GrantVerifier
) -> None:
    grant = signer.sign("r1", "a", now_unix_s=NOW)
    content = verifier.verify(grant, request_id="r1", instance="a", now_unix_s=NOW)
    assert (content.request_id, content.instance, content.issuer) == ("r1", "a", "scheduler-1")
    assert _reason(verifier, grant, request_id="r2") == "GRANT_REQUEST"
    assert _reason(verifier, grant, instance="b") == "GRANT_AUDIENCE"


def test_a_debugging_grant_passes_everywhere(signer: GrantSigner, verifier: GrantVerifier) -> None:
    grant = signer.sign(ANY, ANY, now_unix_s=NOW, ttl_s=GRANT_TTL_MAX_S)
    assert _reason(verifier, grant, "whatever", "anywhere") == "OK"


def test_a_grant_is_void_outside_its_time(signer: GrantSigner, verifier: GrantVerifier) -> None:
    grant = signer.sign("r1", "a", now_unix_s=NOW, ttl_s=30.0)
    assert _reason(verifier, grant, now=NOW - CLOCK_SKEW_S + 0.01) == "OK"
    assert _reason(verifier, grant, now=NOW - CLOCK_SKEW_S - 0.01) == "GRANT_EXPIRED"
    assert _reason(verifier, grant, now=NOW + 30.0 + CLOCK_SKEW_S - 0.01) == "OK"
    assert _reason(verifier, grant, now=NOW + 30.0 + CLOCK_SKEW_S + 0.01) == "GRANT_EXPIRED"


def test_nothing_starts_from_the_start_by_time_on(
    signer: GrantSigner, verifier: GrantVerifier
) -> None:
    """Neither the grant's own life nor the difference that clocks may have adds to it."""
    grant = signer.sign("r1", "a", now_unix_s=NOW, ttl_s=30.0, start_by_unix_s=NOW + 2.5)
    assert _reason(verifier, grant, now=NOW - CLOCK_SKEW_S + 0.01) == "OK"
    assert _reason(verifier, grant, now=NOW + 2.499) == "OK"
    assert _reason(verifier, grant, now=NOW + 2.501) == "GRANT_LAPSED"
    assert _reason(verifier, grant, instance="b", now=NOW + 2.501) == "GRANT_AUDIENCE"


def test_nobody_can_sign_for_longer_than_an_hour(
    signer: GrantSigner, verifier: GrantVerifier
) -> None:
    with pytest.raises(AssertionError):
        signer.sign("r1", "a", now_unix_s=NOW, ttl_s=GRANT_TTL_MAX_S + 1)
    content = grant_pb2.DispatchGrant(request_id="r1", instance="a")
    content.issue_time.FromSeconds(int(NOW))
    content.expire_time.FromSeconds(int(NOW) + 86_400)
    payload = content.SerializeToString()
    grant = grant_pb2.SignedGrant(
        payload=payload, signature=signer._private.sign(payload), key_id=signer.key_id
    )
    assert _reason(verifier, grant) == "GRANT_EXPIRED"


def test_no_grant_is_missing(verifier: GrantVerifier) -> None:
    assert _reason(verifier, grant_pb2.SignedGrant()) == "GRANT_MISSING"


def test_no_single_bit_can_be_changed(signer: GrantSigner, verifier: GrantVerifier) -> None:
    grant = signer.sign("r1", "a", now_unix_s=NOW)
    for field in ("payload", "signature"):
        original: bytes = getattr(grant, field)
        for bit in range(len(original) * 8):
            changed = bytearray(original)
            changed[bit // 8] ^= 1 << bit % 8
            forged = grant_pb2.SignedGrant()
            forged.CopyFrom(grant)
            setattr(forged, field, bytes(changed))
            assert _reason(verifier, forged) == "GRANT_SIGNATURE"
    forged = grant_pb2.SignedGrant()
    forged.CopyFrom(grant)
    forged.key_id = "0" * 16
    assert _reason(verifier, forged) == "GRANT_UNKNOWN_KEY"


def test_anothers_key_under_a_known_id_is_a_wrong_signature(
    tmp_path: Path, signer: GrantSigner, verifier: GrantVerifier
) -> None:
    ensure_keys(tmp_path / "other")
    other = GrantSigner.load(tmp_path / "other", "mallory")
    grant = other.sign("r1", "a", now_unix_s=NOW)
    assert _reason(verifier, grant) == "GRANT_UNKNOWN_KEY"
    grant.key_id = signer.key_id
    assert _reason(verifier, grant) == "GRANT_SIGNATURE"


def test_a_new_key_is_found_within_a_second_and_the_folder_not_read_more_often(
    tmp_path: Path, keys: Path, verifier: GrantVerifier
) -> None:
    ensure_keys(tmp_path / "other")
    other = GrantSigner.load(tmp_path / "other", "scheduler-2")
    grant = other.sign("r1", "a", now_unix_s=NOW)
    assert _reason(verifier, grant) == "GRANT_UNKNOWN_KEY"
    name = f"{other.key_id}.pem"
    public = tmp_path / "other" / PUBLIC_FOLDER / name
    (keys / PUBLIC_FOLDER / name).write_bytes(public.read_bytes())
    assert _reason(verifier, grant, now=NOW + 0.5) == "GRANT_UNKNOWN_KEY"
    assert _reason(verifier, grant, now=NOW + 1.0) == "OK"


def test_a_file_that_is_no_key_does_not_take_the_others_away(
    keys: Path, signer: GrantSigner
) -> None:
    (keys / PUBLIC_FOLDER / "0000.pem").write_bytes(b"garbage")
    verifier = GrantVerifier.load(keys / PUBLIC_FOLDER)
    assert _reason(verifier, signer.sign("r1", "a", now_unix_s=NOW)) == "OK"


def test_a_verifier_may_start_before_there_are_keys(tmp_path: Path) -> None:
    verifier = GrantVerifier.load(tmp_path / PUBLIC_FOLDER)
    assert len(verifier) == 0
    ensure_keys(tmp_path)
    grant = GrantSigner.load(tmp_path, "s").sign("r1", "a", now_unix_s=NOW)
    assert _reason(verifier, grant) == "OK"


def test_the_private_key_is_the_owners_alone_and_is_kept(keys: Path) -> None:
    private = keys / PRIVATE_FILE
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    before = private.read_bytes()
    assert ensure_keys(keys) == ensure_keys(keys)
    assert private.read_bytes() == before
    assert [path.name for path in keys.iterdir() if path.name.startswith(".new-")] == []


def test_all_who_make_keys_at_once_agree(tmp_path: Path) -> None:
    barrier = threading.Barrier(8)
    ids: list[str] = []

    def make() -> None:
        barrier.wait()
        ids.append(ensure_keys(tmp_path))

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(ids)) == 1
    assert len(list((tmp_path / PUBLIC_FOLDER).glob("*.pem"))) == 1
