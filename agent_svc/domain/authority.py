"""Whether a run may call a tool. The model is an untrusted user: what it writes grants nothing.

Pure. A run's names come from its spec, where the scheduler put what the tenant's list allowed when
the run was admitted; the list as it is now has to allow a call too.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

JOINT: Final = "__"  # between the name of a server or document and that of one of its tools


def grants(names: Collection[str], tool: str) -> bool:
    """Whether ``names`` holds the tool or the server or document that it belongs to. Exact: case,
    spaces and look-alikes make another name."""
    owner, joint, own = tool.partition(JOINT)
    return tool in names or bool(joint and owner and own and owner in names)


def owners(names: Sequence[str]) -> tuple[str, ...]:
    """The declarations that the names may come from, in their order, each once."""
    return tuple(dict.fromkeys(name.partition(JOINT)[0] for name in names if name))
