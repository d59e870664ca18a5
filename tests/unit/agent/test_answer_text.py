"""The words of an answer, however the pieces of a reply are cut."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_svc.domain.answer_text import AnswerField, MarkedText

CUTS = st.lists(st.integers(1, 9), max_size=30)


def pieces(text: str, cuts: list[int]) -> list[str]:
    """The text in pieces of the given lengths, then the rest."""
    made, at = [], 0
    for length in cuts:
        made.append(text[at : at + length])
        at += length
    return [*made, text[at:]]


def shown(text: str, cuts: list[int]) -> str:
    field = AnswerField()
    return "".join(field.push(piece) for piece in pieces(text, cuts))


@given(
    st.text(), CUTS, st.booleans(), st.sampled_from([(",", ":"), (", ", " : "), (" ,\n", ":\t")])
)
def test_the_answer_comes_whole_however_it_is_cut_and_escaped(
    answer: str, cuts: list[int], ascii_only: bool, separators: tuple[str, str]
) -> None:
    text = json.dumps({"answer": answer}, ensure_ascii=ascii_only, separators=separators)
    assert shown(text, cuts) == answer


@given(st.text(), st.text(), CUTS)
def test_only_the_key_at_the_top_is_the_answer(answer: str, other: str, cuts: list[int]) -> None:
    value = {
        "first": {"answer": other, "list": ["answer", {"answer": other}]},
        "answe": other,
        "answers": "answer",
        "answer": answer,
        "after": other,
    }
    assert shown(json.dumps(value), cuts) == answer


@given(st.text(), CUTS)
def test_a_call_has_no_words(text: str, cuts: list[int]) -> None:
    call = {"tool": "answer", "arguments": {"answer": text, "q": "answer"}}
    assert shown(json.dumps(call), cuts) == ""
    assert shown(json.dumps({"calls": [call, {"answer": text}]}), cuts) == ""
    assert shown(json.dumps([{"answer": text}]), cuts) == ""
    assert shown(json.dumps({"answer": {"answer": text}}), cuts) == ""


@given(st.text(min_size=1), CUTS)
def test_what_is_shown_early_is_the_beginning_of_the_answer(answer: str, cuts: list[int]) -> None:
    text = json.dumps({"answer": answer})
    field, seen = AnswerField(), ""
    for piece in pieces(text, cuts):
        seen += field.push(piece)
        assert answer.startswith(seen)


def test_characters_leave_as_soon_as_they_are_known() -> None:
    field = AnswerField()
    assert [
        field.push(piece)
        for piece in ('{"answer":"a', "b", "\\", "n", "\\ud83d", "\\ude00", '"', "}")
    ] == ["a", "b", "", "\n", "", "😀", "", ""]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ('{"answer": "\\ud83dx"}', "\ufffdx"),
        ('{"answer": "\\ud83d\\ud83d\\ude00"}', "\ufffd😀"),
        ('{"answer": "\\ude00"}', "\ufffd"),
        ('{"answer": "\\ud83d"}', "\ufffd"),
        ('{"answer": "\\ud83d\\n"}', "\ufffd\n"),
        ('{"answer": "\\uZZZZ."}', "\ufffd."),
        ('{"answer": "\\q"}', "\ufffd"),
        ('{"answer": 7, "answer": "x"}', "x"),
        ('{"answer": "cut o', "cut o"),
        ('}}}{"answer": "x"}', ""),
        ("no json at all", ""),
    ],
)
def test_broken_json_gives_whole_characters_and_never_fails(text: str, answer: str) -> None:
    for cut in range(len(text) + 1):
        assert shown(text, [cut] if cut else []) == answer


@given(st.text(alphabet='{}[]":,\\uansweréd8 \n'), CUTS)
def test_any_text_in_any_pieces_shows_the_same_storable_words(text: str, cuts: list[int]) -> None:
    whole = shown(text, [])
    assert shown(text, cuts) == whole
    whole.encode()


def test_nothing_is_kept_of_a_long_key() -> None:
    field = AnswerField()
    for _ in range(1000):
        assert field.push("{" + '"' + "k" * 1000 + '":1,') == ""
    assert len(field._key) < 10


def marked(text: str, cuts: list[int], opening: str = "") -> str:
    made = MarkedText(("<tool_call>",), opening)
    return "".join(made.push(piece) for piece in pieces(text, cuts)) + made.rest()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Paris.", "Paris."),
        ("a < b <tool", "a < b <tool"),
        ('I look.<tool_call>{"name": "x"}</tool_call> more', "I look."),
        ("<think>secret <tool_call></think>\n\nParis.", "Paris."),
        ("<think>never ends", ""),
        ("One<think>x</think> two", "One two"),
        ('<tool_call>{"name": "x"}</tool_call>', ""),
    ],
)
@given(cuts=CUTS)
def test_words_before_a_mark_and_outside_thoughts(text: str, words: str, cuts: list[int]) -> None:
    assert marked(text, cuts) == words


@given(cuts=CUTS)
def test_a_text_that_opens_as_a_call_is_one(cuts: list[int]) -> None:
    assert marked('  {"name": "x"}', cuts, opening="{") == ""
    assert marked("  set {1}", cuts, opening="{") == "set {1}"
