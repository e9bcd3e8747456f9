#!/usr/bin/python3
"""The same learner step in plain eager PyTorch, as the baseline of train_bench, which starts this program.

Reads FOLDER/model.json, FOLDER/model.safetensors and FOLDER/batch.json. Then for every line on standard input it makes
a step and answers with a line of JSON: seconds, loss, gradient norm, and the most memory of the process so far. Every
sequence is a row, padded on the right to the longest of its micro-batch. Rows of like length go together, and logits
are made of scored tokens only.
"""
import json
import os
import sys
import time

import numpy
import torch
from torch.nn import functional as F


def read_safetensors(path):
    with open(path, "rb") as file:
        raw = file.read()
    size = int.from_bytes(raw[:8], "little")
    tensors = {}
    for name, entry in json.loads(raw[8:8 + size]).items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        assert entry["dtype"] == "BF16", entry
        halves = numpy.frombuffer(raw, numpy.uint16, (end - begin) // 2, 8 + size + begin)
        wide = (halves.astype(numpy.uint32) << 16).view(numpy.float32)
        tensors[name] = torch.nn.Parameter(torch.from_numpy(wide.copy()).view(entry["shape"]))
    return tensors


class Model:
    """Qwen3 as its reference implementation computes it."""

    def __init__(self, config, tensors):
        self.c, self.p = config, tensors
        dim = config["head_dim"]
        turns = config["rope_theta"] ** (-torch.arange(0, dim, 2).double() / dim)
        angles = torch.outer(torch.arange(config["max_position_embeddings"]).double(), turns).float()
        angles = torch.cat([angles, angles], 1)
        self.cos, self.sin = angles.cos(), angles.sin()

    def norm(self, x, name):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.c["rms_norm_eps"]) * self.p[name]

    def hidden(self, ids):
        c, p = self.c, self.p
        batch, tokens = ids.shape
        heads, kv, dim = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        cos, sin = self.cos[:tokens], self.sin[:tokens]
        ahead = torch.full((tokens, tokens), float("-inf")).triu(1)

        def rotate(x):
            half = torch.cat([-x[..., dim // 2:], x[..., :dim // 2]], -1)
            return x * cos + half * sin

        x = p["model.embed_tokens.weight"][ids]
        for i in range(c["num_hidden_layers"]):
            at = f"model.layers.{i}."
            z = self.norm(x, at + "input_layernorm.weight")
            q, k, v = (F.linear(z, p[at + f"self_attn.{which}_proj.weight"]).view(batch, tokens, -1, dim)
                       for which in "qkv")
            q = rotate(self.norm(q, at + "self_attn.q_norm.weight").transpose(1, 2))
            k = rotate(self.norm(k, at + "self_attn.k_norm.weight").transpose(1, 2))
            v = v.transpose(1, 2)
            k, v = k.repeat_interleave(heads // kv, 1), v.repeat_interleave(heads // kv, 1)
            scores = torch.matmul(q, k.transpose(2, 3)) / dim ** 0.5 + ahead
            mixed = torch.matmul(scores.softmax(-1), v).transpose(1, 2).reshape(batch, tokens, heads * dim)
            x = x + F.linear(mixed, p[at + "self_attn.o_proj.weight"])
            z = self.norm(x, at + "post_attention_layernorm.weight")
            up = F.silu(F.linear(z, p[at + "mlp.gate_proj.weight"])) * F.linear(z, p[at + "mlp.up_proj.weight"])
            x = x + F.linear(up, p[at + "mlp.down_proj.weight"])
        return self.norm(x, "model.norm.weight")

    def logprobs(self, ids, mask):
        """Of the tokens after those where `mask` is true."""
        hidden = self.hidden(ids[:, :-1])[mask]
        logits = F.linear(hidden, self.p.get("lm_head.weight", self.p["model.embed_tokens.weight"]))
        return logits.log_softmax(-1).gather(1, ids[:, 1:][mask].unsqueeze(1)).squeeze(1)


def microbatches(rows, tokens_max):
    part = []
    for row in sorted(rows, key=lambda row: len(row["tokens"])):
        if part and (len(part) + 1) * len(row["tokens"]) > tokens_max:
            yield part
            part = []
        part.append(row)
    yield part


def step(model, optimizer, rows, tokens_max):
    counted = sum(len(row["tokens"]) - row["prompt"] for row in rows)
    total = 0.0
    for part in microbatches(rows, tokens_max):
        width = max(len(row["tokens"]) for row in part)
        ids = torch.zeros(len(part), width, dtype=torch.long)
        mask = torch.zeros(len(part), width - 1, dtype=torch.bool)
        for i, row in enumerate(part):
            ids[i, :len(row["tokens"])] = torch.tensor(row["tokens"])
            mask[i, row["prompt"] - 1:len(row["tokens"]) - 1] = True
        drawn = torch.cat([torch.tensor(row["logprobs"]) for row in part])
        advantage = torch.cat([torch.full((len(row["logprobs"]),), row["advantage"]) for row in part])
        now = model.logprobs(ids, mask)
        ratio = (now - now.detach()).exp()
        weight = (now.detach() - drawn).exp().clamp_max(2)
        loss = -(weight * torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)).sum() / counted
        loss.backward()
        total += loss.item()
    norm = torch.nn.utils.clip_grad_norm_(list(model.p.values()), 1.0).item()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return total, norm


def memory(key):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(key))


def main():
    folder, threads, tokens_max = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(threads)
    model = Model(json.load(open(os.path.join(folder, "model.json"))),
                  read_safetensors(os.path.join(folder, "model.safetensors")))
    optimizer = torch.optim.AdamW(list(model.p.values()), lr=1e-6, betas=(0.9, 0.95), weight_decay=0.0)
    print(json.dumps({"torch": torch.__version__}), flush=True)
    for _ in sys.stdin:
        rows = json.load(open(os.path.join(folder, "batch.json")))
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
        before = memory("VmRSS")
        start = time.perf_counter()
        loss, norm = step(model, optimizer, rows, tokens_max)
        seconds = time.perf_counter() - start
        print(json.dumps({"seconds": seconds, "loss": loss, "gradient_norm": norm, "bytes": memory("VmHWM") - before}),
              flush=True)


main()
