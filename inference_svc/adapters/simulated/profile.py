"""How fast and how large the simulated engine is: its latency model and its limits.

A frozen value, checked when it is made; :meth:`SimulatedProfile.from_table` reads the table
``simulated`` of an instance in ``sluice.toml``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace


@dataclass(frozen=True, slots=True)
class SimulatedProfile:
    """The simulated engine's size and speed.

    A step lasts ``decode_step_ms`` + ``decode_step_ms_per_sequence`` × sequences + prompt tokens
    read ÷ ``prefill_tokens_per_s``. ValueError names a field that is out of range.
    """

    model: str = "simulated"  # the served name
    weights: str = ""  # identity of the weights; another one is another fingerprint and output
    prefill_tokens_per_s: float = 20_000.0
    decode_step_ms: float = 10.0
    decode_step_ms_per_sequence: float = 0.05
    sequences_max: int = 128
    kv_tokens: int = 262_144
    kv_block_tokens: int = 16
    step_tokens_max: int = 8_192  # prompt tokens read and tokens written in one step
    context_tokens: int = 8_192  # prompt and output of one sequence
    prefix_cache: bool = True
    output_tokens_mean: float = 0.0  # mean length of an output; 0: each runs to its max_tokens
    generate: bool = True  # whether it generates
    chat: bool = True  # whether it has a chat template
    embedding_dimensions: int = 0  # 0: it does not embed
    start_s: float = 0.0  # how long loading takes
    faults_file: str = ""  # path of a JSON file with scripted faults; empty: none
    prompt_directives: bool = False  # whether prompts may script faults; for tests only

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            if not getattr(self, name) >= least:
                raise ValueError(f"simulated.{name} must be at least {least}")
        if not self.prefill_tokens_per_s > 0.0:
            raise ValueError("simulated.prefill_tokens_per_s must be more than 0 tokens/s")
        if self.generate and self.whole_kv_tokens < self.context_tokens:
            raise ValueError(
                "simulated.kv_tokens must hold simulated.context_tokens, or a long sequence "
                "could never end"
            )
        if 0.0 < self.output_tokens_mean < 1.0:
            raise ValueError("simulated.output_tokens_mean must be 0 or at least 1 token")
        if self.step_tokens_max < self.sequences_max:
            raise ValueError(
                "simulated.step_tokens_max must be at least simulated.sequences_max tokens"
            )

    @classmethod
    def from_table(cls, model: str, table: Mapping[str, object]) -> SimulatedProfile:
        """A profile from a configuration table; ValueError for an unknown key or a wrong type."""
        profile = cls(model=model)
        known = {field.name: getattr(profile, field.name) for field in fields(cls)}
        changes: dict[str, object] = {}
        for key, value in table.items():
            if key not in known:
                raise ValueError(f"simulated.{key} is not a setting of the simulated engine")
            kind = type(known[key])
            if kind is float and type(value) is int:
                value = float(value)
            if type(value) is not kind:
                raise ValueError(f"simulated.{key} must be of type {kind.__name__}")
            changes[key] = value
        return replace(profile, **changes)  # type: ignore[arg-type]

    @property
    def whole_kv_tokens(self) -> int:
        """Tokens that the whole blocks of the KV memory hold."""
        return self.kv_tokens // self.kv_block_tokens * self.kv_block_tokens

    def step_s(self, sequences: int, prompt_tokens: int) -> float:
        """Seconds that a step lasts."""
        decode_ms = self.decode_step_ms + self.decode_step_ms_per_sequence * sequences
        return decode_ms / 1000.0 + prompt_tokens / self.prefill_tokens_per_s


_LEAST: Mapping[str, float] = {
    "decode_step_ms": 0.01,  # a step of no time would never let the event loop's clock go on
    "decode_step_ms_per_sequence": 0.0,
    "sequences_max": 1,
    "kv_tokens": 1,
    "kv_block_tokens": 1,
    "step_tokens_max": 1,
    "context_tokens": 2,
    "output_tokens_mean": 0.0,
    "embedding_dimensions": 0,
    "start_s": 0.0,
}
