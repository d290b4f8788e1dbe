"""20 Questions: an object table of its own, or any list of names with a model that answers."""

from nlac_lightning.envs.twenty_questions.answerer import (
    Answerer,
    CachedAnswerer,
    EndpointAnswerer,
    GeneratorAnswerer,
    TableAnswerer,
)
from nlac_lightning.envs.twenty_questions.env import TwentyQuestionsEnv

__all__ = [
    "Answerer",
    "CachedAnswerer",
    "EndpointAnswerer",
    "GeneratorAnswerer",
    "TableAnswerer",
    "TwentyQuestionsEnv",
]
