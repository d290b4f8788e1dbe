"""Mathematics as an environment: one problem, one solution, one grade."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from nlac_lightning.envs.base import Message, OracleCritique, Session, Step, Task, TextEnv
from nlac_lightning.envs.math.grader import Grade, Grader, boxed, last_boxed
from nlac_lightning.envs.math.problems import SPLITS, Problem, Problems
from nlac_lightning.errors import require_choice

SYSTEM = (
    "Solve the problem step by step. Put the final answer, and nothing else, in \\boxed{} at the "
    "end of the solution."
)


class MathEnv(TextEnv):
    r"""Single-turn problems with checkable answers; reward 1 for a right one in ``\boxed{}``.

    Every transition is terminal: the successor model describes how the solution turns out, and
    the critique judges the process that led there. In evaluations accuracy is ``success``, a
    solution without a box an invalid action, and a solution's length the tokens per episode.

    Args:
        problems: see :mod:`nlac_lightning.envs.math.problems`.
        system: the system message.
        reveal: what a wrong solution is told, for the critic's targets to learn from (the episode
            is over, so no policy sees it): the right ``answer``, the worked ``solution`` too where
            there is one, or ``nothing``.
        grading_seconds: limit of one comparison.
        graders: processes that grade.

    Raises:
        ConfigError: a setting out of range, problems that cannot be loaded, no math-verify.
    """

    def __init__(
        self,
        problems: Problems,
        system: str = SYSTEM,
        reveal: Literal["answer", "solution", "nothing"] = "answer",
        grading_seconds: float = 10.0,
        graders: int = 1,
    ) -> None:
        require_choice("env.reveal", reveal, ("answer", "solution", "nothing"))
        self.grader = Grader(grading_seconds, graders)
        self.system, self.reveal = system, reveal
        self.name = f"math/{problems.name}"
        self._tasks = {
            split: [
                Task(f"{split}-{i:05d}", split, problem.to_data())
                for i, problem in enumerate(loaded)
            ]
            for split, loaded in problems.load().items()
        }

    def tasks(self, split: str) -> Sequence[Task]:
        """Tasks ``train-00000``, ...; those of training are ordered from easy to hard."""
        require_choice("split", split, SPLITS)
        return self._tasks[split]

    def reset(self, task: Task, seed: int = 0) -> MathSession:
        """Pose a problem; ``seed`` changes nothing."""
        return MathSession(Problem(**task.data), self.system, self.reveal, self.grader)

    def facts(self, task: Task) -> dict[str, Any]:
        """``level``: difficulty, by which evaluations group problems."""
        return {"level": task.data["level"]}


class MathSession(Session):
    """One problem.

    ``Step.info`` holds ``valid`` (there is a box), ``error``, ``answer`` (what is in the box),
    ``length`` (characters) and ``reason``: ``right``, ``wrong`` or ``no_answer``.

    Args:
        problem: the problem.
        system: first message.
        reveal: see :class:`MathEnv`.
        grader: compares answers.
    """

    def __init__(self, problem: Problem, system: str, reveal: str, grader: Grader) -> None:
        self.problem, self.reveal, self.grader = problem, reveal, grader
        self.ended = False
        self._graded: dict[str, Grade] = {}
        self.opening = [
            {"role": "system", "content": system},
            {"role": "user", "name": "Problem", "content": problem.question},
        ]

    def step(self, action: str) -> Step:
        """Grade a solution by what stands in its last box."""
        if self.ended:
            return Step([], terminated=True, info={"valid": False, "error": "already solved"})
        self.ended = True
        answer = last_boxed(action)
        grade = self._grade(action)
        reason = "no_answer" if answer is None else "right" if grade.correct else "wrong"
        info = {
            "valid": answer is not None,
            "error": grade.error,
            "answer": answer,
            "length": len(action),
            "reason": reason,
        }
        reply = [_graded(self._verdict(reason, answer))]
        return Step(reply, float(grade.correct), terminated=True, info=info)

    def oracle_action(self) -> str | None:
        """The worked solution where there is one, and the right answer in a box."""
        if self.ended:
            return None
        if last_boxed(self.problem.solution) is not None:
            return self.problem.solution
        return f"{self.problem.solution} {boxed(self.problem.answer)}".strip()

    def oracle_critique(self, action: str) -> OracleCritique | None:
        """Good exactly if the answer is right."""
        right = self.oracle_action()
        if right is None:
            return None
        if self._grade(action).correct:
            return OracleCritique(True, "the answer is right.", right)
        if last_boxed(action) is None:
            return OracleCritique(False, "there is no answer in a box.", right)
        return OracleCritique(False, f"the answer is not {last_boxed(action)}.", right)

    def _grade(self, action: str) -> Grade:
        answer = last_boxed(action)
        if answer is None:
            return Grade(False, "no \\boxed{} answer")
        if answer not in self._graded:
            self._graded[answer] = self.grader.grade(self.problem.answer, answer)
        return self._graded[answer]

    def _verdict(self, reason: str, answer: str | None) -> str:
        if reason == "right":
            return f"Right: the answer is {answer}."
        said = "No answer in a box." if answer is None else f"Wrong: the answer is not {answer}."
        if self.reveal != "nothing":
            said += f" It is {self.problem.answer}."
        if self.reveal == "solution" and self.problem.solution:
            said += f" A right solution: {self.problem.solution}"
        return said


def _graded(text: str) -> Message:
    return {"role": "user", "name": "Grader", "content": text}
