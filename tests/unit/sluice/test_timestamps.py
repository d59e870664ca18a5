"""Times that came in a message. Oracle: the protobuf library's own range, years 1 to 9999."""

from __future__ import annotations

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from sluice.errors import Code, SluiceError
from sluice.timestamps import unix_seconds


def test_a_time_is_seconds_since_1970() -> None:
    assert unix_seconds(Timestamp(seconds=2, nanos=500_000_000), "at") == 2.5
    assert unix_seconds(Timestamp(seconds=-62_135_596_800), "at") == -62_135_596_800


@pytest.mark.parametrize(
    ("seconds", "nanos"),
    [(2**63 - 1, 0), (-(2**63), 0), (253_402_300_800, 0), (0, -1), (0, 1_000_000_000)],
)
def test_what_is_no_time_is_refused_by_field(seconds: int, nanos: int) -> None:
    with pytest.raises(SluiceError) as raised:
        unix_seconds(Timestamp(seconds=seconds, nanos=nanos), "end_time")
    assert raised.value.code is Code.INVALID_ARGUMENT
    assert [one.field for one in raised.value.fields] == ["end_time"]
