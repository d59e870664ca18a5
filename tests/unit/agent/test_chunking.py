"""Chunks cover a document, fit the embedding model, and are always the same.

Oracle: properties of every text (Hypothesis), and examples of what a reader expects.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_svc.domain.chunking import (
    Block,
    Chunk,
    ChunkSizes,
    TooManyChunksError,
    chunk,
    estimated_tokens,
)

SMALL = ChunkSizes(bytes_max=60, tokens_max=20, overlap_bytes=25)


def plain(text: str, begin: int = 0) -> Block:
    """A block that is its bytes exactly."""
    return Block(text, begin, begin + len(text.encode()))


def test_sentences_stay_whole_and_the_last_one_is_repeated() -> None:
    text = "One is here. Two is here. Three is here! Four is here? Five is here. Six."
    chunks = chunk([plain(text)], SMALL)
    assert [one.text for one in chunks] == [
        "One is here. Two is here. Three is here! Four is here?",
        "Four is here? Five is here. Six.",
    ]
    assert [text[one.begin_byte : one.end_byte].strip() for one in chunks] == [
        one.text for one in chunks
    ]
    assert [one.number for one in chunks] == [0, 1]


def test_each_chunk_of_a_section_begins_with_its_headings() -> None:
    blocks = [
        Block("Returns", 0, 9, 1),
        plain("All goods.", 10),
        Block("Exceptions", 21, 34, 2),
        plain("First a sentence. Then another one. And a third one here.", 40),
        Block("Contact", 100, 109, 1),
    ]
    assert chunk(blocks, SMALL) == [
        Chunk(0, "Returns\nAll goods.", 0, 20),
        Chunk(1, "Returns > Exceptions\nFirst a sentence. Then another one.", 21, 76),
        # A heading that nothing follows is text of what came before.
        Chunk(2, "Returns > Exceptions\nAnd a third one here.\nContact", 76, 109),
    ]


def test_headings_without_text_belong_to_the_text_that_comes_next() -> None:
    blocks = [
        Block("Handbook", 7, 15, 1),
        Block("Warranty", 40, 48, 1),
        Block("Battery", 60, 67, 2),
        plain("Two years.", 70),
        Block("Frame", 90, 95, 2),
        plain("For life.", 100),
    ]
    assert chunk(blocks, SMALL) == [
        Chunk(0, "Handbook > Warranty > Battery\nTwo years.", 7, 80),
        Chunk(1, "Warranty > Frame\nFor life.", 90, 109),
    ]


def test_a_title_that_is_the_first_heading_again_is_shown_once() -> None:
    blocks = [Block("Warranty", 7, 15, 1), Block("Warranty", 40, 48, 1), plain("Two years.", 70)]
    assert chunk(blocks, SMALL) == [Chunk(0, "Warranty\nTwo years.", 7, 80)]


def test_a_title_alone_is_a_chunk_where_there_is_nothing_else() -> None:
    blocks = [Block("Warranty", 7, 15, 1), Block("Battery", 40, 47, 2)]
    assert chunk(blocks, SMALL) == [Chunk(0, "Warranty\nBattery", 7, 47)]


def test_headings_that_have_no_room_above_a_text_are_text() -> None:
    names = [f"a heading of some length {number}" for number in range(9)]
    blocks = [Block(name, 100 * n, 100 * n + len(name), 1) for n, name in enumerate(names)]
    chunks = chunk([*blocks, plain("the text", 900)])
    assert [one.begin_byte for one in chunks][:1] == [0]
    assert all(any(name in one.text for one in chunks) for name in names)
    assert all(one.text.startswith(names[-1]) for one in chunks)
    assert chunks[-1].text.endswith("the text")


def test_a_long_heading_is_cut_as_heading_and_whole_as_text() -> None:
    long = "word " * 60
    (first, *_) = chunk([Block(long, 0, 300, 1), plain("text", 300)])
    assert first.text.startswith(long[:119].strip() + "\nword")
    assert first.text.count("word") > 60


def test_what_differs_from_its_bytes_has_the_range_of_its_block() -> None:
    block = Block("One is here. Two is here. Three is here! Four. Five is here.", 100, 500)
    assert {(one.begin_byte, one.end_byte) for one in chunk([block], SMALL)} == {(100, 500)}


def test_scripts_without_spaces_are_cut_at_their_own_stops() -> None:
    chunks = chunk([plain("東京は日本の首都。人口は多い。とても広い。")], SMALL)
    assert [one.text for one in chunks] == [
        "東京は日本の首都。人口は多い。",
        "人口は多い。とても広い。",
    ]


def test_nothing_makes_no_chunk() -> None:
    assert chunk([]) == []
    assert chunk([plain(" \n "), plain("")]) == []


def test_a_text_of_too_many_chunks_is_told() -> None:
    with pytest.raises(TooManyChunksError):
        chunk([plain("a. " * 500)], ChunkSizes(bytes_max=30, chunks_max=5))


texts = st.text(
    st.one_of(st.sampled_from('ab c.!\n"é。東😀{}9'), st.characters(exclude_categories=["Cs"])),
    max_size=400,
)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(texts, st.sampled_from([0, 0, 0, 1, 2])), max_size=5))
def test_every_word_is_in_a_chunk_that_fits_and_covers_it(parts: list[tuple[str, int]]) -> None:
    content = b""
    blocks = []
    for text, level in parts:
        blocks.append(Block(text, len(content), len(content) + len(text.encode()), level))
        content += text.encode() + b"\n"
    chunks = chunk(blocks, SMALL)
    assert chunks == chunk(blocks, SMALL)
    assert [one.number for one in chunks] == list(range(len(chunks)))
    for one in chunks:
        assert 0 <= one.begin_byte < one.end_byte <= len(content)
        assert one.text.strip()
        # A heading takes at most its own bound; then one piece is always taken.
        body = one.text.encode()
        assert len(body) <= 120 + 1 + SMALL.bytes_max
    covered = bytearray(len(content))
    for one in chunks:
        covered[one.begin_byte : one.end_byte] = b"\1" * (one.end_byte - one.begin_byte)
    left = bytes(b for b, seen in zip(content, covered, strict=True) if not seen)
    assert not left.decode(errors="ignore").strip()


@given(texts)
def test_a_text_is_never_estimated_at_less_than_a_token_a_word(text: str) -> None:
    assert estimated_tokens(text) >= len(text.split())


def test_what_is_dense_in_tokens_is_cut_smaller() -> None:
    sizes = {
        name: max(len(one.text) for one in chunk([plain(text)]))
        for name, text in {
            "prose": "The quick brown fox jumps over the lazy dog. " * 100,
            "marks": "{}[]();:" * 500,
            "hashes": "9f86d081884c7d659a2feaa0c55ad015 " * 100,
            "han": "東京は日本の首都" * 300,
        }.items()
    }
    assert sizes["prose"] > 800
    assert max(sizes["marks"], sizes["han"]) <= 210
    assert sizes["hashes"] < 350
