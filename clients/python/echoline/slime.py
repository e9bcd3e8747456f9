"""The rollouts of a run as slime's rollout function, also for Miles. Written for slime of August 2026.

    export ECHOLINE_RUN=/path/to/runs/NAME
    ... --rollout-function-path echoline.slime.generate_rollout --update-weight-transport disk \\
        --update-weight-disk-dir saved --update-weight-disk-keep-files
    echoline publish NAME --watch saved --version-offset 1

slime trains, and the run's workers generate. The prompts are those of the run's task, and slime's own are ignored.
"""
from __future__ import annotations

import functools
import os
from typing import Any, Dict, List

from slime.rollout.base_types import RolloutFnTrainOutput
from slime.utils.types import Sample

from .batch import Batch
from .client import Client


def generate_rollout(args: Any, rollout_id: int, data_source: Any = None, evaluation: bool = False) -> Any:
    """Returns the next batch of the run as groups of samples. The batch counts as consumed from then on, because slime
    does not tell when it has trained on it: if slime ends before its next checkpoint, this batch is lost."""
    if evaluation:
        raise ValueError("a run has no rollouts for slime's evaluation: leave out --eval-interval, and use "
                         "`echoline evaluate`")
    client = _client()
    batch = None
    while batch is None:
        batch = client.take(takeover=True)
    groups = samples_of(batch)
    sizes = {len(group) for group in groups}
    if len(groups) != args.rollout_batch_size or sizes != {args.n_samples_per_prompt}:
        client.give_back(batch)
        raise ValueError(f"expected --rollout-batch-size {len(groups)} and --n-samples-per-prompt "
                         f"{'/'.join(map(str, sorted(sizes)))} as in the run, found {args.rollout_batch_size} and "
                         f"{args.n_samples_per_prompt}")
    client.consume(batch)
    ages = [batch.step - 1 - version for version in batch["versions"]]
    return RolloutFnTrainOutput(samples=groups, metrics={"echoline/step": batch.step,
                                                         "echoline/staleness": sum(ages) / max(len(ages), 1)})


def samples_of(batch: Batch) -> List[List[Any]]:
    """Returns a Sample for each trajectory of the batch, in groups."""
    groups: Dict[int, List[Any]] = {}
    prompts, responses = ([slice(begin, end) for begin, end in zip([0, *ends], ends)]
                          for ends in (batch["prompt_ends"], batch["response_ends"]))
    for row in sorted(range(len(batch)), key=lambda row: (batch["group"][row], batch["member"][row])):
        response = responses[row]
        group = groups.setdefault(batch["group"][row], [])
        index = (batch.step - 1) * len(batch) + row
        group.append(Sample(
            group_index=batch["group"][row], index=index, rollout_id=index,
            tokens=[*batch["prompt_tokens"][prompts[row]], *batch["response_tokens"][response]],
            response_length=response.stop - response.start, reward=batch["reward"][row],
            loss_mask=list(batch["loss_mask"][response]), rollout_log_probs=list(batch["logprobs"][response]),
            weight_versions=[str(version) for version in dict.fromkeys(batch["versions"][response])],
            status=Sample.Status.COMPLETED if batch["finished"][row] else Sample.Status.TRUNCATED,
            metadata={"problem": batch.problems[row], "worker": batch["worker"][row]}))
    return list(groups.values())


@functools.lru_cache(maxsize=1)
def _client() -> Client:
    """The connection to the run, one for all calls."""
    run = os.environ.get("ECHOLINE_RUN")
    if not run:
        raise ValueError("expected the run's folder in ECHOLINE_RUN, found nothing")
    return Client(run, patience=600)
