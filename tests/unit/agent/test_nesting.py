"""Depth is told by one pass: what is written to be deep is found, what people write passes.

Oracle: the depth that each document was built with, and the tree of the parser itself for those
that try to hide it. Seen to fail on the mutant depth_hidden_in_quotes.
"""

from __future__ import annotations

import time

import pytest
from selectolax.lexbor import LexborHTMLParser

from agent_svc.domain.nesting import ELEMENTS_MAX, MARKERS_MAX, MARKS_MAX, too_deep

MIB = 1 << 20
DEEP = "<div>" * (ELEMENTS_MAX + 1)


def depth(source: str) -> int:
    """The deepest element of the tree that is made of a source."""
    node, level, most = LexborHTMLParser(source).root, 0, 0
    while node is not None:
        most = max(most, level)
        if node.child is not None:
            node, level = node.child, level + 1
            continue
        while node is not None and node.next is None:
            node, level = node.parent, level - 1
        node = node.next if node is not None else None
    return most


@pytest.mark.parametrize(
    "source",
    [
        DEEP,
        DEEP.upper(),
        '<div ">' * 1000,  # a quote outside of a value means nothing
        "<div ='>" * 1000,
        "<div a=b'>" * 1000,
        "<div a='>' b=\">\">" * 1000,
        '<div a = ">">' * 1000,
        "<div/>" * 1000,
        "<!-- --><div>" * 1000,
        "<script></div></script><div>" * 1000,
        "<x-y>" * 1000,
        "</b>" + "<span>" * 1000,
        "<table><tr><td>" * 1000,
        "<ul><li>" * 1000,
    ],
)
def test_what_is_deep_is_found_however_it_is_written(source: str) -> None:
    assert depth(source) > ELEMENTS_MAX
    assert too_deep(source, "text/html")


def test_formatting_that_is_never_closed_has_a_bound_of_its_own() -> None:
    many = "".join(f"<b a={n}>" for n in range(MARKS_MAX + 1))
    assert too_deep(many, "text/html")
    assert too_deep(many.replace("<b", "<p><b"), "text/html")
    assert not too_deep("<b>" * 10_000 + "text", "text/html")  # the same one: three at most
    assert not too_deep("".join(f"<b a={n}>x</b>" for n in range(1000)), "text/html")


@pytest.mark.parametrize(
    "source",
    [
        "<div>" * ELEMENTS_MAX,
        "<p>one <p>two" * 5000,
        "<ul>" + "<li>item" * 5000 + "</ul>",
        "<table>" + "<tr><td>1<td>2" * 5000 + "</table>",
        "<div><span>never closed</div>" * 5000,
        "<a name=x>" * 5000,
        "<br><img src=x><input>" * 5000,
        "<div>text</div>" * 5000,
        f"<!-- {DEEP} -->",
        f"<script>{DEEP}</script>",
        f"<STYLE>{DEEP}</style >",
        f"<img alt='{DEEP}'>",
        f'<p title = "{DEEP}">',
        "<svg>" + "<path d='m0 0'/>" * 5000 + "</svg>",
        "1 < 2 <3 <" * 5000,
        "</div>" * 5000,
    ],
)
def test_what_people_write_passes(source: str) -> None:
    assert not too_deep(source, "text/html")


def test_a_line_of_markdown_opens_a_bounded_number_of_quotes_and_items() -> None:
    for deep in (">" * 200, "> " * 200, "- " * 200 + "x", "1. > " * 100, "text\n" + ">" * 200):
        assert too_deep(deep, "text/markdown")
    for plain in (
        ">" * MARKERS_MAX,
        "> text\n" * 1000,
        "- item\n" * 1000,
        "x " + ">" * 200,
        "-" * 500,
        "*" * 500,
    ):
        assert not too_deep(plain, "text/markdown")
    assert not too_deep(">" * 200, "text/plain")


@pytest.mark.parametrize(
    "piece",
    [
        "<div>",
        "<",
        "<!--",
        "<a ",
        '<a b="',
        "<a b='",
        "<a b=\"'",
        "</div>",
        "<script>",
        "<b>",
        "=",
        "<a =",
        "<i x=1>",
        "<div></p>",
    ],
)
def test_the_pass_is_linear_whatever_is_written(piece: str) -> None:
    source = "<div>" + piece * (MIB // len(piece))
    began = time.process_time()
    too_deep(source, "text/html")
    assert time.process_time() - began < 3.0  # quadratic: hours


@pytest.mark.parametrize("piece", [">", "- ", "1", " ", "1. ", "\n>", "-"])
def test_the_pass_over_markdown_is_linear(piece: str) -> None:
    began = time.process_time()
    too_deep(piece * (MIB // len(piece)), "text/markdown")
    assert time.process_time() - began < 3.0
