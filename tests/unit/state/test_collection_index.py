"""The index of a collection finds exactly what a plain computation over all its chunks finds.

Goal: whatever was added, replaced, removed and merged, scores and order are right. Method: random
histories (Hypothesis) on the index and on a plain list. Oracle: cosine and BM25 written as their
formulas, in Python floats.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from state_svc.domain import collection_index
from state_svc.domain.collection_index import COSINE_MIN, VECTOR_WEIGHT, CollectionIndex
from state_svc.domain.documents import (
    LiveDocument,
    Match,
    Query,
    index_record,
    is_record,
    records_of,
    unit_vectors,
)
from state_svc.domain.segment import K1, B, build
from state_svc.domain.words import terms_of, words

DIMS = 3
WORDS = ["red", "green", "blue", "one", "two"]
FLOAT32 = 1e-5


@dataclass
class Plain:
    """Documents by generation, each with labels and chunks of (text, vector)."""

    documents: dict[int, tuple[LiveDocument, list[tuple[str, list[float]]]]] = field(
        default_factory=dict
    )

    def search(self, query: Query) -> list[Match]:
        chunks = [
            (document, number, text, vector)
            for document, of_it in self.documents.values()
            for number, (text, vector) in enumerate(of_it)
        ]
        mean = max(sum(len(list(words(c[2]))) for c in chunks) / max(len(chunks), 1), 1.0)
        asked = Counter(words(query.words))
        scored = []
        for document, number, text, vector in chunks:
            own = Counter(words(text))
            bm25 = 0.0
            for word, times in asked.items():
                having = sum(word in set(words(c[2])) for c in chunks)
                idf = math.log(1 + (len(chunks) - having + 0.5) / (having + 0.5))
                discount = K1 * (1 - B + B * sum(own.values()) / mean)
                bm25 += times * idf * own[word] * (K1 + 1) / (own[word] + discount)
            cosine = 0.0
            if query.vector is not None:
                pairs = zip(vector, query.vector.tolist(), strict=True)
                cosine = sum(a * b for a, b in pairs) / math.hypot(*vector)
            scored.append((document, number, cosine, bm25))
        return self._ranked(scored, query)

    def _ranked(
        self, scored: list[tuple[LiveDocument, int, float, float]], query: Query
    ) -> list[Match]:
        both = query.vector is not None and query.words
        cosine_max = max((one[2] for one in scored), default=0.0)
        words_max = max((one[3] for one in scored), default=0.0)
        found = []
        for document, number, cosine, bm25 in scored:
            if any(document.labels.get(n) != v for n, v in query.labels.items()):
                continue
            if bm25 <= 0 and cosine <= COSINE_MIN:
                continue
            score = cosine if query.vector is not None else bm25
            if both:
                score = VECTOR_WEIGHT * max(cosine, 0) / cosine_max if cosine_max > 0 else 0.0
                score += (1 - VECTOR_WEIGHT) * bm25 / words_max if words_max > 0 else 0.0
            place = (document.generation, document.document_id, number)
            found.append(Match(*place, score, cosine, bm25))
        return sorted(found, key=lambda m: (-m.score, m.document_id, m.number))[: query.top_k]


texts = st.lists(st.sampled_from(WORDS), max_size=8).map(" ".join)
vectors = st.lists(
    st.floats(-1, 1, allow_nan=False, width=16), min_size=DIMS, max_size=DIMS
).filter(lambda v: math.hypot(*v) > 0.1)
documents = st.tuples(
    st.integers(0, 5),
    st.sampled_from(["x", "y", ""]),
    st.lists(st.tuples(texts, vectors), max_size=4),
)
steps = st.lists(
    st.one_of(st.integers(0, 5), st.lists(documents, min_size=1, max_size=3)), max_size=12
)


def a_vector(values: list[float]) -> bytes:
    return np.array(values, dtype="<f4").tobytes()


def unit(values: list[float]) -> NDArray[np.float32]:
    (vector,) = unit_vectors(np.array([values], dtype=np.float32))
    return np.asarray(vector, dtype=np.float32)


def records(chunks: list[tuple[str, list[float]]]) -> list[bytes]:
    if not chunks:
        return []
    return records_of([text for text, _ in chunks], [a_vector(vector) for _, vector in chunks])


def same(found: list[Match], expected: list[Match]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.score == pytest.approx(other.score, abs=FLOAT32)
    # Scores that differ by less than float32 tells apart may change places.
    by_place = {(m.generation, m.number): m for m in expected}
    for one in found:
        own = by_place.get((one.generation, one.number))
        if own is None:
            assert one.score == pytest.approx(expected[-1].score, abs=FLOAT32)
        else:
            assert one.document_id == own.document_id
            assert one.vector_score == pytest.approx(own.vector_score, abs=FLOAT32)
            assert one.term_score == pytest.approx(own.term_score, abs=FLOAT32)


@settings(max_examples=80, deadline=None)
@given(
    history=steps,
    asked=texts,
    vector=vectors,
    label=st.sampled_from([{}, {"l": "x"}, {"l": "z"}]),
    top_k=st.integers(1, 8),
)
def test_the_index_finds_what_a_plain_computation_finds(
    history: list[int | list[tuple[int, str, list[tuple[str, list[float]]]]]],
    asked: str,
    vector: list[float],
    label: dict[str, str],
    top_k: int,
) -> None:
    index, plain, newest = CollectionIndex(), Plain(), 0
    for step in history:
        gone: list[int] = []
        added = []
        if isinstance(step, int):
            gone = [g for g, (d, _) in plain.documents.items() if d.document_id == f"d{step}"]
        else:
            for name, of_label, chunks in {one[0]: one for one in step}.values():
                newest += 1
                gone += [g for g, (d, _) in plain.documents.items() if d.document_id == f"d{name}"]
                labels = {"l": of_label} if of_label else {}
                made = LiveDocument(newest, f"d{name}", len(chunks), labels)
                plain.documents[newest] = (made, chunks)
                added.append((made, records(chunks)))
        for generation in gone:
            del plain.documents[generation]
        segments = [build(added, DIMS)] if any(chunks for _, chunks in added) else []
        index = index.changed(index.version + 1, DIMS, gone, segments)
    with_chunks = {g for g, (_, chunks) in plain.documents.items() if chunks}
    assert with_chunks <= index.generations() <= plain.documents.keys()
    assert index.rows == sum(len(chunks) for _, chunks in plain.documents.values())
    for query in (
        Query(top_k, asked, unit(vector), label),
        Query(top_k, asked, None, label),
        Query(top_k, "", unit(vector), label),
    ):
        if query.words or query.vector is not None:
            same(index.search(query), plain.search(query))


def test_segments_stay_few_and_searches_in_progress_keep_what_they_have() -> None:
    index = CollectionIndex()
    for n in range(1, 600):
        made = LiveDocument(n, f"d{n}", 1)
        segment = build([(made, records([(f"red {n}", [1.0, 0.0, 0.0])]))], DIMS)
        before = index
        index = index.changed(n, DIMS, [n - 10], [segment])
        assert before.rows == min(n - 1, 10) if n > 10 else True
    assert index.rows == 10
    assert len(index.parts) <= 2 * collection_index.FANOUT
    assert {match.document_id for match in index.search(Query(20, "red"))} == {
        f"d{n}" for n in range(590, 600)
    }


def test_what_matches_neither_by_word_nor_by_vector_is_left_out() -> None:
    """Mutant far_is_a_hit."""
    made = LiveDocument(1, "x", 4)
    east, north, west = [1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [-1.0, 0.0, 0.0]
    chunks = [("red", east), ("green", north), ("blue", west), ("red too", west)]
    index = CollectionIndex().changed(1, DIMS, [], [build([(made, records(chunks))], DIMS)])

    def found(words: str, vector: list[float] | None) -> list[int]:
        query = Query(10, words, None if vector is None else unit(vector))
        return sorted(match.number for match in index.search(query))

    assert found("red", east) == [0, 3]
    assert found("", east) == [0]
    assert found("red", None) == [0, 3]
    assert found("black", [0.0, 0.0, 1.0]) == []
    assert found("", [1.0, 0.001, 0.0]) == [0], "a cosine of 0.001 is none"
    assert found("black", [0.19, 0.0, 1.0]) == [], "words without sense come to 0.12"
    assert found("black", [0.21, 0.0, 1.0]) == [0]


def test_equal_scores_come_in_the_order_of_documents_and_chunks() -> None:
    index = CollectionIndex()
    for n, name in enumerate("cab", start=1):
        made = LiveDocument(n, name, 2)
        segment = build([(made, records([("red", [1.0, 0.0, 0.0])] * 2))], DIMS)
        index = index.changed(n, DIMS, [], [segment])
    found = index.search(Query(10, "red", unit([1.0, 0.0, 0.0])))
    assert [(m.document_id, m.number) for m in found] == [(d, n) for d in "abc" for n in (0, 1)]


@pytest.mark.parametrize("bad", [[0.0, 0.0, 0.0], [math.nan, 0, 0], [math.inf, 0, 0]], ids=str)
def test_a_vector_without_direction_is_refused_by_its_number(bad: list[float]) -> None:
    with pytest.raises(ValueError, match="1"):
        records_of(["a", "b"], [a_vector([1.0, 0, 0]), a_vector(bad)])


def test_vectors_of_any_size_get_length_one() -> None:
    large = unit_vectors(np.array([[3e38, 3e38, 0], [1e-38, 0, 0]], dtype=np.float32))
    assert np.allclose(np.linalg.norm(large, axis=1), 1)


def test_a_damaged_record_is_told() -> None:
    record = index_record(unit([1, 2, 3]), terms_of("red green"))
    assert is_record(record, DIMS)
    for damaged in (record[:-1], record[: DIMS * 4 - 1], b""):
        assert not is_record(damaged, DIMS)
        with pytest.raises(ValueError, match="length"):
            build([(LiveDocument(1, "x", 1), [damaged])], DIMS)
