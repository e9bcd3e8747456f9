#!/usr/bin/env python3
"""Trains the policy of an echoline run with PyTorch, by GRPO on the rollouts of its fleet.

docs/tutorials/own-trainer.md has the steps to start it:

    examples/pytorch_grpo.py runs/NAME [--learning-rate 2e-4]
"""
import argparse
import math
import pathlib
import sys

import torch
import torch.nn.functional as F

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "clients" / "python"))
import echoline  # noqa: E402


class Qwen3:
    """A dense Qwen3 model in fp32. `weights` have the names of Hugging Face."""

    def __init__(self, config, weights):
        self.c = config
        self.weights = {name: value.float().requires_grad_() for name, value in weights.items()}

    def norm(self, x, name):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.c["rms_norm_eps"]) * self.weights[name]

    def rotate(self, x, positions):
        half = x.shape[-1] // 2
        angles = positions[:, None] * self.c["rope_theta"] ** (-torch.arange(half) / half)
        cos, sin = angles.cos(), angles.sin()
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def __call__(self, tokens):
        """tokens [rows, length] -> logits [rows, length, vocabulary]. Padding at the end of a row does not change
        its logits."""
        c, w, positions = self.c, self.weights, torch.arange(tokens.shape[1], dtype=torch.float32)
        heads, kv_heads, size = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        causal = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)
        x = F.embedding(tokens, w["model.embed_tokens.weight"])
        for i in range(c["num_hidden_layers"]):
            layer = f"model.layers.{i}."
            h = self.norm(x, layer + "input_layernorm.weight")
            split = lambda name, n: (h @ w[f"{layer}self_attn.{name}_proj.weight"].T).unflatten(
                -1, (n, size)).transpose(1, 2)
            q = self.rotate(self.norm(split("q", heads), layer + "self_attn.q_norm.weight"), positions)
            k = self.rotate(self.norm(split("k", kv_heads), layer + "self_attn.k_norm.weight"), positions)
            k, v = (t.repeat_interleave(heads // kv_heads, 1) for t in (k, split("v", kv_heads)))
            scores = (q @ k.transpose(-1, -2) / math.sqrt(size)).masked_fill(causal, -torch.inf)
            x = x + (scores.softmax(-1) @ v).transpose(1, 2).flatten(2) @ w[layer + "self_attn.o_proj.weight"].T
            h = self.norm(x, layer + "post_attention_layernorm.weight")
            gate, up = (h @ w[f"{layer}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
            x = x + (F.silu(gate) * up) @ w[layer + "mlp.down_proj.weight"].T
        head = "model.embed_tokens.weight" if c["tie_word_embeddings"] else "lm_head.weight"
        return self.norm(x, "model.norm.weight") @ w[head].T


def rows_of(batch):
    """The padded tokens [n, T] of the batch, and three tensors [n, T - 1] for their targets: whether a target is a
    response token, its loss mask, and its log-probability under the policy that generated it."""
    lengths = lambda ends: [end - begin for begin, end in zip([0, *ends], ends)]
    prompts, responses = (batch.torch(name + "_tokens").split(lengths(batch[name + "_ends"]))
                          for name in ("prompt", "response"))
    tokens = torch.nn.utils.rnn.pad_sequence([torch.cat(row).long() for row in zip(prompts, responses)],
                                             batch_first=True)
    is_response = torch.zeros(len(batch), tokens.shape[1] - 1, dtype=torch.bool)
    for row, prompt, response in zip(is_response, prompts, responses):
        row[len(prompt) - 1:len(prompt) + len(response) - 1] = True
    mask, behaviour = torch.zeros(is_response.shape), torch.zeros(is_response.shape)
    mask[is_response], behaviour[is_response] = batch.torch("loss_mask").float(), batch.torch("logprobs")
    return tokens, is_response, mask, behaviour


def advantages_of(batch):
    """The advantage of each response: its reward's distance from the group's mean, in standard deviations."""
    reward = batch.torch("reward").float()
    _, group = batch.torch("group").unique(return_inverse=True)
    count = torch.bincount(group).float()
    centred = reward - (torch.zeros_like(count).index_add(0, group, reward) / count)[group]
    deviation = (torch.zeros_like(count).index_add(0, group, centred.square()) / count).sqrt()[group]
    return centred / (deviation + 1e-6)


def answers(model, held_out):
    """The most likely response to each held-out problem, token by token. The learner ignores tokens after its end."""
    problems, length = held_out["problems"], held_out["response_tokens_max"]
    prompts = [torch.tensor(p["prompt_tokens"]) for p in problems]
    ends, rows = torch.tensor([len(p) for p in prompts]), torch.arange(len(prompts))
    tokens = F.pad(torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True), (0, length))
    with torch.no_grad():
        for step in range(length):
            tokens[rows, ends + step] = model(tokens[:, :-1])[rows, ends + step - 1].argmax(-1)
    return {p["id"]: row[end:end + length].tolist() for p, row, end in zip(problems, tokens, ends)}


def main():
    arguments = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    arguments.add_argument("run", help="the run's folder")
    arguments.add_argument("--learning-rate", type=float, default=2e-4)
    arguments.add_argument("--minibatches", type=int, default=2)
    arguments.add_argument("--clip", type=float, nargs=2, default=(0.2, 0.28), metavar=("LOW", "HIGH"))
    arguments.add_argument("--threads", type=int, default=1)
    a = arguments.parse_args()
    torch.set_num_threads(a.threads)
    client = echoline.Client(a.run, patience=600)
    status = client.status()
    if status.raw["top_p"] != 1 or status.raw["top_k"] or status.raw["min_p"]:
        sys.exit("this trainer computes log-probabilities of the whole distribution: set rollout.top_p, top_k and "
                 "min_p to 1, 0 and 0")
    model_file = pathlib.Path(status.raw["model"]) / "model.safetensors"
    tensors, _ = echoline.unpack(model_file.read_bytes())
    model = Qwen3(status.raw["model_config"], {name: tensor.torch() for name, tensor in tensors.items()})
    optimizer = torch.optim.AdamW(model.weights.values(), lr=a.learning_rate, betas=(0.9, 0.99), weight_decay=0)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: min(1.0, (update + 1) / 10))
    while True:
        status = client.status()
        if status.version_wanted == status.steps:
            client.publish(status.steps, model.weights)
        if status.evaluation_wanted == status.steps:
            accuracy = client.evaluated(status.steps, answers(model, client.held_out()))
            print(f"step {status.steps}: accuracy {accuracy:.3f} on held-out problems", flush=True)
        if status.steps >= status.steps_total:
            break
        batch = client.take(wait=10, takeover=True)
        if batch is None:
            continue
        tokens, is_response, mask, behaviour = rows_of(batch)
        scores, entropies = torch.full(is_response.shape, torch.nan), torch.full(is_response.shape, torch.nan)
        advantage = advantages_of(batch)[:, None]
        losses, norms = [], []
        informative = (advantage[:, 0] != 0).nonzero()[:, 0]  # the other responses have no gradient
        for rows in informative.split(math.ceil(len(batch) / a.minibatches)) if len(informative) else ():
            distribution = (model(tokens[rows, :-1]) / status.raw["temperature"]).log_softmax(-1)
            logprobs = distribution.gather(-1, tokens[rows, 1:, None])[..., 0]
            scores[rows], entropies[rows] = logprobs.detach(), -(distribution.exp() * distribution).sum(-1).detach()
            ratio = (logprobs - behaviour[rows]).exp()
            clipped = ratio.clamp(1 - a.clip[0], 1 + a.clip[1])
            loss = -(torch.minimum(ratio * advantage[rows], clipped * advantage[rows])
                     * mask[rows]).sum() / mask[rows].sum()
            optimizer.zero_grad()
            loss.backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.weights.values(), 1.0)))
            optimizer.step()
            warmup.step()
            losses.append(float(loss))
        figures = {"loss": sum(losses) / len(losses), "gradient_norm": sum(norms) / len(norms)} if losses else {}
        client.score(batch, scores[is_response], entropies[is_response])
        client.consume(batch, {"updates": len(losses), **figures})
        print(f"step {batch.step}: reward {batch.torch('reward').mean():.3f}", flush=True)


if __name__ == "__main__":
    try:
        main()
    except echoline.Error as error:
        sys.exit(f"pytorch_grpo: {error}")
