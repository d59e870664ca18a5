"""What counts as a word. Oracle: examples in several languages, and properties of every text."""

from __future__ import annotations

import time
import unicodedata
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from state_svc.domain.words import COUNT_MAX, term, terms_of, words


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Bob's cat, BOB’S cat_2!", ["bob", "s", "cat", "bob", "s", "cat_2"]),
        ("Straße STRASSE", ["strasse", "strasse"]),
        ("ﬁne ①", ["fine", "1"]),  # compatibility forms
        ("Ärger Ärger", ["ärger", "ärger"]),  # composed and not
        ("東京タワーへ", ["東京", "京タ", "タワ", "ワー", "ーへ"]),
        ("GPU東京", ["gpu", "東京"]),
        ("水", ["水"]),
        ("ภาษา", ["ภา", "าษ", "ษา"]),
        ("мир Ἀθήνα", ["мир", "ἀθήνα"]),
        ("... --- !!!", []),
        ("", []),
        ("a" * 70, ["a" * 64]),
    ],
)
def test_words_of_many_languages(text: str, expected: list[str]) -> None:
    assert list(words(text)) == expected


def test_a_hash_never_changes_since_it_is_stored() -> None:
    assert term("gate") == 0xC0D073DFC6EC3AC2
    assert term("é") == 0x2F19F3EF8BBF1ACB


@given(st.text(max_size=300))
def test_every_text_is_counted_whole_and_in_order_of_hashes(text: str) -> None:
    counted = Counter(term(word) for word in words(text))
    terms = terms_of(text)
    assert dict(zip(terms.hashes.tolist(), terms.counts.tolist(), strict=True)) == counted
    assert terms.hashes.tolist() == sorted(counted)


def test_a_word_is_counted_up_to_a_bound() -> None:
    assert terms_of("x " * (COUNT_MAX + 5)).counts.tolist() == [COUNT_MAX]


@given(st.text(max_size=100))
def test_letter_case_makes_no_difference(text: str) -> None:
    assert list(words(text.casefold())) == list(words(text))


@pytest.mark.parametrize(
    "marks", ["\u0301\u0316", "\uff9e\u0301", "\u0f73\u0f75\u0f81\u0301"], ids=ascii
)
def test_accents_heaped_on_a_letter_cost_no_more_than_letters(marks: str) -> None:
    """Putting marks in order takes time with the square of their number: of 16 KiB 100 ms, in which
    no other thread runs."""
    many = "a" + marks * (30_000 // len(marks)) + " end"
    begin = time.thread_time()
    found = list(words(many))
    assert time.thread_time() - begin < 0.3  # 0.7 s and more else; 0.02 s so
    assert found[-1] == "end"


def test_accents_as_people_write_them_stay() -> None:
    heaped = "o" + "\u0302\u0301\u0323" * 10  # as much as any text has
    assert list(words(heaped)) == list(words(unicodedata.normalize("NFC", heaped)))
    assert list(words("a" + "\u0301" * 40 + "b")) == list(words("a" + "\u0301" * 32 + "b"))
