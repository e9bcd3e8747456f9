#!/usr/bin/env python3
"""Reinforcement learning with Tinker's client: an echoline run trains, and its rented fleet samples.

Needs tinker 0.38, and a run with `learner.trainer: tinker` (docs/how-to/train-with-tinker.md):

    examples/tinker_rl.py runs/NAME [--steps 20]

The task is addition, with the quickstart's prompts: "12+34=" and the digits of the sum.
"""
import argparse
import json
import os
import pathlib
import random

import tinker
from tinker import types


def connect(run):
    """Sets the client's address and key from the run's folder, unless the environment has them."""
    address = json.loads((pathlib.Path(run) / "trainer-api.json").read_text())
    os.environ.setdefault("TINKER_BASE_URL", address["url"])
    os.environ.setdefault("TINKER_API_KEY", address["key"])


def datum(prompt, sequence, advantage):
    """A response as a training example: position i predicts token i + 1."""
    tokens = prompt + list(sequence.tokens)
    targets, ahead = tokens[1:], len(prompt) - 1
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": targets,
                        "logprobs": [0.0] * ahead + list(sequence.logprobs),
                        "advantages": [0.0] * ahead + [advantage] * len(sequence.tokens)})


def main():
    arguments = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    arguments.add_argument("run", help="the run's folder")
    arguments.add_argument("--steps", type=int, default=20)
    arguments.add_argument("--prompts", type=int, default=32, help="in a step")
    arguments.add_argument("--samples", type=int, default=8, help="of a prompt")
    arguments.add_argument("--learning-rate", type=float, default=1e-3)
    arguments.add_argument("--rank", type=int, default=32, help="learner.adapter.rank of the run")
    a = arguments.parse_args()
    connect(a.run)

    service = tinker.ServiceClient()
    base_model = tinker.RestClient().get_server_capabilities().result().supported_models[0].model_name
    training = service.create_lora_training_client(base_model=base_model, rank=a.rank).result()
    tokenizer = training.get_tokenizer()
    ends = set(tokenizer.all_special_ids)
    draw = random.Random(1)
    for step in range(a.steps):
        sampling = training.save_weights_and_get_sampling_client().result()
        problems = [(draw.randrange(100), draw.randrange(100)) for _ in range(a.prompts)]
        prompts = [tokenizer.encode(f"{x}+{y}=", add_special_tokens=False) for x, y in problems]
        futures = [sampling.sample(types.ModelInput.from_ints(prompt), num_samples=a.samples,
                                   sampling_params=types.SamplingParams(temperature=1.0)) for prompt in prompts]
        data, rewards = [], []
        for (x, y), prompt, future in zip(problems, prompts, futures):
            sequences = future.result().sequences
            texts = [tokenizer.decode([t for t in s.tokens if t not in ends]) for s in sequences]
            scores = [float(text.strip() == str(x + y)) for text in texts]
            mean = sum(scores) / len(scores)
            rewards.extend(scores)
            data.extend(datum(prompt, s, r - mean) for s, r in zip(sequences, scores) if r != mean)
        if data:
            backward = training.forward_backward(data, "importance_sampling")
            update = training.optim_step(types.AdamParams(learning_rate=a.learning_rate))
            backward.result(), update.result()
        print(json.dumps({"step": step, "reward": sum(rewards) / len(rewards), "examples": len(data)}), flush=True)


if __name__ == "__main__":
    main()
