"""Rollouts of a run for TRL's GRPOTrainer, and the publication of its policies. Written for TRL 1.16.

    rollouts = EcholineRollouts("runs/quickstart")
    trainer = EcholineGRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(rollouts.model, dtype=torch.float32),
        reward_funcs=task_reward,
        args=rollouts.arguments("trained", updates=2, learning_rate=2e-4),
        train_dataset=rollouts.dataset(),
        rollout_func=rollouts,
        callbacks=[PublishCallback(rollouts)],
    )
    trainer.train()

docs/how-to/train-with-trl.md says what TRL computes with the rollouts.
"""
from __future__ import annotations

import math
import os
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple, Union

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from .batch import Batch
from .client import Client

_Scores = Tuple[List[float], List[float]]  # the log-probability and the entropy of each token of a response


def task_reward(reward: Sequence[float], **_: Any) -> List[float]:
    """The reward function that returns the rewards of the run's task."""
    return list(reward)


class EcholineRollouts:
    """The `rollout_func` of a GRPOTrainer: a batch of the run for every generation batch of TRL. The batch has the
    prompts of the run's task, so those of TRL's dataset are ignored.

    Every process of a distributed training creates one. The first process talks to the learner."""

    def __init__(self, run: Union[str, "os.PathLike[str]"], lease: float = 3600.0, patience: float = 600.0):
        """`lease`: seconds for which a batch is leased; every optimizer step renews it. `patience`: as in `Client`."""
        self.client = Client(run, patience=patience) if _processes().is_main_process else None
        status = self._call_in_first_process(lambda client: client.status().raw)
        self.model: str = status["model"]  # folder of the newest checkpoint's policy
        self.prompts: int = status["prompts_per_step"]
        self.group_size: int = status["group_size"]
        self._status, self._lease = status, lease
        self._batch: Optional[Batch] = None  # only the first process has it
        self._updates = self._updates_left = 0  # optimizer steps of a batch, and those until it is consumed
        self._scores_by_row: Dict[int, _Scores] = {}  # of this process's rollouts, by row of the batch
        self._rows: List[int] = []  # this process's rollouts, in order: their rows of the batch

    def arguments(self, output_dir: str, updates: int = 1, accumulation: int = 1, **others: Any) -> GRPOConfig:
        """Returns the configuration that fits the run. Each batch gets `updates` optimizer steps, each with
        `accumulation` forward and backward passes. `others` are further fields of GRPOConfig."""
        rows, passes = self.prompts * self.group_size, updates * accumulation * _processes().num_processes
        if rows % passes != 0:
            raise ValueError(f"expected updates * accumulation * processes to divide the {rows} trajectories of a "
                             f"batch, found {passes}")
        repetitions = others.get("num_iterations", 1)
        steps_left = self._status["steps_total"] - self._status["steps"]
        return GRPOConfig(output_dir, **{
            "num_generations": self.group_size, "temperature": self._status["temperature"],
            "max_completion_length": self._status["response_tokens_max"],
            "max_steps": steps_left * updates * repetitions,
            "per_device_train_batch_size": rows // passes, "gradient_accumulation_steps": accumulation,
            "steps_per_generation": updates * accumulation, "disable_dropout": True, "report_to": "none",
            "save_strategy": "no", **others})

    def dataset(self) -> Dataset:
        """A dataset of empty prompts, as many as TRL wants for a batch."""
        return Dataset.from_dict({"prompt": [""] * self.prompts})

    def __call__(self, prompts: List[Any], trainer: GRPOTrainer) -> Dict[str, List[Any]]:
        """Called by TRL for every generation batch. Takes a batch of the run and returns this process's part of it."""
        if not trainer.model.training:
            raise ValueError("a run has no rollouts for TRL's evaluation: set eval_strategy='no'")
        if self._updates_left != 0:
            raise ValueError("training on the previous batch is not complete: add PublishCallback to the callbacks")
        passes = trainer.args.steps_per_generation * trainer.num_iterations
        if passes % trainer.args.gradient_accumulation_steps != 0:
            raise ValueError("expected whole optimizer steps for each batch: steps_per_generation * num_iterations "
                             f"is {passes}, gradient_accumulation_steps {trainer.args.gradient_accumulation_steps}")
        if not math.isclose(trainer.temperature, self._status["temperature"]):
            raise ValueError(f"expected the run's temperature {self._status['temperature']}, found "
                             f"{trainer.temperature}")
        rows = self._call_in_first_process(self._take_batch)
        if len(rows) != len(prompts) * _processes().num_processes or trainer.num_generations != self.group_size:
            raise ValueError(f"expected generation batches of {len(rows)} trajectories in groups of {self.group_size}, "
                             f"found {len(prompts) * _processes().num_processes} in groups of "
                             f"{trainer.num_generations}")
        self._updates = self._updates_left = passes // trainer.args.gradient_accumulation_steps
        self._scores_by_row = {}
        rows = rows[_processes().process_index * len(prompts):][:len(prompts)]
        self._rows = [row["row"] for row in rows]
        return {name: [row[name] for row in rows] for name in rows[0] if name != "row"}

    def record_scores(self, positions: Any, mask: Any, logprobs: Any, entropies: Any) -> None:
        """Keeps the model's log-probabilities and entropies of some rollouts for Client.score(). Of several values for
        a rollout the first count, because they are of the model before its updates."""
        for position, *row_values in zip(positions.tolist(), mask.bool(), logprobs.float(), entropies.float()):
            is_response_token, row_logprobs, row_entropies = row_values
            if is_response_token.any():
                self._scores_by_row.setdefault(self._rows[position], (row_logprobs[is_response_token].tolist(),
                                                                      row_entropies[is_response_token].tolist()))

    def count_update(self) -> Optional[int]:
        """Counts an optimizer step. After the last step of a batch, consumes the batch and returns the version to
        publish; None if the run does not publish this one."""
        self._updates_left -= 1
        if self._updates_left > 0:
            if self.client is not None and self._batch is not None:
                self.client.renew(self._batch, self._lease)
            return None
        scores_by_row: Dict[int, _Scores] = dict(gather_object(list(self._scores_by_row.items())))
        version: Optional[int] = self._call_in_first_process(lambda client: self._consume_batch(client, scores_by_row))
        return version

    def _call_in_first_process(self, function: Any) -> Any:
        """Calls the function in the first process only. Returns its result in all processes."""
        results = [function(self.client) if self.client is not None else None]
        return broadcast_object_list(results)[0]

    def _take_batch(self, client: Client) -> List[Dict[str, Any]]:
        """Takes a batch. Returns its rollouts, the groups one after another."""
        batch = None
        while batch is None:
            batch = client.take(lease=self._lease, takeover=True)
        self._batch = batch
        prompts, responses = _spans(batch["prompt_ends"]), _spans(batch["response_ends"])
        rows = [{"row": row,
                 "prompt_ids": batch["prompt_tokens"][prompts[row]].tolist(),
                 "completion_ids": batch["response_tokens"][responses[row]].tolist(),
                 "logprobs": batch["logprobs"][responses[row]].tolist(),
                 "env_mask": batch["loss_mask"][responses[row]].tolist(),
                 "reward": batch["reward"][row]}
                for row in sorted(range(len(batch)), key=lambda row: (batch["group"][row], batch["member"][row]))]
        groups = [batch["group"][row["row"]] for row in rows]
        for begin in range(0, len(groups), self.group_size):
            if len(groups) % self.group_size != 0 or len(set(groups[begin:begin + self.group_size])) != 1:
                raise ValueError(f"expected groups of {self.group_size} rollouts, found {groups}")
        return rows

    def _consume_batch(self, client: Client, scores_by_row: Mapping[int, _Scores]) -> Optional[int]:
        """Sends the scores and ends the learner step. Returns the version to publish, if any."""
        batch, self._batch = self._batch, None
        assert batch is not None
        if scores_by_row:
            logprobs = [math.nan] * len(batch["response_tokens"])  # NaN: not computed
            entropies = list(logprobs)
            for row, span in enumerate(_spans(batch["response_ends"])):
                if row in scores_by_row and len(scores_by_row[row][0]) == span.stop - span.start:
                    logprobs[span], entropies[span] = scores_by_row[row]
            client.score(batch, logprobs, entropies)
        client.consume(batch, {"updates": self._updates})
        version, total = batch.step, self._status["steps_total"]
        return version if version % self._status["publish_every"] == 0 or version == total else None


class EcholineGRPOTrainer(GRPOTrainer):
    """A GRPOTrainer whose importance weights are π / μ: μ is the policy that generated a token, of whatever version.
    A plain GRPOTrainer ignores μ if it does not use vLLM, and takes the rollouts for the current policy's."""

    def _generate_and_score_completions(self, inputs: List[Dict[str, Any]]) -> Dict[str, Any]:
        output: Dict[str, Any] = super()._generate_and_score_completions(inputs)
        output["old_per_token_logps"] = output["sampling_per_token_logps"]  # μ, which TRL's loss divides by
        output["position"] = torch.arange(len(output["advantages"]), device=output["advantages"].device)
        return output

    def _get_per_token_logps_and_entropies(self, *arguments: Any, **named: Any) -> Any:
        self._newest_scores = super()._get_per_token_logps_and_entropies(*arguments, **named)
        return self._newest_scores

    def _compute_loss(self, model: Any, inputs: Dict[str, Any]) -> Any:
        loss = super()._compute_loss(model, inputs)
        logps, entropies = (values.detach() for values in self._newest_scores[:2])
        mask = inputs["completion_mask"]
        self.rollout_func.record_scores(inputs["position"], mask, logps, entropies)
        is_trained = (mask * inputs["tool_mask"]).bool()  # by token; the environment's tokens are not
        distance = (logps - inputs["sampling_per_token_logps"])[is_trained]
        # TRL reports under these names when it uses vLLM.
        self._log_mean("sampling/sampling_logp_difference/mean", distance.abs())
        self._log_mean("sampling/importance_sampling_ratio/mean", distance.exp())
        return loss

    def _log_mean(self, name: str, values: Any) -> None:
        self._metrics["train"][name].append(self.accelerator.gather(values.mean()).nanmean().item())


class PublishCallback(TrainerCallback):
    """Ends the learner step after the last optimizer step of a batch: sends the scores, consumes the batch and
    publishes the model. With `evaluate`, also answers the held-out problems when the run asks for it, with the most
    likely tokens."""

    def __init__(self, rollouts: EcholineRollouts, evaluate: bool = False, keep_types: bool = False):
        """`keep_types`: as in `Client.publish()`."""
        self._rollouts, self._evaluate, self._keep_types = rollouts, evaluate, keep_types

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        client = self._rollouts.client
        if client is not None:
            status = client.status()
            if status.version_wanted == status.steps:
                client.publish(status.steps, policy_of(model), self._keep_types)
            self._answer_held_out(client, model)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        version = self._rollouts.count_update()
        client = self._rollouts.client
        if version is not None and client is not None:
            client.publish(version, policy_of(model), self._keep_types)
            self._answer_held_out(client, model)

    def _answer_held_out(self, client: Client, model: Any) -> None:
        status = client.status()
        if self._evaluate and status.evaluation_wanted == status.steps:
            client.evaluated(status.steps, dict(_generate_answers(model, client.held_out())))


def policy_of(model: Any) -> Dict[str, Any]:
    """Returns the model's tensors by their Hugging Face names. A tensor with several names, such as a tied output head,
    appears under the first one."""
    if hasattr(model, "peft_config"):
        raise TypeError("an adapter is not a policy: publish the merged model, for example a folder made by "
                        "merge_and_unload().save_pretrained(), with Client.publish()")
    policy, memory_seen = {}, set()
    for name, value in model.state_dict().items():
        memory = (value.data_ptr(), value.shape, value.dtype)
        if value.numel() == 0 or memory not in memory_seen:  # all empty tensors may have one address
            memory_seen.add(memory)
            policy[name] = value
    return policy


def _generate_answers(model: Any, held_out: Mapping[str, Any], rows: int = 64) -> Iterator[Tuple[str, List[int]]]:
    """Yields the id of each held-out problem and the most likely response, generated for `rows` problems at a time. The
    learner ignores tokens after the response's end."""
    was_training, problems = model.training, held_out["problems"]
    model.eval()
    for begin in range(0, len(problems), rows):
        at_once = problems[begin:begin + rows]
        length = max(len(problem["prompt_tokens"]) for problem in at_once)
        padding = [length - len(problem["prompt_tokens"]) for problem in at_once]
        tokens = torch.tensor([[0] * n + problem["prompt_tokens"] for n, problem in zip(padding, at_once)])
        mask = torch.tensor([[0] * n + [1] * (length - n) for n in padding])
        with torch.no_grad():
            generated = model.generate(tokens.to(model.device), attention_mask=mask.to(model.device), do_sample=False,
                                       max_new_tokens=held_out["response_tokens_max"], eos_token_id=held_out["eos"],
                                       pad_token_id=0)
        for problem, response in zip(at_once, generated[:, length:].tolist()):
            yield problem["id"], response
    model.train(was_training)


def _processes() -> PartialState:
    """Returns the processes of this training. Without `cpu`, accelerate sees only one on a machine without devices."""
    return PartialState(cpu=not torch.accelerator.is_available())


def _spans(ends: Sequence[int]) -> List[slice]:
    """Returns the range of each trajectory's tokens, given where the ranges end."""
    return [slice(begin, end) for begin, end in zip([0, *ends], ends)]
