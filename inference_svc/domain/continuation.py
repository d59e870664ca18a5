"""Going on with an output that another attempt began.

Pure functions without state, shared by both engines: whether a request is continuable at all,
what the limits of its tokens leave, and whether what the caller says it delivered is what the
tokens spell.
"""

from __future__ import annotations

from dataclasses import dataclass

from inference_svc.ports import Continuation, Sampling
from sluice.errors import SluiceError, failed_precondition, invalid

TAIL_BYTES_MAX = 1024  # of delivered text that a caller sends along for comparison


@dataclass(frozen=True, slots=True)
class TokenLimits:
    """Output tokens that an attempt may and must still generate; both 0 or more.

    ``most`` 0: the output is complete as it stands, for reasons of length."""

    least: int
    most: int


def continuable(sampling: Sampling) -> bool:
    """Whether an output sampled so can be continued elsewhere and stay the same output.

    Yes for greedy and unseeded sampling with any truncation, a repetition penalty, a bias, stop
    strings and ids, and token limits: each next token depends on the tokens before it alone. No
    where an engine keeps state that is not in those tokens (a seeded generator, counts of output
    tokens for presence and frequency penalties, a grammar's position), for several outputs, and
    for log probabilities, whose earlier entries would be missing.
    """
    return (
        sampling.seed is None
        and not sampling.presence_penalty
        and not sampling.frequency_penalty
        and sampling.constraint is None
        and sampling.n == 1
        and sampling.logprobs is None
    )


def within_total(sampling: Sampling, total: int, prompt_tokens: int, room: int) -> int:
    """``room``, as :func:`rebase` takes it, lowered to each output's share of what a prompt leaves
    of ``total`` tokens. INVALID_ARGUMENT when that does not hold the outputs' least."""
    left = (total - prompt_tokens) // sampling.n
    least = max(sampling.min_tokens or 0, 1)
    if left < least:
        raise invalid(
            "sampling.total_tokens_max",
            f"{total} tokens do not hold the prompt's {prompt_tokens} and {least} of each output",
            reason="TOTAL_TOKENS",
        )
    return min(room, left)


def rebase(sampling: Sampling, generated: int, room: int) -> TokenLimits:
    """The limits of an attempt after ``generated`` tokens of earlier attempts.

    ``room`` is how many output tokens the context leaves beside the prompt, earlier ones
    included; it caps ``max_tokens`` and stands in for it where it is unset."""
    most = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
    left = max(most - generated, 0)
    least = max((sampling.min_tokens or 0) - generated, 0)
    return TokenLimits(least=min(least, left), most=left)


def check(continuation: Continuation, sampling: Sampling, *, fingerprint: str, room: int) -> None:
    """Raises when a continuation cannot be taken up by the model with ``fingerprint``.

    FAILED_PRECONDITION for another model and for sampling that is not continuable;
    INVALID_ARGUMENT when its tokens do not fit the ``room`` that the context leaves."""
    if not continuable(sampling):
        raise failed_precondition(
            "NOT_CONTINUABLE", "An output with these sampling parameters cannot be continued."
        )
    if continuation.model_fingerprint != fingerprint:
        raise failed_precondition(
            "FINGERPRINT_MISMATCH", "The output was begun by a model with another fingerprint."
        )
    if len(continuation.output_token_ids) > room:
        raise invalid(
            "continuation.output_token_ids",
            f"holds {len(continuation.output_token_ids)} tokens, but the context leaves {room}",
        )
    if len(continuation.delivered_text_tail.encode()) > TAIL_BYTES_MAX:
        raise invalid(
            "continuation.delivered_text_tail", f"must be at most {TAIL_BYTES_MAX} bytes long"
        )


def check_delivered(continuation: Continuation, text: str) -> None:
    """Raises FAILED_PRECONDITION unless ``text``, which the tokens spell, begins with as many
    bytes as were delivered and those end, on a character's border, with the delivered tail."""
    spelled = text.encode()
    delivered = continuation.delivered_text_bytes
    tail = continuation.delivered_text_tail.encode()
    if delivered > len(spelled) or len(tail) > delivered:
        raise _mismatch()
    if delivered < len(spelled) and spelled[delivered] & 0xC0 == 0x80:
        raise _mismatch()  # in the middle of a character: nothing whole was delivered there
    if spelled[delivered - len(tail) : delivered] != tail:
        raise _mismatch()


def _mismatch() -> SluiceError:
    return failed_precondition(
        "CONTINUATION_MISMATCH", "The delivered text is not what the output tokens spell."
    )
