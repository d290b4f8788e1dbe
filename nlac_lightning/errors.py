"""The one error that a user can fix: it names the setting and the way out."""

from __future__ import annotations


class ConfigError(ValueError):
    """A setting, file or model that cannot be used as given.

    Args:
        field: dotted name of the setting (``model.loss.kind``), the file or the model at fault.
        problem: what is wrong, as one sentence without a full stop.
        fix: what to write or run instead.
    """

    def __init__(self, field: str, problem: str, fix: str) -> None:
        self.field, self.problem, self.fix = field, problem, fix
        super().__init__(f"{field}: {problem}. Fix: {fix}")


class StoppedRun(RuntimeError):
    """A run that cannot go on for a reason outside its settings; the message says what to do.

    Nothing committed is lost: episodes and the checkpoint before it are whole.
    """


def require_positive(field: str, value: float, zero: bool = False) -> None:
    """Raise :class:`ConfigError` unless ``value`` is above zero (or at least zero)."""
    if value < 0 or (value == 0 and not zero):
        bound = "0 or more" if zero else "more than 0"
        raise ConfigError(field, f"{value} is not allowed", f"set {field} to {bound}")


def require_choice(field: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise :class:`ConfigError` unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ConfigError(field, f"'{value}' is unknown", f"use one of {', '.join(choices)}")
