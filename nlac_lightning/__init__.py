"""Train language-model agents with Natural Language Actor-Critic on PyTorch Lightning."""

__version__ = "0.1.0"
