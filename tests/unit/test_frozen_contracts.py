"""The frozen image of the contracts: what clients were promised, and that breaks are found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2

ROOT = Path(__file__).resolve().parents[2]
BUF = Path(sys.executable).parent / "buf"
FROZEN = max(
    (ROOT / "protos").glob("contracts-*.binpb"), key=lambda path: int(path.stem.partition("-")[2])
)


def _breaks(image: Path) -> str:
    """What `buf breaking` says of an image against the frozen one; empty when it is compatible."""
    command = [str(BUF), "breaking", str(image), "--against", str(FROZEN), "--path", "sluice"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert not run.stderr.startswith("Failure"), run.stderr
    return run.stdout


def _without_a_field(image: descriptor_pb2.FileDescriptorSet) -> str:
    file = _public(image)
    message = next(m for m in file.message_type if m.name == "GenerateRequest")
    del message.field[0]
    return "prompt"


def _with_another_number(image: descriptor_pb2.FileDescriptorSet) -> str:
    file = _public(image)
    message = next(m for m in file.message_type if m.name == "GenerateFinished")
    message.field[0].number = 99
    return "outputs"


def _with_another_type(image: descriptor_pb2.FileDescriptorSet) -> str:
    file = _public(image)
    message = next(m for m in file.message_type if m.name == "GenerateDelta")
    message.field[0].type = descriptor_pb2.FieldDescriptorProto.TYPE_BYTES
    return "text"


def _public(image: descriptor_pb2.FileDescriptorSet) -> descriptor_pb2.FileDescriptorProto:
    return next(f for f in image.file if f.name == "sluice/scheduler/v1/generate.proto")


def test_the_contracts_of_today_keep_what_was_frozen() -> None:
    assert _breaks(ROOT / "protos" / "build" / "sluice.binpb") == ""


@pytest.mark.parametrize("change", [_without_a_field, _with_another_number, _with_another_type])
def test_a_break_is_found(change: object, tmp_path: Path) -> None:
    image = descriptor_pb2.FileDescriptorSet.FromString(FROZEN.read_bytes())
    assert callable(change)
    named = change(image)
    broken = tmp_path / "broken.binpb"
    broken.write_bytes(image.SerializeToString())
    assert named in _breaks(broken)
