"""MATH and its kind: single-turn problems, graded in processes of their own."""

from nlac_lightning.envs.math.env import MathEnv
from nlac_lightning.envs.math.grader import Grader
from nlac_lightning.envs.math.problems import DatasetProblems, GeneratedProblems, Problems, Stage

__all__ = ["DatasetProblems", "GeneratedProblems", "Grader", "MathEnv", "Problems", "Stage"]
