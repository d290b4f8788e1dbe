"""Settings that all algorithms share: of the optimizer, and of how much is processed at once."""

from __future__ import annotations

from dataclasses import dataclass, field

from nlac_lightning.errors import require_positive
from nlac_lightning.generation.vllm_engines import GenerationConfig


@dataclass
class OptimizerConfig:
    """AdamW on the adapter, with a linear warm-up."""

    lr: float = 1e-4
    """Step size after the warm-up; 5e-5 to 1e-3 is usual for adapters."""
    warmup_steps: int = 10
    """Gradient steps over which the step size grows from 0."""
    decay_steps: int = 0
    """Gradient steps over which the step size then falls linearly to a tenth; 0 keeps it."""
    weight_decay: float = 0.0
    """Pull of the adapters towards zero."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Memory of the moment estimates."""
    clip_norm: float = 1.0
    """Gradients longer than this are scaled down to it; Lightning's own key cannot be used with
    manual optimisation."""
    max_skipped: int = 10
    """Gradient steps in a row with a loss or gradient that is not finite, after which the run
    stops. Each such step changes no weight; its batch is written to ``skipped/`` in the run."""

    def __post_init__(self) -> None:
        require_positive("model.optimizer.lr", self.lr)
        require_positive("model.optimizer.warmup_steps", self.warmup_steps, zero=True)
        require_positive("model.optimizer.decay_steps", self.decay_steps, zero=True)
        require_positive("model.optimizer.weight_decay", self.weight_decay, zero=True)
        require_positive("model.optimizer.clip_norm", self.clip_norm)
        require_positive("model.optimizer.max_skipped", self.max_skipped)

    def scale(self, step: int) -> float:
        """Factor of ``lr`` in gradient step ``step`` (from 0)."""
        rise = min(1.0, (step + 1) / max(self.warmup_steps, 1))
        if not self.decay_steps:
            return rise
        fallen = min(max(step - self.warmup_steps, 0) / self.decay_steps, 1.0)
        return rise * (1.0 - 0.9 * fallen)


@dataclass
class ComputeConfig:
    """How much is processed at one time. These change speed and memory, never results."""

    train_pack_tokens: int = 1024
    """Distinct tokens of one forward and backward pass (micro-batch)."""
    prefill_pack_tokens: int = 1024
    """Distinct prompt tokens of one forward pass in generation."""
    decode_rows: int = 64
    """Completions that are generated side by side."""
    cache_tokens: int = 20_000
    """Tokens of prefixes whose keys and values are kept, per adapter."""
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    """Which engine writes the texts."""

    def __post_init__(self) -> None:
        for name in ("train_pack_tokens", "prefill_pack_tokens", "decode_rows", "cache_tokens"):
            require_positive(f"model.compute.{name}", getattr(self, name))
