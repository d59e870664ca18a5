"""Rates of the simulated engine's step loop, over windows of time. Plain numbers, no clock."""

from __future__ import annotations

WINDOW_S = 0.5
HIT_WINDOW_TOKENS = 1_000_000  # prompt tokens after which older hits count half


class Meter:
    """Counts what steps do; rates are those of the last window that is over."""

    __slots__ = (
        "_outputs",
        "_prompts",
        "_spent_s",
        "_start_s",
        "_steps",
        "hit_tokens",
        "looked_tokens",
        "output_tokens_per_s",
        "prompt_tokens_per_s",
        "step_ms",
    )

    def __init__(self, now: float) -> None:
        self._start_s = now
        self._prompts = self._outputs = self._steps = 0
        self._spent_s = 0.0
        self.prompt_tokens_per_s = self.output_tokens_per_s = 0.0
        self.step_ms: float | None = None
        self.hit_tokens = self.looked_tokens = 0.0

    @property
    def hit_rate(self) -> float | None:
        """Share of prompt tokens found in the prefix cache; None before any was looked for."""
        return self.hit_tokens / self.looked_tokens if self.looked_tokens else None

    def looked(self, tokens: int, found: int) -> None:
        """A prompt of so many tokens was looked up."""
        if self.looked_tokens > HIT_WINDOW_TOKENS:
            self.hit_tokens /= 2
            self.looked_tokens /= 2
        self.looked_tokens += tokens
        self.hit_tokens += found

    def step(self, now: float, lasted_s: float, prompts: int, outputs: int) -> None:
        """A step is over that took ``lasted_s`` seconds of real time."""
        self._steps += 1
        self._spent_s += lasted_s
        self._prompts += prompts
        self._outputs += outputs
        if now - self._start_s >= WINDOW_S:
            self.read(now)

    def read(self, now: float) -> None:
        """Closes the window if it is over, so that an idle engine reports no rate."""
        span = now - self._start_s
        if span < WINDOW_S:
            return
        self.prompt_tokens_per_s = self._prompts / span
        self.output_tokens_per_s = self._outputs / span
        if self._steps:
            self.step_ms = self._spent_s / self._steps * 1000.0
        self._prompts = self._outputs = self._steps = 0
        self._spent_s = 0.0
        self._start_s = now
