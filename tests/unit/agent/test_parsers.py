"""Blocks of text, Markdown and HTML, with the bytes that they came from; and content that was
written to harm.

Oracle: what a reader of the document sees; the bytes of the content at a block's range.
"""

from __future__ import annotations

import asyncio
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_svc.adapters import parsers
from agent_svc.adapters.blocks import MEDIA_TYPES, NotTextError, blocks_of
from agent_svc.adapters.parsers import document_chunks
from sluice.errors import Code, SluiceError

BOM = b"\xef\xbb\xbf"

MARKDOWN = """\
# Tïtle

Text with *marks* and [a link](http://x.example "t"),
over two lines.

- item one
- item two

| a | b |
|---|---|
| 1 | 2 |

```py
code()
```

Under
-----
<div>html &amp; more</div>

> quoted
"""

HTML = """\
<!doctype html><html><head><title>T &amp; é</title><style>p {}</style></head>
<body><script>var p = "Text one";</script>
<h2 class="x">Head <b>line</b></h2>
<p>Text&nbsp;one &lt;a&gt; caf&eacute; <!-- not this -->&#x1F600; end<br>next</p>
<ul><li>item 1<li>item 2 <ul><li>inner</ul></ul>
<table><tr><th>k<th>v</tr><tr><td>1<td>2</td></tr></table>
<pre>a  b
c</pre>
tail</body></html>"""


def seen(content: bytes, media_type: str) -> list[tuple[str, str, int]]:
    """Text, source at its range, and level of each block."""
    return [
        (b.text, content[b.begin_byte : b.end_byte].decode(), b.level)
        for b in blocks_of(content, media_type)
    ]


def test_a_paragraph_of_plain_text_is_its_bytes() -> None:
    text = "  Erste Zeile ä\r\nzweite  \r\n\r\n\n  \nnext\n"
    assert seen(text.encode(), "text/plain") == [
        ("  Erste Zeile ä\r\nzweite", "  Erste Zeile ä\r\nzweite", 0),
        ("next", "next", 0),
    ]


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("bom", [b"", BOM])
def test_blocks_of_markdown_have_their_source_lines(newline: str, bom: bytes) -> None:
    content = bom + MARKDOWN.replace("\n", newline).encode()
    found = [(t, s.replace(newline, "\n"), n) for t, s, n in seen(content, "text/markdown")]
    assert found == [
        ("Tïtle", "# Tïtle\n", 1),
        (
            "Text with *marks* and a link,\nover two lines.",
            'Text with *marks* and [a link](http://x.example "t"),\nover two lines.\n',
            0,
        ),
        ("item one", "- item one\n", 0),
        ("item two", "- item two\n", 0),
        ("a | b", "| a | b |\n", 0),
        ("1 | 2", "| 1 | 2 |\n", 0),
        ("code()", "```py\ncode()\n```\n", 0),
        ("Under", "Under\n", 2),
        ("html & more", "<div>html &amp; more</div>\n", 0),
        ("quoted", "> quoted\n", 0),
    ]


def test_blocks_of_html_have_the_bytes_of_their_texts() -> None:
    assert seen(HTML.encode(), "text/html") == [
        ("T & é", "T &amp; é", 1),
        ("Head line", "Head <b>line", 2),
        (
            "Text one <a> café 😀 end\nnext",
            "Text&nbsp;one &lt;a&gt; caf&eacute; <!-- not this -->&#x1F600; end<br>next",
            0,
        ),
        ("item 1", "item 1", 0),
        ("item 2", "item 2", 0),
        ("inner", "inner", 0),
        ("k | v", "k<th>v", 0),
        ("1 | 2", "1<td>2", 0),
        ("a b\nc", "a  b\nc", 0),
        ("tail", "tail", 0),
    ]


@pytest.mark.parametrize(
    "hidden",
    [
        "<p hidden>word <b>not</b> shown</p>",
        '<p HIDDEN="">word</p>',
        '<p style="display:none">word</p>',
        '<div style="color: red; DISPLAY : None !important"><p>word</p><p>word</p></div>',
        '<span style="visibility:hidden">word</span>',
    ],
)
def test_what_a_page_hides_is_not_read(hidden: str) -> None:
    """Seen to fail with hidden elements read as others."""
    page = f"<p>before</p>{hidden}<p>word</p>"
    assert [b.text for b in blocks_of(page.encode(), "text/html")] == ["before", "word"]
    last = blocks_of(page.encode(), "text/html")[-1]
    assert last.begin_byte == page.rindex("word")


@pytest.mark.parametrize(
    "shown",
    [
        '<body style="display:none"><p>word</p></body>',
        '<p hidden="until-found">word</p>',
        '<p style="--display:none; display: block">word</p>',
        '<p data-hidden="hidden" aria-hidden="true" class="hidden">word</p>',
    ],
)
def test_what_a_reader_can_come_to_see_is_read(shown: str) -> None:
    assert [b.text for b in blocks_of(shown.encode(), "text/html")] == ["word"]


def test_a_hidden_block_parts_what_stands_around_it() -> None:
    page = b"one<div hidden>no</div>two<span hidden>no</span>three"
    assert [b.text for b in blocks_of(page, "text/html")] == ["one", "twothree"]


def test_code_and_comments_between_markdown_are_not_read() -> None:
    """Seen to fail with every block of HTML read without its tags."""
    text = (
        "before\n\n<script>\nalert(1)\n\nmore()\n</script>\n\n<STYLE>p {}</STYLE> word\n\n"
        "<!-- not <b>this</b>\n\nnor this -->\n\n<div>html</div>\n\n<script>\nnever closed\n"
    )
    found = [b.text for b in blocks_of(text.encode(), "text/markdown")]
    assert found == ["before", "word", "html"]


def test_a_byte_order_mark_is_no_text_and_is_counted() -> None:
    for media_type in MEDIA_TYPES:
        (block,) = blocks_of(BOM + b"word", media_type)
        assert (block.text, block.begin_byte) == ("word", 3)


@settings(max_examples=100, deadline=None)
@given(st.text(st.sampled_from("ab <>/&;#x1\n\r\"'=-*`[]()|é東"), max_size=120))
def test_ranges_lie_in_the_content_whatever_it_is(text: str) -> None:
    content = text.encode()
    for media_type in MEDIA_TYPES:
        for block in blocks_of(content, media_type):
            assert 0 <= block.begin_byte <= block.end_byte <= len(content)
            content[block.begin_byte : block.end_byte].decode()  # never inside a character


def test_what_is_no_utf8_is_told() -> None:
    for media_type in MEDIA_TYPES:
        with pytest.raises(NotTextError):
            blocks_of(b"caf\xe9", media_type)


async def refused(content: bytes, media_type: str) -> str:
    """The field that a refusal names."""
    with pytest.raises(SluiceError) as raised:
        await document_chunks("t", content, media_type)
    assert raised.value.code is Code.INVALID_ARGUMENT
    return raised.value.fields[0].field


async def test_a_document_becomes_chunks_in_another_process() -> None:
    chunks = await document_chunks("t", HTML.encode(), "text/html")
    assert [one.number for one in chunks] == list(range(len(chunks)))
    assert chunks[0].text.startswith("T & é > Head line\nText one")
    assert HTML.encode()[chunks[0].begin_byte :].startswith(b"T &amp; ")
    assert await document_chunks("t", HTML.encode(), "text/html") == chunks
    assert await document_chunks("t", b"", "text/plain") == []


async def test_bad_content_is_refused_by_its_field() -> None:
    assert await refused(b"x", "application/pdf") == "media_type"
    assert await refused(b"\xff", "text/plain") == "content"
    assert await refused(bytes(parsers.CONTENT_BYTES_MAX + 1), "text/plain") == "content"
    assert await refused(b"!" * 1_800_000, "text/plain") == "content"  # too many chunks


@pytest.mark.parametrize(
    ("content", "media_type"),
    [
        (b"<div>" * 600_000, "text/html"),
        (
            b"<p>" + b"".join(b"<b a=%d>" % n for n in range(3_000)) + b"</p><p>x" * 200_000,
            "text/html",
        ),
        (
            b"<p>" + b"".join(b"<b a=%d>" % n for n in range(64)) + b"</p><p>x" * 300_000,
            "text/html",
        ),
        (b">" * 50_000 + b" x\n" * 100_000, "text/markdown"),
        ((b">" * 120 + b" x\n\n") * 20_000, "text/markdown"),
    ],
    ids=["deep", "reopened", "reopened_often", "quoted", "quoted_often"],
)
async def test_hostile_content_ends_within_its_limits_and_blocks_nobody(
    monkeypatch: pytest.MonkeyPatch, content: bytes, media_type: str
) -> None:
    """The event loop's own lag is measured: the work is done elsewhere."""
    monkeypatch.setattr(parsers, "CPU_S", 1)
    monkeypatch.setattr(parsers, "CPU_S_PER_MIB", 0)
    monkeypatch.setattr(parsers, "MEMORY_BYTES", 400 << 20)
    worst = 0.0

    async def ticks() -> None:
        nonlocal worst
        while True:
            began = time.perf_counter()
            await asyncio.sleep(0.01)
            worst = max(worst, time.perf_counter() - began)

    ticking = asyncio.create_task(ticks())
    assert await refused(content, media_type) == "content"
    ticking.cancel()
    assert worst < 0.8  # the parsers hold the interpreter for the whole second


async def test_what_is_nested_too_deeply_is_told_before_it_is_parsed() -> None:
    for content, media_type in (
        (b"<div>" * 600_000, "text/html"),
        (b">" * 50_000 + b" x\n", "text/markdown"),
    ):
        with pytest.raises(SluiceError, match="content: is nested too deeply") as raised:
            await document_chunks("t", content, media_type)
        assert raised.value.fields[0].field == "content"


def test_the_time_of_a_document_goes_by_its_size() -> None:
    assert parsers.cpu_limit_s(8) <= 3
    assert parsers.cpu_limit_s(parsers.CONTENT_BYTES_MAX) <= 8


async def test_documents_of_one_tenant_leave_a_room_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    running: list[bytes] = []

    async def child(content: bytes, media_type: str) -> tuple[bytes, bool]:
        running.append(content)
        if content == b"hostile":
            await asyncio.Event().wait()
        return b"[]", True

    monkeypatch.setattr(parsers, "_child", child)
    hostile = [
        asyncio.create_task(document_chunks("flood", b"hostile", "text/html")) for _ in range(6)
    ]
    while not running:
        await asyncio.sleep(0)
    async with asyncio.timeout(5.0):
        for _ in range(3):
            assert await document_chunks("other", b"x", "text/plain") == []
    assert running == [b"hostile", b"x", b"x", b"x"]
    for task in hostile:
        task.cancel()
    await asyncio.gather(*hostile, return_exceptions=True)


async def test_a_caller_that_goes_away_ends_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[asyncio.subprocess.Process] = []
    start = asyncio.create_subprocess_exec

    async def recorded(*command: str, **options: object) -> asyncio.subprocess.Process:
        child = await start(*command, **options)  # type: ignore[arg-type]
        started.append(child)
        return child

    monkeypatch.setattr(asyncio, "create_subprocess_exec", recorded)
    task = asyncio.create_task(document_chunks("t", b"<p>text</p>" * 280_000, "text/html"))
    while not started:
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert started[0].returncode == -9


async def test_a_child_that_somebody_kills_is_started_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start = asyncio.create_subprocess_exec
    started: list[asyncio.subprocess.Process] = []

    async def killed_at_first(*command: str, **options: object) -> asyncio.subprocess.Process:
        child = await start(*command, **options)  # type: ignore[arg-type]
        started.append(child)
        if len(started) == 1:
            child.kill()
        return child

    monkeypatch.setattr(asyncio, "create_subprocess_exec", killed_at_first)
    (only,) = await document_chunks("t", b"text", "text/plain")
    assert only.text == "text"
    assert len(started) == 2


async def test_a_child_has_no_secret_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[object] = []

    async def refuse(*command: str, **options: object) -> None:
        given.append(options["env"])
        raise OSError

    monkeypatch.setattr(asyncio, "create_subprocess_exec", refuse)
    monkeypatch.setenv("TOOL_SECRET_X", "secret")
    with pytest.raises(OSError):  # noqa: PT011 - the one that was just raised
        await document_chunks("t", b"x", "text/html")
    assert [list(one) for one in given if isinstance(one, dict)] == [["PYTHONPATH"]]
