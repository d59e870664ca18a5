"""Words and vectors together find more than either alone, on a sample of real questions.

The sample (tests/data/SOURCE.md) holds 12 questions of HotpotQA with their passages, and vectors
that all-MiniLM-L6-v2 made of them. It was chosen because the three ways to search differ on it;
the figure of all 100 questions is that of `make bench-recall`.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from bench.recall import CHUNKS_LOOKED_AT, Question, chunks_of, load, recall
from state_svc.domain.collection_index import CollectionIndex
from state_svc.domain.documents import LiveDocument, Query, records_of, unit_vectors
from state_svc.domain.segment import build

SAMPLE = Path(__file__).resolve().parents[2] / "data" / "hotpotqa_sample.json"
DIMS = 384


def vector_of(kept: str) -> NDArray[np.float32]:
    return np.frombuffer(base64.b64decode(kept), dtype="<f2").astype("<f4")


@pytest.fixture(scope="module")
def sample() -> Any:
    return json.loads(SAMPLE.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def index(sample: Any) -> CollectionIndex:
    chunks = sample["chunks"]
    vectors = [vector_of(one["vector"]).tobytes() for one in chunks]
    records = records_of([one["text"] for one in chunks], vectors)
    documents = [
        (LiveDocument(number, one["document"], 1), [record])
        for number, (one, record) in enumerate(zip(chunks, records, strict=True), start=1)
    ]
    return CollectionIndex().changed(1, DIMS, [], [build(documents, DIMS)])


def found_by(sample: Any, index: CollectionIndex, *, words: bool, vector: bool) -> float:
    questions = [Question(one["text"], frozenset(one["gold"])) for one in sample["questions"]]
    found = []
    for one in sample["questions"]:
        (of,) = unit_vectors(vector_of(one["vector"]).reshape(1, -1))
        query = Query(CHUNKS_LOOKED_AT, one["text"] if words else "", of if vector else None)
        found.append([match.document_id for match in index.search(query)])
    return recall(found, questions)


def test_both_together_find_more_than_either_alone(sample: Any, index: CollectionIndex) -> None:
    both = found_by(sample, index, words=True, vector=True)
    by_words = found_by(sample, index, words=True, vector=False)
    by_vector = found_by(sample, index, words=False, vector=True)
    assert both == pytest.approx(0.958, abs=0.001)
    assert by_words == pytest.approx(0.833, abs=0.001)
    assert by_vector == pytest.approx(0.917, abs=0.001)


def test_recall_counts_different_documents_among_the_first() -> None:
    questions = [Question("q", frozenset({"a", "b"})), Question("q", frozenset({"a"}))]
    found = [["a", "a", "x", "b"], ["x", "y", "a"]]
    assert recall(found, questions, k=2) == pytest.approx(0.25)
    assert recall(found, questions, k=3) == pytest.approx(1.0)


def test_questions_and_passages_are_read_as_they_are_published(tmp_path: Path) -> None:
    asked = [{"question": "Who?", "supporting_facts": [["A", 0], ["A", 2], ["B", 1]]}]
    (tmp_path / "hotpotqa_train.json").write_text(json.dumps(asked))
    (tmp_path / "hotpotqa_train_corpus.json").write_text(json.dumps({"A": ["One.", " Two."]}))
    questions, passages = load(tmp_path)
    assert questions == [Question("Who?", frozenset({"A", "B"}))]
    assert passages == {"A": chunks_of("A", "One. Two.")}
    assert passages["A"][0].text == "A\nOne. Two."
