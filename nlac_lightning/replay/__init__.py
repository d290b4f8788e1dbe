"""Episodes, the buffer that keeps them and the sampler that draws transitions from it.

Import and export with ``datasets`` are in :mod:`nlac_lightning.replay.hf`.
"""

from nlac_lightning.replay.buffer import BufferIndex, BufferStats, BufferWriteError, ReplayBuffer
from nlac_lightning.replay.episode import Episode, Transition, Turn
from nlac_lightning.replay.sampler import TransitionSampler

__all__ = [
    "BufferIndex",
    "BufferStats",
    "BufferWriteError",
    "Episode",
    "ReplayBuffer",
    "Transition",
    "TransitionSampler",
    "Turn",
]
