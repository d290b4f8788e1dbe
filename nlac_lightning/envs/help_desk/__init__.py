"""A small customer service: procedurally generated tasks of four levels, with an oracle."""

from nlac_lightning.envs.help_desk.env import HelpDeskEnv

__all__ = ["HelpDeskEnv"]
