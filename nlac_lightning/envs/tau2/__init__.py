"""tau2-bench: customer service in retail and airline, with the real policies, tools and tasks."""

from nlac_lightning.envs.tau2.env import Tau2Env

__all__ = ["Tau2Env"]
