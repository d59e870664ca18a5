"""How processes of one mesh are marked, so that they can be told apart from all others."""

from __future__ import annotations

import hashlib
from pathlib import Path

# In the environment of every process of a mesh. Not SLUICE_MESH_...: that would be a setting of
# the section [mesh].
MARK_VARIABLE = "SLUICE_MARK"


def mark_of(runtime_dir: Path) -> str:
    """The mark of the mesh that lives in `runtime_dir`.

    A function of the folder, so that processes of ours are still known when every run file is lost.
    """
    return hashlib.sha256(str(runtime_dir.resolve()).encode()).hexdigest()[:16]
