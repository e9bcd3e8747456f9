"""A checkpoint engine of verl that publishes the actor's weights to a run. Written for verl 0.9.

    actor_rollout_ref.rollout.checkpoint_engine.backend=echoline
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=echoline.verl
    +actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.echoline.run=/path/to/runs/NAME

The global step is the version: `EcholineCheckpointManager.update_weights(step)` after each learner step. The batches
come from `Client.take()`; verl's own rollouts are not replaced.
"""
from __future__ import annotations

import asyncio
import time
from typing import Any, AsyncIterator, Dict, Iterable, List, Optional, Tuple

import ray
import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineManager, CheckpointEngineRegistry

from .client import Client


@CheckpointEngineRegistry.register("echoline")
class EcholineCheckpointEngine(CheckpointEngine):
    """Brings the weights of verl's actor (the model in training) to the rollouts. Each process of the actor gathers the
    weights with the others, and the first one publishes them."""

    def __init__(self, run: str, bucket_size: int = 0, is_master: bool = False, patience: float = 600.0,
                 keep_types: bool = False):
        """`run`: the run's folder. `patience` and `keep_types`: as in `Client`. verl sets the other two."""
        self._run, self._is_first, self._patience, self._keep_types = run, is_master, patience, keep_types

    def prepare(self) -> Dict[str, Any]:
        return {}

    @classmethod
    def build_topology(cls, actor_wg_world_size: int, rollout_world_size: int,
                       metadata: List[Any]) -> Tuple[Dict[str, List[Any]], Dict[str, List[Any]]]:
        raise ValueError("the run's workers get the policies from the learner: use EcholineCheckpointManager, which "
                         "has no rollout servers of verl")

    def init_process_group(self, **_: Any) -> None:
        pass

    def finalize(self) -> None:
        pass

    async def send_weights(self, weights: Iterable[Tuple[str, Any]],
                           global_steps: Optional[int] = None) -> Dict[str, float]:
        """Publishes the weights as version `global_steps`. Version 0 is the run's own model, which is published only if
        the learner waits for it. Returns seconds for verl's metrics."""
        started_at = time.perf_counter()
        policy: Dict[str, Any] = {}
        for name, weight in weights:  # every process iterates, because the gathering needs all of them
            if self._is_first:
                weight = weight.detach()
                if not self._keep_types:
                    weight = weight.to(torch.bfloat16)
                # A copy, because verl may use the memory again for the next tensor.
                policy[name] = weight.to("cpu", copy=True)
        if not self._is_first:
            return {}
        if global_steps is None:
            raise ValueError("expected the global step, which is the version, found None")
        gathered_at = time.perf_counter()
        await asyncio.to_thread(self._publish, global_steps, policy)
        return {"echoline/gather_seconds": gathered_at - started_at,
                "echoline/publish_seconds": time.perf_counter() - gathered_at}

    async def receive_weights(self, global_steps: Optional[int] = None) -> AsyncIterator[Tuple[str, Any]]:
        raise NotImplementedError("the run's workers get the policies from the learner")
        yield  # without it, this would not be the generator that verl expects

    def _publish(self, version: int, policy: Dict[str, Any]) -> None:
        client = Client(self._run, patience=self._patience)
        try:
            status = client.status()
            if version == 0 and status.version_wanted != 0:
                return
            if status.raw["model_config"].get("tie_word_embeddings"):
                policy.pop("lm_head.weight", None)  # the same tensor as the embedding
            client.publish(version, policy, self._keep_types)
        finally:
            client.close()


class EcholineCheckpointManager(CheckpointEngineManager):
    """Has verl's actor publish its weights. verl's own manager needs a rollout server of verl."""

    def __init__(self, config: Any, actor_wg: Any):
        super().__init__(config, actor_wg, replicas=[])

    def update_weights(self, global_steps: Optional[int] = None) -> Dict[str, float]:
        """Publishes the weights as version `global_steps`."""
        results = ray.get(self.actor_wg.update_weights(global_steps=global_steps, mode=self.backend))
        return {name: value for result in results for name, value in (result or {}).items()}
