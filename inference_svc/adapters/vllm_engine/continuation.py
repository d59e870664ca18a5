"""Goes on with an output that another engine began, so that the seam cannot be seen.

The engine gets the rendered prompt and the earlier output tokens as one prompt, with detokenizing
off. The text is made here by vLLM's own incremental detokenizer, set up as for the original request
(its prompt, its stop strings, its minimum) and fed the earlier tokens first: characters and stop
strings that lie across the seam come out as they would have.

One :class:`ContinuedText` per request; used on one thread at a time (primed on the tokenizer's
thread, then fed on the event loop).

Failure modes: FAILED_PRECONDITION with reason CONTINUATION_MISMATCH when the tokens do not spell
what was delivered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from inference_svc.domain.continuation import check_delivered
from inference_svc.ports import Continuation


@dataclass(frozen=True, slots=True)
class _OriginalRequest:
    """The part of vLLM's EngineCoreRequest that its detokenizers read."""

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    prompt_embeds: None = None


@dataclass(frozen=True, slots=True)
class Taken:
    """What new tokens came to: text beyond what was delivered, tokens kept (a stop string drops
    those after it) and the stop string that matched."""

    text: str
    kept: int
    stop_string: str | None


class ContinuedText:
    """The text of an output across its seam."""

    def __init__(
        self,
        tokenizer: Any,  # the tokenizer that vLLM detokenizes with
        request_id: str,
        prompt_token_ids: Sequence[int],
        original: SamplingParams,
        continuation: Continuation,
        *,
        ended_by_token: bool,
    ) -> None:
        """Feeds the earlier tokens and checks them against the delivered text; blocks for about a
        microsecond per token. ``original`` holds the stop strings and the unrebased minimum.
        ``ended_by_token``: the last earlier token is one that ends the output."""
        self._detokenizer = IncrementalDetokenizer.from_new_request(
            tokenizer, _OriginalRequest(request_id, list(prompt_token_ids), original)
        )
        self.stop_string: str | None = self._detokenizer.update(
            list(continuation.output_token_ids), ended_by_token
        )
        text: str = self._detokenizer.output_text
        check_delivered(continuation, text)
        delivered = text.encode()[: continuation.delivered_text_bytes].decode()
        self._sent_characters = len(delivered)

    def take(self, token_ids: Sequence[int], *, finished: bool, ended_by_token: bool) -> Taken:
        """Feeds new tokens. ``finished``: the engine ended the output with them."""
        before = self._detokenizer.num_output_tokens()
        stop_string = self._detokenizer.update(list(token_ids), ended_by_token)
        kept = self._detokenizer.num_output_tokens() - before
        return Taken(self._ready(finished or stop_string is not None), kept, stop_string)

    def rest(self) -> str:
        """The text not delivered yet of an output that was complete when it got here."""
        return self._ready(True)

    def _ready(self, finished: bool) -> str:
        """New text; a possible beginning of a stop string is held back until the end."""
        text: str = self._detokenizer.output_text
        held = 0 if finished else self._detokenizer.stop_buffer_length
        until = len(text) - held
        if until <= self._sent_characters:
            return ""
        new = text[self._sent_characters : until]
        self._sent_characters = until
        return new
