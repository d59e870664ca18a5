"""Templates of URLs, secrets, the clock and retrieval."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_svc.adapters.tools import clock, retrieval
from agent_svc.adapters.tools.clock import ClockTool
from agent_svc.adapters.tools.retrieval import LOADING_S, RetrievalTool
from agent_svc.adapters.tools.secrets import HIDDEN, Secrets
from agent_svc.adapters.tools.url_template import fill, with_query
from agent_svc.domain.model import ToolInfo
from agent_svc.ports import ChunkFound, ToolContext, ToolError
from sluice.errors import Code, SluiceError, deadline_exceeded, not_found, unavailable

Virtual = Callable[[Coroutine[Any, Any, Any]], Any]
CONTEXT = ToolContext("tenant-a", "run", "run:1", 5.0)


def test_arguments_stay_in_their_places() -> None:
    template = "https://a.org/v1/{id}/x?q={q}"
    filled = fill(template, {"id": "a/../b?c#d%2f", "q": "1&admin=1"})
    assert filled == "https://a.org/v1/a%2F..%2Fb%3Fc%23d%252f/x?q=1%26admin%3D1"
    assert fill(template, {"id": 3, "q": True}) == "https://a.org/v1/3/x?q=true"
    assert with_query("https://a.org/", [("a b", [1, "x&y"]), ("c", 2.5)]) == (
        "https://a.org/?a%20b=1&a%20b=x%26y&c=2.5"
    )
    assert with_query("https://a.org/?z=1", [("a", "")]) == "https://a.org/?z=1&a="


@pytest.mark.parametrize("value", ["", " ", ".", "..", None, [], {}, "x" * 3000, "\ud800"])
def test_an_argument_that_would_change_the_path_is_refused(value: object) -> None:
    with pytest.raises(ToolError) as refused:
        fill("https://a.org/v1/{id}/x", {"id": value})
    assert refused.value.reason == "TOOL_REFUSED"


@given(st.text(min_size=1, max_size=50))
def test_no_text_gets_out_of_its_segment(text: str) -> None:
    try:
        filled = fill("https://a.org/v1/{id}/x", {"id": text})
    except ToolError:
        return
    middle = filled.removeprefix("https://a.org/v1/").removesuffix("/x")
    assert filled.startswith("https://a.org/v1/") and filled.endswith("/x")
    assert not set(middle) & set("/?#@:\\ \r\n\t") and middle not in (".", "..")


def test_secrets_are_headers_and_are_hidden_in_what_comes_back() -> None:
    secrets = Secrets(
        {"Authorization": "TOOL_SECRET_A", "X-Key": "TOOL_SECRET_B"},
        {"TOOL_SECRET_A": "Bearer canary-1234", "TOOL_SECRET_B": 'can"ary-5'},
    )
    assert secrets.headers() == {"Authorization": "Bearer canary-1234", "X-Key": 'can"ary-5'}
    assert secrets.hide("Bearer canary-1234") == HIDDEN
    assert secrets.hide("my token is canary-1234, Bearer of news") == (
        f"my token is {HIDDEN}, Bearer of news"
    )
    assert secrets.hide(json.dumps({"k": 'can"ary-5'})) == json.dumps({"k": HIDDEN})


@pytest.mark.parametrize("value", [None, "", "line\r\nbreak", "ümlaut"])
def test_a_secret_that_is_not_set_makes_the_tool_unavailable(value: str | None) -> None:
    environ = {} if value is None else {"TOOL_SECRET_A": value}
    secrets = Secrets({"A": "TOOL_SECRET_A"}, environ)
    assert secrets.problem == "not set: TOOL_SECRET_A"
    with pytest.raises(ToolError) as failed:
        secrets.headers()
    assert failed.value.reason == "TOOL_UNAVAILABLE"


async def test_the_clock_tells_the_time_in_a_known_zone() -> None:
    tool = ClockTool(ToolInfo("clock", "d", clock.PARAMETERS), lambda: 1_700_000_000.0)
    told = json.loads((await tool.call({}, CONTEXT)).content_json)
    assert told == {
        "time": "2023-11-14T22:13:20+00:00",
        "weekday": "Tuesday",
        "time_zone": "UTC",
    }
    berlin = json.loads((await tool.call({"time_zone": "Europe/Berlin"}, CONTEXT)).content_json)
    assert berlin["time"] == "2023-11-14T23:13:20+01:00"
    for name in ("../../etc/passwd", "/etc/localtime", "Nowhere", "europe/berlin\x00", "."):
        with pytest.raises(ToolError):
            await tool.call({"time_zone": name}, CONTEXT)


class Search:
    """Notes what it was asked, answers one chunk."""

    def __init__(self, failure: SluiceError | None = None) -> None:
        self.asked: list[tuple[object, ...]] = []
        self._failure = failure

    async def search(
        self,
        tenant: str,
        collection: str,
        query: str,
        vector: bytes,
        top_k: int,
        *,
        deadline_s: float,
    ) -> Sequence[ChunkFound]:
        self.asked.append((tenant, collection, query, vector, top_k))
        if self._failure is not None:
            raise self._failure
        return [ChunkFound("doc-1", 10, 25, "the passage", 0.51239, 0.9)]


def retriever(search: Search) -> RetrievalTool:
    return RetrievalTool(ToolInfo("docs", "d", retrieval.PARAMETERS), search, "manuals", 3)


def embedding(answer: bytes | SluiceError) -> ToolContext:
    async def embed(texts: Sequence[str], deadline_s: float) -> Sequence[bytes]:
        if isinstance(answer, SluiceError):
            raise answer
        return [answer for _ in texts]

    return ToolContext("tenant-a", "run", "run:1", 5.0, embed=embed)


async def test_retrieval_searches_by_vector_and_words_and_cites() -> None:
    search = Search()
    arguments: dict[str, Any] = {"query": "how?", "tenant": "tenant-b", "collection": "others"}
    result = await retriever(search).call(arguments, embedding(b"\0" * 8))
    assert search.asked == [("tenant-a", "manuals", "how?", b"\0" * 8, 3)]
    assert json.loads(result.content_json) == {
        "hits": [
            {
                "document_id": "doc-1",
                "begin_byte": 10,
                "end_byte": 25,
                "score": 0.5124,
                "vector_score": 0.9,
                "text": "the passage",
            }
        ],
        "by": "vector and words",
    }


async def test_without_a_model_that_embeds_words_alone_are_searched() -> None:
    no_model = SluiceError(Code.NOT_FOUND, "MODEL_UNKNOWN", "No such model.")
    for context in (CONTEXT, embedding(no_model)):
        search = Search()
        result = await retriever(search).call({"query": "how?"}, context)
        assert search.asked == [("tenant-a", "manuals", "how?", b"", 3)]
        assert json.loads(result.content_json)["by"] == "words"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (unavailable("STORE_UNAVAILABLE", "x"), "TOOL_LOST"),
        (deadline_exceeded(), "TOOL_TIMEOUT"),
        (SluiceError(Code.INVALID_ARGUMENT, "INVALID_FIELD", "x"), "TOOL_REFUSED"),
    ],
)
async def test_failures_of_the_search_are_those_of_a_tool(error: SluiceError, reason: str) -> None:
    for search, context in ((Search(error), CONTEXT), (Search(), embedding(error))):
        with pytest.raises(ToolError) as failed:
            await retriever(search).call({"query": "x"}, context)
        assert failed.value.reason == reason


async def test_a_collection_in_which_nothing_is_yet_has_no_hits() -> None:
    search = Search(not_found("COLLECTION_UNKNOWN", "There is none."))
    result = await retriever(search).call({"query": "x"}, CONTEXT)
    assert json.loads(result.content_json)["hits"] == []


def test_a_collection_that_is_being_read_is_waited_for(run_virtual: Virtual) -> None:
    class Loading(Search):
        def __init__(self, refusals: int) -> None:
            super().__init__()
            self._refusals = refusals

        async def search(self, *args: Any, **fields: Any) -> Sequence[ChunkFound]:
            self._refusals -= 1
            if self._refusals >= 0:
                raise unavailable("INDEX_LOADING", "The collection is being read.", 0.5)
            return await super().search(*args, **fields)

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        begin = loop.time()
        context = ToolContext("tenant-a", "run", "run:1", 60.0)
        await retriever(Loading(4)).call({"query": "x"}, context)
        assert loop.time() - begin == pytest.approx(2.0)
        with pytest.raises(ToolError) as failed:
            await retriever(Loading(1000)).call({"query": "x"}, context)
        assert failed.value.reason == "TOOL_LOST"
        assert loop.time() - begin == pytest.approx(2.0 + LOADING_S, abs=0.6)

    run_virtual(scenario())
