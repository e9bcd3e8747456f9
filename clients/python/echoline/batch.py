"""The trajectories of one learner step."""
from __future__ import annotations

import json
from typing import Any, List, Mapping

from .safetensors import Tensor, unpack


class Batch:
    """The result of `Client.take()`: n trajectories of whole groups (all rollouts of a problem). The tokens of all
    trajectories are concatenated: P tokens of prompts, N of responses. docs/trainers.md explains the tensors:

    - [P]: prompt_tokens
    - [N]: response_tokens, logprobs, versions, loss_mask
    - [n]: prompt_ends, response_ends, group, member, worker, reward, correct, finished
    - [P + N, layers, experts per token], only of a mixture of experts: routed_experts
    """

    def __init__(self, lease: str, step: int, data: bytes):
        self.lease, self.step, self._data = lease, step, data
        self.tensors: Mapping[str, Tensor]
        self.tensors, metadata = unpack(data)
        self.problems: List[str] = json.loads(metadata["problems"])  # the problem's id of each trajectory

    def __reduce__(self) -> Any:
        """Pickles the batch, so that the ranks of a trainer can share it."""
        return Batch, (self.lease, self.step, self._data)

    def __len__(self) -> int:
        return len(self.problems)

    def __getitem__(self, name: str) -> memoryview[Any]:
        """The values of a tensor as Python numbers."""
        return self.tensors[name].values()

    def numpy(self, name: str) -> Any:
        return self.tensors[name].numpy()

    def torch(self, name: str) -> Any:
        return self.tensors[name].torch()
