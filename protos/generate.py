"""Generates the typed Python stubs and the descriptor image from the protos.

Run as ``python protos/generate.py`` (``make protos``). Writes, none of it tracked:

* ``sluice/<package>/v1/*_pb2.py``, ``*_pb2_grpc.py`` and their ``.pyi`` stubs, next to the
  runtime, because the proto packages are ``sluice.<package>.v1``;
* ``protos/build/sluice.binpb``: a FileDescriptorSet with imports and comments, read by Envoy's
  transcoder, by reflection tests and by ``buf``.

Output is replaced only when its content changed, so that running twice costs mtime-based tools
nothing. Fails with protoc's own message and status when a proto is wrong.
"""

from __future__ import annotations

import filecmp
import importlib.resources
import os
import shutil
import sys
import tempfile
from pathlib import Path

import google.rpc
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
IMAGE = PROTOS / "build" / "sluice.binpb"


def include_paths() -> list[Path]:
    """Where protos are found: ours, Google's well-known types, Google's API types."""
    well_known = Path(str(importlib.resources.files("grpc_tools") / "_proto"))
    google_api = Path(next(iter(google.rpc.__path__))).parent.parent
    return [PROTOS, well_known, google_api]


def run_protoc(out: Path, files: list[str]) -> int:
    """Runs protoc with all generators into ``out``; returns its exit status."""
    # protoc looks for its plugins on PATH; they are installed beside the interpreter.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    arguments = ["protoc"]
    arguments += [f"-I{path}" for path in include_paths()]
    arguments += [f"--{kind}_out={out}" for kind in ("python", "grpc_python")]
    arguments += [f"--{kind}_out=quiet:{out}" for kind in ("mypy", "mypy_grpc")]
    arguments += [
        f"--descriptor_set_out={out / 'sluice.binpb'}",
        "--include_imports",
        "--include_source_info",
    ]
    return int(protoc.main(arguments + files))


def replace_if_changed(source: Path, target: Path) -> bool:
    """Moves ``source`` over ``target`` unless they are equal; says whether it did."""
    if target.exists() and filecmp.cmp(source, target, shallow=False):
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(source, target)
    return True


def main() -> int:
    """Generates everything; returns a process exit status."""
    files = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.glob("sluice/*/v1/*.proto"))
    with tempfile.TemporaryDirectory(dir=PROTOS) as scratch:
        out = Path(scratch)
        if status := run_protoc(out, files):
            return status
        for package in sorted(out.glob("sluice/*/v1")):
            (package / "__init__.py").write_text('"""Generated from protos/; do not edit."""\n')
        changed = [replace_if_changed(out / "sluice.binpb", IMAGE)]
        expected = set()
        for source in sorted(path for path in out.glob("sluice/**/*") if path.is_file()):
            target = ROOT / source.relative_to(out)
            expected.add(target)
            changed.append(replace_if_changed(source, target))
        for stale in set(ROOT.glob("sluice/*/v1/*.py*")) - expected:
            stale.unlink()
    if any(changed):
        print(f"protos: {len(files)} files, {sum(changed)} outputs changed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
