"""An engine's limits."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class EngineConfig:
    """What an engine may do at once. Sizes in tokens unless said otherwise."""

    fingerprint: str  # salts the root of every block hash
    max_context: int
    max_batch_tokens: int = 256  # computed in one step
    max_sequences: int = 64  # in one step
    max_waiting: int = 256  # sequences queued before `add` refuses
    vocab_size: int = 0  # ids at or above it are refused; 0: not checked
    prefix_cache: bool = True

    @property
    def max_running(self) -> int:
        """Sequences that may hold a place: with each decoding, a step has one token left for a prompt."""
        return min(self.max_sequences, max(1, self.max_batch_tokens - 1))
