"""Language models behind an OpenAI-compatible chat server: client, policy, and a small server."""

from nlac_lightning.endpoint.cache import AnswerCache
from nlac_lightning.endpoint.client import Answer, EndpointClient
from nlac_lightning.endpoint.config import EndpointConfig

__all__ = ["Answer", "AnswerCache", "EndpointClient", "EndpointConfig"]
