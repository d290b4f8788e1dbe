"""When failing episodes are no longer bad luck: the run stops and says what failed."""

from __future__ import annotations

from collections import Counter, deque

from nlac_lightning.errors import StoppedRun
from nlac_lightning.replay.episode import FAILURES, Episode

WINDOW = 32
"""Newest episodes that are looked at."""

ENOUGH = 8
"""Fewer episodes prove nothing."""


class TooManyFailures(StoppedRun):
    """Environment, user or engine fail too often to go on."""


class FailureWatch:
    """Watches the share of failed episodes among the newest ones.

    Args:
        share: more than this share of failures stops the run; 1 never does.
    """

    def __init__(self, share: float) -> None:
        self.share = share
        self._newest: deque[str | None] = deque(maxlen=WINDOW)

    def see(self, episode: Episode) -> None:
        """Count one episode; :class:`TooManyFailures` if it is the one too many."""
        failed = episode.reason in FAILURES
        said = str(episode.turns[-1].info.get("error", ""))[:300]
        self._newest.append(f"{episode.reason}: {said}" if failed else None)
        causes = [cause for cause in self._newest if cause is not None]
        if len(self._newest) < ENOUGH or len(causes) <= self.share * len(self._newest):
            return
        counts = Counter(cause.partition(":")[0] for cause in causes)
        kinds = ", ".join(f"{n} {reason}" for reason, n in counts.most_common())
        raise TooManyFailures(
            f"{len(causes)} of the last {len(self._newest)} episodes failed ({kinds}); the last "
            f"one by {causes[-1]}. Fix: repair what failed and continue with --ckpt_path last, or "
            "raise rollout.max_failures"
        )
