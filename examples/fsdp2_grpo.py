#!/usr/bin/env python3
"""Trains the policy of an echoline run with FSDP2: every process holds a part of the weights and hands in its shards.

    torchrun --nproc-per-node 2 examples/fsdp2_grpo.py runs/NAME [--learning-rate 2e-4]

On other machines than the learner's, RUN is the folder of the machine's node (`echoline node`), and --model a copy of
the run's initial model. The model is a directory that transformers loads. docs/trainers.md explains the calls;
the loss is that of pytorch_grpo.py.
"""
import argparse
import os
import pathlib
import sys
import uuid

import torch
import torch.distributed as dist
import transformers
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from pytorch_grpo import advantages_of, echoline, rows_of  # noqa: E402


def on_all_ranks(value):
    """Rank 0's value."""
    box = [value]
    dist.broadcast_object_list(box)
    return box[0]


def update(model, optimizer, batch, temperature, clip):
    """One update with the rank's rows of the batch. Returns the loss, summed over the ranks."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    tokens, _, mask, behaviour = rows_of(batch)
    advantage = advantages_of(batch)[:, None]
    rows = slice(rank, None, ranks)  # every rank has some, because a group has at least two responses
    logits = model(tokens[rows, :-1]).logits.float() / temperature
    logprobs = logits.log_softmax(-1).gather(-1, tokens[rows, 1:, None])[..., 0]
    ratio = (logprobs - behaviour[rows]).exp()
    clipped = ratio.clamp(1 - clip[0], 1 + clip[1])
    objective = torch.minimum(ratio * advantage[rows], clipped * advantage[rows]) * mask[rows]
    loss = -objective.sum() / mask.sum()
    (loss * ranks).backward()  # FSDP averages gradients over the ranks
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    total = loss.detach()
    dist.all_reduce(total)
    return float(total)


def main():
    arguments = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    arguments.add_argument("run", help="the run's folder, or that of this machine's node")
    arguments.add_argument("--model", help="directory of the initial model; default: the run's")
    arguments.add_argument("--learning-rate", type=float, default=2e-4)
    arguments.add_argument("--clip", type=float, nargs=2, default=(0.2, 0.28), metavar=("LOW", "HIGH"))
    arguments.add_argument("--gather-into", help="for tests: a folder for every version as rank 0 gathers it")
    a = arguments.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo" if not torch.cuda.is_available() else "nccl")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    client = echoline.Client(a.run, patience=600)
    status = client.status()
    model = transformers.AutoModelForCausalLM.from_pretrained(a.model or status.raw["model"], dtype=torch.float32)
    tied = model.config.tie_word_embeddings
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=a.learning_rate, betas=(0.9, 0.99), weight_decay=0)
    attempt = on_all_ranks(uuid.uuid4().hex)
    while True:
        status = on_all_ranks(client.status() if rank == 0 else None)
        if status.version_wanted == status.steps:
            state = {name: value for name, value in model.state_dict().items()
                     if not (tied and name == "lm_head.weight")}
            client.publish_shards(status.steps, state, rank, ranks, attempt)
            if a.gather_into:
                whole = {name: value.full_tensor() for name, value in state.items()}
                if rank == 0:
                    path = pathlib.Path(a.gather_into) / f"{status.steps}.safetensors"
                    path.write_bytes(echoline.pack({name: echoline.safetensors.of_torch(value)
                                                    for name, value in whole.items()}))
        if status.steps >= status.steps_total:
            break
        batch = on_all_ranks(client.take(wait=10, takeover=True) if rank == 0 else None)
        if batch is None:
            continue
        loss = update(model, optimizer, batch, status.raw["temperature"], a.clip)
        if rank == 0:
            client.consume(batch, {"loss": loss})
            print(f"step {batch.step}: reward {batch.torch('reward').mean():.3f}", flush=True)
        if os.environ.get("ECHOLINE_TEST_DIES") == f"{rank}:{batch.step}":
            os._exit(9)
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except echoline.Error as error:
        sys.exit(f"fsdp2_grpo: {error}")
