"""Single-player games of TextArena as a Gymnasium environment, for the adapter beside it."""

from __future__ import annotations

import string
from typing import Any

import gymnasium
import textarena
from gymnasium.spaces import Text

from nlac_lightning.errors import ConfigError

_TEXT = string.printable


class TextArenaGame(gymnasium.Env[str, str]):
    """One game; the reward comes at the end, as TextArena counts it (1 is a win).

    TextArena also pays for coming near, so a lost game may end above 0.

    Args:
        game: id of a game for one player, such as ``GuessTheNumber-v0``. Its ``-raw`` version is
            played: each observation holds what is new, and nothing twice.
        wins_only: count any reward below 1 as 0, so that success means a win.

    Raises:
        ConfigError: no such game.
    """

    def __init__(self, game: str, wins_only: bool = True) -> None:
        self.observation_space = Text(10**6, charset=_TEXT)
        self.action_space = Text(2000, min_length=1, charset=_TEXT)
        self.wins_only = wins_only
        try:
            self._game = textarena.make(f"{game.removesuffix('-raw')}-raw")
        except ValueError as error:
            raise ConfigError("env.kwargs.game", str(error), "see TextArena's games") from error

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """A new game; the observation holds its rules."""
        super().reset(seed=seed)
        self._game.reset(num_players=1, seed=seed)
        return self._news(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """One move."""
        done, _ = self._game.step(action)
        if not done:
            return self._news(), 0.0, False, False, {}
        rewards, facts = self._game.close()
        reward = float(rewards[0])
        if self.wins_only and reward < 1.0:
            reward = 0.0
        said = str(facts[0].get("reason") or "The game is over.")
        return said, reward, True, False, {"reason": "won" if reward >= 1.0 else "lost"}

    def _news(self) -> str:
        """Messages since the last move, the player's own left out."""
        _, messages = self._game.get_observation()
        own = textarena.ObservationType.PLAYER_ACTION
        return "\n".join(text for _, text, kind in messages if kind != own)
