"""A text world of rooms whose values are known exactly."""

from nlac_lightning.envs.language_mdp.env import LanguageMDPEnv

__all__ = ["LanguageMDPEnv"]
