#!/usr/bin/env python3
"""Trains the policy of an echoline run as examples/pytorch_grpo.py does, in an asyncio program.

Each learner step trains in a thread. Meanwhile the program renews the batch's lease and shows the run's reward; another
program would serve its users there. A run with `learner.trainer: external`:

    examples/async_trainer.py runs/NAME [--learning-rate 2e-4]
"""
import argparse
import asyncio
import pathlib
import sys

import torch
from pytorch_grpo import Qwen3, advantages_of, rows_of

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "clients" / "python"))
import echoline  # noqa: E402

LEASE_S = 120


def train(model, optimizer, batch, temperature):
    """One update on the batch. Returns the loss."""
    tokens, _, mask, behaviour = rows_of(batch)
    logprobs = (model(tokens[:, :-1]) / temperature).log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    ratio, advantage = (logprobs - behaviour).exp(), advantages_of(batch)[:, None]
    loss = -(torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage) * mask).sum() / mask.sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss)


async def keep(client, batch):
    """Renews the lease until it is cancelled."""
    while True:
        await asyncio.sleep(LEASE_S / 4)
        await client.renew(batch, LEASE_S)


async def main(run, learning_rate):
    async with echoline.AsyncClient(run, patience=600) as client:
        status = await client.status()
        model_file = pathlib.Path(status.raw["model"]) / "model.safetensors"
        tensors, _ = echoline.unpack(model_file.read_bytes())
        model = Qwen3(status.raw["model_config"], {name: tensor.torch() for name, tensor in tensors.items()})
        optimizer = torch.optim.AdamW(model.weights.values(), lr=learning_rate, weight_decay=0)
        while status.steps < status.steps_total:
            if status.version_wanted == status.steps:
                await client.publish(status.steps, model.weights)
            try:
                batch = await asyncio.wait_for(client.take(lease=LEASE_S, takeover=True), 5)
            except asyncio.TimeoutError:
                batch = None  # a batch that came at the last moment is the next call's
            if batch is not None:
                keeping = asyncio.create_task(keep(client, batch))
                loss = await asyncio.to_thread(train, model, optimizer, batch, status.raw["temperature"])
                keeping.cancel()
                await client.consume(batch, {"loss": loss})
                print(f"step {batch.step}: reward {batch.torch('reward').mean():.3f}", flush=True)
            status = await client.status()
        if status.version_wanted == status.steps:
            await client.publish(status.steps, model.weights)


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    arguments.add_argument("run", help="the run's folder")
    arguments.add_argument("--learning-rate", type=float, default=2e-4)
    a = arguments.parse_args()
    torch.set_num_threads(1)
    try:
        asyncio.run(main(a.run, a.learning_rate))
    except echoline.Error as error:
        sys.exit(f"async_trainer: {error}")
