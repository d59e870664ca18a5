"""Text for a vLLM engine: chat templates, tokens, and the bytes of tokens.

Owns one thread, on which everything runs that takes more than a millisecond: rendering, tokenising,
checking sampling parameters, decoding a continuation's tokens. vLLM's renderer is used, so that a
prompt is the same as through its own server; its tokenizer keeps copies of its own for threads
other than the event loop's.

Failure modes: a template that refuses a conversation, a text of more characters than the context
could hold, and an id outside the vocabulary are INVALID_ARGUMENT with fixed words. The queue of the
thread is bounded: beyond ``QUEUE_MAX`` waiting prompts RESOURCE_EXHAUSTED.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from vllm.inputs import TextPrompt as VllmTextPrompt
from vllm.renderers.params import ChatParams, TokenizeParams

from inference_svc.ports import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from sluice.errors import exhausted, failed_precondition, invalid

# A prompt takes 0.1 to 50 ms, so this is seconds of work; admission by credits keeps it far lower.
QUEUE_MAX = 1024
RETRY_S = 1.0

T = TypeVar("T")


class TextWorker:
    """Rendering and tokenising for one model."""

    def __init__(self, llm: Any) -> None:  # vllm AsyncLLM
        self._renderer = llm.renderer
        self._tokenizer = llm.renderer.tokenizer
        self._model = llm.model_config
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        self._queued = 0
        self.vocabulary = int(llm.model_config.get_vocab_size())
        self._characters_per_token = int(getattr(self._tokenizer, "max_chars_per_token", 0) or 0)
        self.chat = self._has_template()

    def close(self) -> None:
        """Ends the thread after what it does now. Idempotent."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def run(self, work: Callable[[], T]) -> T:
        """Runs ``work`` on the thread."""
        if self._queued >= QUEUE_MAX:
            raise exhausted("TOKENIZER_BUSY", "Too many prompts wait to be tokenised.", RETRY_S)
        self._queued += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, work)
        finally:
            self._queued -= 1

    def tokenize(self, prompt: Prompt, context_tokens: int, path: str = "input") -> list[int]:
        """Token ids of a prompt; blocks. ``path`` is the field that an error names."""
        if isinstance(prompt, TokenPrompt):
            ids = list(prompt.token_ids)
            if not ids:
                raise invalid(f"{path}.token_ids", "at least one token id is needed")
            self.check_ids(ids, f"{path}.token_ids.ids")
            return ids
        if isinstance(prompt, TextPrompt):
            ids = self._tokenize_text(prompt.text, context_tokens, f"{path}.text")
        else:
            ids = self._tokenize_chat(prompt, context_tokens, f"{path}.conversation")
        # A tokenizer may know more tokens than the model has rows for: such an id ends the engine.
        self.check_ids(ids, path)
        return ids

    def check_ids(self, ids: Sequence[int], path: str) -> None:
        """Refuses ids outside the vocabulary: the engine would index beyond its tables."""
        if ids and not 0 <= min(ids) <= max(ids) < self.vocabulary:
            raise invalid(path, f"token ids are 0 to {self.vocabulary - 1} for this model")

    def _tokenize_text(self, text: str, context_tokens: int, path: str) -> list[int]:
        if not text:
            raise invalid(path, "must not be empty")
        self._check_length(text, context_tokens, path)
        params = self._renderer.default_cmpl_tok_params
        ids = self._encode(text, params.add_special_tokens, params.do_lower_case)
        if not ids:
            raise invalid(path, "holds no token of this model")
        return ids

    def _tokenize_chat(self, prompt: ChatPrompt, context_tokens: int, path: str) -> list[int]:
        if not prompt.messages:
            raise invalid(f"{path}.messages", "at least one message is needed")
        if not self.chat:
            raise failed_precondition(
                "NO_CHAT_TEMPLATE", "This model has no chat template: send text or token ids."
            )
        if prompt.continue_final_message and prompt.messages[-1].get("role") != "assistant":
            raise invalid(f"{path}.continue_final_message", "needs an assistant message at the end")
        options: dict[str, object] = {
            "add_generation_prompt": not prompt.continue_final_message,
            "continue_final_message": prompt.continue_final_message,
            "tokenize": False,
        }
        if prompt.tools:
            options["tools"] = [dict(tool) for tool in prompt.tools]
        try:
            _, rendered = self._renderer.render_messages(
                [dict(message) for message in prompt.messages],
                ChatParams(chat_template_kwargs=options),
            )
        except Exception:  # whatever a template or its reader raises is about the conversation
            raise invalid(
                f"{path}.messages", "the model's chat template does not accept this conversation"
            ) from None
        if "prompt_token_ids" in rendered:  # some renderers go to tokens directly
            return list(rendered["prompt_token_ids"])
        text = str(rendered["prompt"])
        self._check_length(text, context_tokens, f"{path}.messages")
        params = self._renderer.default_chat_tok_params
        ids = self._encode(text, params.add_special_tokens, params.do_lower_case)
        if not ids:
            raise invalid(f"{path}.messages", "the rendered conversation is empty")
        return ids

    def _encode(self, text: str, add_special_tokens: bool, lower_case: bool) -> list[int]:
        params = TokenizeParams(
            max_total_tokens=None, add_special_tokens=add_special_tokens, do_lower_case=lower_case
        )
        prompt = self._renderer.tokenize_prompt(VllmTextPrompt(prompt=text), params)
        return list(prompt["prompt_token_ids"])

    def _check_length(self, text: str, context_tokens: int, path: str) -> None:
        """Refuses, before seconds of tokenising, a text that cannot fit whatever its tokens are."""
        if not self._characters_per_token:
            return
        least = -(-len(text) // self._characters_per_token)
        if least > context_tokens:
            raise over_length(path, least, context_tokens, exact=False)

    def _has_template(self) -> bool:
        """Whether messages can be rendered: by a template, or by a renderer with its own rules."""
        if self._tokenizer is None:
            return False
        from vllm.renderers.hf import HfRenderer, resolve_chat_template

        if not isinstance(self._renderer, HfRenderer):
            return True
        try:
            return (
                resolve_chat_template(self._tokenizer, None, None, model_config=self._model)
                is not None
            )
        except Exception:  # the tokenizer's own way of saying that it has none
            return False


def over_length(path: str, tokens: int, context_tokens: int, *, exact: bool = True) -> Exception:
    """INVALID_ARGUMENT that names the limit and both counts."""
    count = f"{tokens}" if exact else f"at least {tokens}"
    return invalid(
        path,
        f"{count} tokens are over the model's context of {context_tokens} tokens"
        " (prompt and at least one output token together)",
        reason="CONTEXT_LENGTH",
    )


class TokenBytes:
    """The bytes of single tokens: part of a character where a token is part of one.

    Keeps what it worked out, at most one entry per token of the vocabulary."""

    def __init__(self, tokenizer: Any) -> None:  # a Hugging Face tokenizer
        self._tokenizer = tokenizer
        self._known: dict[int, bytes] = {}
        special = getattr(tokenizer, "added_tokens_decoder", {})
        self._special: Mapping[int, str] = {
            token_id: str(token.content) for token_id, token in special.items()
        }
        self._byte_level = _is_byte_level(tokenizer)

    def of(self, token_id: int) -> bytes:
        """The token's bytes; empty for an id without text."""
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._work_out(token_id)
        return known

    def _work_out(self, token_id: int) -> bytes:
        if (special := self._special.get(token_id)) is not None:
            return special.encode()
        pieces = self._tokenizer.convert_ids_to_tokens([token_id])
        piece: str | bytes | None = pieces[0] if pieces else None
        if piece is None:
            return b""
        if isinstance(piece, bytes):
            return piece
        if self._byte_level:
            table = _byte_table()
            if all(character in table for character in piece):
                return bytes(table[character] for character in piece)
            return piece.encode()
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])  # byte fallback of SentencePiece
        return piece.replace("\u2581", " ").encode()


def _is_byte_level(tokenizer: Any) -> bool:
    """Whether the vocabulary writes bytes as printable characters, as GPT-2's does."""
    backend = getattr(tokenizer, "_tokenizer", None)
    return "ByteLevel" in str(getattr(backend, "decoder", "") or "")


_BYTE_TABLE: dict[str, int] = {}


def _byte_table() -> Mapping[str, int]:
    """GPT-2's printable stand-ins: printable Latin-1 is itself, the other bytes follow from 256."""
    if not _BYTE_TABLE:
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        _BYTE_TABLE.update({chr(byte): byte for byte in printable})
        others = (byte for byte in range(256) if byte not in printable)
        _BYTE_TABLE.update({chr(256 + place): byte for place, byte in enumerate(others)})
    return _BYTE_TABLE
