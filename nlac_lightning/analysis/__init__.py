"""Exact ceilings: where each improvement step ends in a finite world under an exact critic."""

from nlac_lightning.analysis.fixed_point import FixedPoint, ImprovementStep, fixed_point
from nlac_lightning.analysis.operators import verdict_probability

__all__ = ["FixedPoint", "ImprovementStep", "fixed_point", "verdict_probability"]
