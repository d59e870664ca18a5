"""Sampling parameters for vLLM.

Pure translation and checks against the model; no state. A field that is unset takes the model's own
generation configuration (as vLLM's server does), and where that is silent vLLM's neutral value;
``max_new_tokens`` of that configuration is not taken: an unset ``max_tokens`` is what the context
leaves. Zero is zero: temperature 0 is greedy whatever the model's configuration says.

Failure modes: INVALID_ARGUMENT naming the field, in the words of this file, never vLLM's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.exceptions import VLLMError
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.v1.structured_output.utils import grammar_is_likely_lark

from inference_svc.domain.sampling_rules import constraint_field
from inference_svc.ports import Constraint, ConstraintKind, Sampling
from sluice.errors import SluiceError, invalid

_DEFAULTED = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
# vLLM reads seed -1 as "no seed"; this one, which nobody picks by hand, stands in for it.
SEED_FOR_MINUS_ONE = (1 << 62) + 1


class CheckedSamplingParams(SamplingParams):  # type: ignore[misc]  # vLLM is untyped here
    """Parameters that were verified off the event loop; vLLM does not verify them once more.

    Its check parses the constraint again, which takes milliseconds, inside ``add_request``."""

    def verify(self, *_args: object, **_kwargs: object) -> None:
        """Was done by :func:`verify`."""


def translate(
    sampling: Sampling,
    defaults: Mapping[str, Any],
    *,
    max_tokens: int,
    min_tokens: int,
    detokenize: bool = True,
) -> CheckedSamplingParams:
    """vLLM's parameters. ``max_tokens`` and ``min_tokens`` are this attempt's."""
    values: dict[str, Any] = {
        name: defaults[name] for name in _DEFAULTED if defaults.get(name) is not None
    }
    for name in _DEFAULTED:
        if (value := getattr(sampling, name)) is not None:
            values[name] = value
    if sampling.n > 1 and values.get("temperature", 1.0) < 1e-5:
        raise invalid("sampling.n", "greedy outputs (temperature 0) are all the same: n must be 1")
    seed = sampling.seed
    return CheckedSamplingParams(
        **values,
        n=sampling.n,
        seed=SEED_FOR_MINUS_ONE if seed == -1 else seed,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop=list(sampling.stop) if detokenize else [],
        stop_token_ids=list(sampling.stop_token_ids),
        include_stop_str_in_output=sampling.include_stop,
        ignore_eos=sampling.ignore_eos,
        logprobs=sampling.logprobs,
        logit_bias=dict(sampling.logit_bias) or None,
        skip_special_tokens=not sampling.keep_special_tokens,
        structured_outputs=_structured(sampling.constraint),
        output_kind=RequestOutputKind.DELTA,
        detokenize=detokenize,
        skip_clone=True,  # made for one request
    )


def _structured(constraint: Constraint | None) -> StructuredOutputsParams | None:
    if constraint is None:
        return None
    kind = constraint.kind
    if kind is ConstraintKind.JSON_OBJECT:
        return StructuredOutputsParams(json_object=True)
    if kind is ConstraintKind.CHOICE:
        return StructuredOutputsParams(choice=list(constraint.choices))
    if kind is ConstraintKind.JSON_SCHEMA:
        return StructuredOutputsParams(json=constraint.text)
    if kind is ConstraintKind.REGEX:
        return StructuredOutputsParams(regex=constraint.text)
    return StructuredOutputsParams(grammar=constraint.text)


def check_ids(sampling: Sampling, vocabulary: int) -> None:
    """Refuses token ids that the model does not have: they index the engine's tables."""
    if any(not 0 <= token_id < vocabulary for token_id in sampling.stop_token_ids):
        raise invalid("sampling.stop_token_ids", f"token ids are 0 to {vocabulary - 1}")
    if any(not 0 <= token_id < vocabulary for token_id in sampling.logit_bias):
        raise invalid("sampling.logit_bias", f"token ids are 0 to {vocabulary - 1}")


def verify(params: SamplingParams, sampling: Sampling, llm: Any) -> None:
    """vLLM's own checks against the model, the constraint's parsing included; blocks.

    They also settle which backend compiles the constraint."""
    config = llm.vllm_config
    try:
        SamplingParams.verify(
            params,
            config.model_config,
            config.speculative_config,
            config.structured_outputs_config,
            llm.renderer.tokenizer,
        )
    except (VLLMError, ValueError, TypeError, RecursionError):
        if sampling.constraint is not None:
            raise constraint_error(sampling.constraint) from None
        raise invalid("sampling", "this model does not support these parameters") from None


def constraint_error(constraint: Constraint) -> SluiceError:
    """INVALID_ARGUMENT on the constraint's own field."""
    return invalid(
        constraint_field(constraint.kind),
        "does not compile to a form that the engine can enforce",
        reason="INVALID_CONSTRAINT",
    )


def is_lark(grammar: str) -> bool:
    """Whether vLLM will read a grammar as Lark rather than as EBNF."""
    return bool(grammar_is_likely_lark(grammar))
