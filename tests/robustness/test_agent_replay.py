"""Recorded histories give the same decisions as when they were recorded.

Goal: a new version of the agent service goes on with the runs of the old one as the old one would
have. Method: nine runs, recorded as the JSON of their events (tests/data/histories), are decided
upon anew after every event: with no decision of a person, with each possible one, and cancelled.
Oracle: what was decided then, byte for byte; a change on purpose needs a new number in
agent_svc/domain/next_action.py and new records (`python -m tests.unit.agent.record_histories`).

Seen to fail on mutants: agent_asks_before_it_calls, agent_once_repeated.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agent_svc.domain.next_action import DECISIONS
from tests.unit.agent.record_histories import FOLDER, RUNS, decide

FILES = sorted(FOLDER.glob("*.json"))


def test_every_kind_of_run_is_recorded() -> None:
    assert {path.stem for path in FILES} == {one.__name__ for one in RUNS}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_recorded_history_is_decided_upon_as_before(path: Path) -> None:
    document = json.loads(path.read_text())
    assert document["decisions"] == DECISIONS, "recorded with other decisions"
    decided = json.loads(json.dumps(decide(document)))
    assert json.dumps(decided, sort_keys=True) == json.dumps(document["decided"], sort_keys=True)
