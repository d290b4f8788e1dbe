"""Lightning callbacks: rollouts, target network, evaluation, console, interrupts."""

from nlac_lightning.callbacks.console import Console
from nlac_lightning.callbacks.ema import EMACallback
from nlac_lightning.callbacks.held_out import HeldOutEvaluation
from nlac_lightning.callbacks.interrupt import InterruptCheckpoint
from nlac_lightning.callbacks.rollout import RolloutCallback

__all__ = [
    "Console",
    "EMACallback",
    "HeldOutEvaluation",
    "InterruptCheckpoint",
    "RolloutCallback",
]
