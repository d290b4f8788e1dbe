"""ReAct prompting (arXiv 2210.03629): the untrained model, or any model behind an endpoint."""

from __future__ import annotations

from typing import Any

from nlac_lightning import models
from nlac_lightning.actors import Actor
from nlac_lightning.algorithms.base import Algorithm
from nlac_lightning.algorithms.config import ComputeConfig
from nlac_lightning.backbone import BackboneConfig
from nlac_lightning.endpoint.actor import EndpointActor
from nlac_lightning.endpoint.client import EndpointClient
from nlac_lightning.endpoint.config import EndpointConfig
from nlac_lightning.errors import ConfigError
from nlac_lightning.evaluation.evaluate import EvaluationConfig, Evaluator
from nlac_lightning.roles.roles import Roles, RolesConfig


class ReAct(Algorithm):
    """Plays held-out tasks by prompting alone; ``nlac test`` reports it, ``nlac fit`` refuses.

    Args:
        endpoint: the server of the policy. None prompts the local model of ``backbone``; with an
            endpoint only that model's tokenizer is loaded, for the ids of the records.
        backbone, roles, compute, evaluation: as in :class:`Algorithm`.
    """

    def __init__(
        self,
        endpoint: EndpointConfig | None = None,
        backbone: BackboneConfig | None = None,
        roles: RolesConfig | None = None,
        compute: ComputeConfig | None = None,
        evaluation: EvaluationConfig | None = None,
    ) -> None:
        super().__init__(backbone=backbone, roles=roles, compute=compute, evaluation=evaluation)
        self.endpoint = endpoint
        self._client = EndpointClient(endpoint) if endpoint else None

    def configure_model(self) -> None:
        """Load the local model, or the tokenizer alone."""
        if self._client is None:
            super().configure_model()
        elif not hasattr(self, "roles"):
            config = self.backbone_config
            tokenizer = models.load_tokenizer(
                config.name, trust_remote_code=config.trust_remote_code
            )
            self.roles = Roles(self.roles_config, tokenizer)

    def tested(self) -> dict[str, str]:
        """One policy: the prompted model."""
        return {"react": "base"}

    def evaluator(self) -> Evaluator:
        """Without a local model there is no critic to measure."""
        if self._client is None:
            return super().evaluator()
        if self.env is None:
            raise ConfigError("data.env", "no environment", "name one under data.env.class_path")
        return Evaluator(self.env, self.roles, None, None, self.evaluation_config)

    def actor(self, adapter: str) -> Actor:
        if self._client is None:
            return super().actor(adapter)
        return EndpointActor(self._client, self.roles, self.evaluation_config.temperature)

    def on_test_epoch_end(self) -> None:
        super().on_test_epoch_end()
        if self._client is not None:
            used = ", ".join(f"{n} {name}" for name, n in sorted(self._client.counts.items()))
            self._comparison += f"\nendpoint: {used or 'not asked'}"

    def setup(self, stage: str) -> None:
        """Refuse to train before a callback empties a buffer or loads anything."""
        if stage == "fit":
            raise ConfigError("model.class_path", "ReAct trains nothing", "use nlac test")

    def training_step(self, *args: Any, **kwargs: Any) -> None:
        """Never reached."""
        raise NotImplementedError
