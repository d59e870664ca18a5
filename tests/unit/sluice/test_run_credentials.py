"""Run credentials.

Goal: only what a scheduler signed for this run passes, as it was signed and in its time. Method:
good credentials changed in one respect each; every single-bit change of payload, signature and key
id. Oracle: the reason. Mutant seen to fail: credential_taken_for_granted.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from sluice.common.v1 import grant_pb2, policy_pb2
from sluice.errors import Code, SluiceError
from sluice.grants import CLOCK_SKEW_S, PUBLIC_FOLDER, GrantSigner, GrantVerifier, ensure_keys
from sluice.run_credentials import (
    CREDENTIAL_BYTES_MAX,
    CREDENTIAL_TTL_S,
    RENEWABLE_S,
    CredentialSigner,
    CredentialVerifier,
)
from sluice.scheduler.v1 import mesh_pb2

NOW = 1_800_000_000.25
Signed = mesh_pb2.SignedRunCredential


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    ensure_keys(tmp_path)
    return tmp_path


@pytest.fixture
def grants(keys: Path) -> GrantSigner:
    return GrantSigner.load(keys, "scheduler-1")


@pytest.fixture
def signer(grants: GrantSigner) -> CredentialSigner:
    return CredentialSigner(grants)


@pytest.fixture
def verifier(keys: Path) -> CredentialVerifier:
    return CredentialVerifier(keys / PUBLIC_FOLDER)


def signed(signer: CredentialSigner, now: float = NOW) -> Signed:
    return signer.sign(
        run_id="r",
        tenant="t",
        priority_class=policy_pb2.PRIORITY_CLASS_BATCH,
        models=["m", "e"],
        now_unix_s=now,
    )


def judged(verifier: CredentialVerifier, credential: Signed, now: float = NOW) -> str:
    """The reason of a refusal, or OK."""
    try:
        verifier.verify(credential, now_unix_s=now)
    except SluiceError as error:
        return error.reason if error.code is Code.UNAUTHENTICATED else error.code.name
    return "OK"


def test_a_credential_says_what_was_signed(
    signer: CredentialSigner, verifier: CredentialVerifier
) -> None:
    content = verifier.verify(signed(signer), now_unix_s=NOW)
    assert (content.run_id, content.tenant, list(content.models)) == ("r", "t", ["m", "e"])
    assert content.priority_class == policy_pb2.PRIORITY_CLASS_BATCH


def test_a_credential_is_void_outside_its_time(
    signer: CredentialSigner, verifier: CredentialVerifier
) -> None:
    credential = signed(signer)
    last = NOW + CREDENTIAL_TTL_S + CLOCK_SKEW_S
    assert judged(verifier, credential, last - 0.001) == "OK"
    assert judged(verifier, credential, last + 0.001) == "CREDENTIAL_EXPIRED"
    # Signed by a clock that is far ahead: it would hold for too long.
    assert judged(verifier, credential, NOW - CLOCK_SKEW_S + 0.001) == "OK"
    assert judged(verifier, credential, NOW - CLOCK_SKEW_S - 0.1) == "CREDENTIAL_EXPIRED"


def test_no_single_bit_can_be_changed(
    signer: CredentialSigner, verifier: CredentialVerifier
) -> None:
    good = signed(signer)
    for field in ("payload", "signature"):
        value = getattr(good, field)
        for bit in range(8 * len(value)):
            changed = bytearray(value)
            changed[bit // 8] ^= 1 << bit % 8
            bad = Signed()
            bad.CopyFrom(good)
            setattr(bad, field, bytes(changed))
            assert judged(verifier, bad) == "CREDENTIAL_SIGNATURE"
    for number in range(len(good.key_id)):
        bad = Signed()
        bad.CopyFrom(good)
        bad.key_id = good.key_id[:number] + "x" + good.key_id[number + 1 :]
        assert judged(verifier, bad) == "CREDENTIAL_UNKNOWN_KEY"


def test_what_is_missing_or_too_long_is_refused(
    signer: CredentialSigner, verifier: CredentialVerifier
) -> None:
    good = signed(signer)
    assert judged(verifier, Signed()) == "CREDENTIAL_MISSING"
    assert judged(verifier, Signed(payload=good.payload)) == "CREDENTIAL_MISSING"
    good.payload += b"\0" * CREDENTIAL_BYTES_MAX
    assert judged(verifier, good) == "CREDENTIAL_SIGNATURE"


def test_another_schedulers_key_counts_once_it_is_in_the_folder(
    keys: Path, tmp_path: Path, verifier: CredentialVerifier
) -> None:
    other = ensure_keys(tmp_path / "other")
    theirs = signed(CredentialSigner(GrantSigner.load(tmp_path / "other", "scheduler-2")))
    assert judged(verifier, theirs) == "CREDENTIAL_UNKNOWN_KEY"
    name = f"{other}.pem"
    (keys / PUBLIC_FOLDER / name).write_bytes(
        (tmp_path / "other" / PUBLIC_FOLDER / name).read_bytes()
    )
    assert judged(verifier, theirs, NOW + 1.1) == "OK"


def test_a_grant_is_no_credential_and_a_credential_no_grant(
    keys: Path, grants: GrantSigner, signer: CredentialSigner, verifier: CredentialVerifier
) -> None:
    grant = grants.sign("r", "*", now_unix_s=NOW)
    as_credential = Signed(payload=grant.payload, signature=grant.signature, key_id=grant.key_id)
    assert judged(verifier, as_credential) == "CREDENTIAL_SIGNATURE"
    credential = signed(signer)
    as_grant = grant_pb2.SignedGrant(
        payload=credential.payload, signature=credential.signature, key_id=credential.key_id
    )
    with pytest.raises(SluiceError) as caught:
        GrantVerifier.load(keys / PUBLIC_FOLDER).verify(
            as_grant, request_id="r", instance="t", now_unix_s=NOW
        )
    assert caught.value.reason == "GRANT_SIGNATURE"


def test_an_expired_one_is_renewed_with_the_same_rights(
    signer: CredentialSigner, verifier: CredentialVerifier
) -> None:
    old = signed(signer)
    later = NOW + CREDENTIAL_TTL_S + 3 * 86_400.0
    assert judged(verifier, old, later) == "CREDENTIAL_EXPIRED"
    content = verifier.verify_for_renewal(old, now_unix_s=later)
    fresh = verifier.verify(signer.renew(content, now_unix_s=later), now_unix_s=later)
    assert fresh.expire_time.seconds == int(later + CREDENTIAL_TTL_S)
    for each in (content, fresh):
        each.ClearField("expire_time")
    assert fresh == content


def test_one_that_is_long_gone_is_not_renewed(
    signer: CredentialSigner, verifier: CredentialVerifier
) -> None:
    last = NOW + CREDENTIAL_TTL_S + RENEWABLE_S
    verifier.verify_for_renewal(signed(signer), now_unix_s=last - 1)
    with pytest.raises(SluiceError, match="CREDENTIAL_EXPIRED"):
        verifier.verify_for_renewal(signed(signer), now_unix_s=last + 1)
