"""Named points at which a test can have a process end as SIGKILL would end it.

They stand before and after what is durable or has an effect outside the process: there a crash must
change nothing. :func:`fault_point` does nothing unless the environment names its point in
``SLUICE_FAULT_POINT`` (``name``, or ``name:3`` for the third time that it is passed); then the
process ends at once, with nothing flushed or closed. :data:`POINTS` is the list of all; a name that
is not on it is an error, and a test shows that each one is passed.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Final

VARIABLE: Final = "SLUICE_FAULT_POINT"
EXIT_STATUS: Final = 137  # as a shell says of SIGKILL

POINTS: Final = frozenset(
    {
        # The agent service.
        "agent.claimed",  # runs are held, nothing was done for them
        "agent.before_append",
        "agent.after_append",
        "agent.before_model_call",
        "agent.after_model_call",  # the answer is here and nowhere else
        "agent.before_tool_call",  # that it begins is stored
        "agent.after_tool_call",  # its result is here and nowhere else
        "agent.before_wait",  # the run is about to be given back for a person
        "agent.before_pause",
        "agent.before_end",
        "agent.after_end",
        "agent.before_hand_over",
        "agent.before_store_chunks",
        "agent.after_store_chunks",
        # The state service: around the scripts that change runs.
        "state.before_create",  # the run may be looked for already
        "state.after_create",  # nobody was told of it
        "state.before_claim",
        "state.after_claim",  # it is held, and its holder does not know
        "state.before_append",
        "state.after_append",
        "state.before_resume",
        "state.after_resume",
        "state.before_cancel",
        "state.after_cancel",
        # The state service: around the steps that delete and replace a tenant.
        "tenants.after_delete",  # the name is marked, and nobody was told
        "tenants.before_purge",  # the fences are closed, and nothing is gone
        "tenants.before_gone",  # everything is gone, and the mark does not say so
        "tenants.after_create",  # the new tenant is there behind closed fences
        "tenants.before_unmark",  # the fences are open, and the mark does not say so
    }
)

_passed: Counter[str] = Counter()
_name, _times = "", 0


def arm(text: str) -> None:
    """Ends the process at ``name`` or ``name:3``; nowhere when empty. ValueError for no point."""
    global _name, _times
    name, _, times = text.partition(":")
    if name and (name not in POINTS or not (times or "1").isdecimal()):
        raise ValueError(f"{VARIABLE}: {text!r} is no fault point")
    _name, _times = name, int(times or "1")
    _passed.clear()


def fault_point(name: str) -> None:
    """Passes the point ``name``; the process ends here if it was asked to."""
    if not _name:
        return
    assert name in POINTS, f"{name} is not in the list of fault points"
    _passed[name] += 1
    if name == _name and _passed[name] == _times:
        os._exit(EXIT_STATUS)


arm(os.environ.get(VARIABLE, ""))
