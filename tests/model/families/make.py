#!/usr/bin/env python3
"""Figures of Hugging Face's transformers for small random models of every family, which transformers_vectors_test
compares with the built-in model, and of adapters that PEFT trains, for peft_vectors_test. Needs torch, transformers and
peft from PyPI.

    tests/model/families/make.py           writes vectors.json beside this program
    tests/model/families/make.py --check   compares with it, and fails if a figure differs by more than 2e-5

Weights are not stored: each value follows from its tensor's name and its index (see weight()). Everything is computed
in fp32 on weights that bf16 can represent.
"""
import json
import pathlib
import sys
import tempfile

import numpy
import peft
import torch
import transformers
from safetensors.torch import load_file, save_file

HERE = pathlib.Path(__file__).resolve().parent
DIFFERENCE_MAX = 2e-5
TOKENS = [(7 * i * i + 3 * i + 1) % 32 for i in range(24)]  # more than the windows
COMMON = dict(vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
              num_key_value_heads=2, max_position_embeddings=64, eos_token_id=31, bos_token_id=None, pad_token_id=None)
LLAMA3 = {"rope_type": "llama3", "rope_theta": 100.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}
CONFIGS = {
    "qwen3": lambda: transformers.Qwen3Config(**COMMON, head_dim=16),
    "qwen2": lambda: transformers.Qwen2Config(**COMMON, tie_word_embeddings=True),
    "qwen2, windows": lambda: transformers.Qwen2Config(**COMMON, use_sliding_window=True, sliding_window=6,
                                                       max_window_layers=1),
    "llama": lambda: transformers.LlamaConfig(**COMMON, rope_parameters=LLAMA3),
    "smollm2": lambda: transformers.LlamaConfig(**COMMON, tie_word_embeddings=True,
                                                rope_parameters={"rope_type": "default", "rope_theta": 100000.0}),
    "mistral": lambda: transformers.MistralConfig(**COMMON, head_dim=16, sliding_window=None),
    "mistral, windows": lambda: transformers.MistralConfig(**COMMON, sliding_window=5),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **COMMON, head_dim=16, sliding_window=7, query_pre_attn_scalar=24,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={"full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0},
                         "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**COMMON, head_dim=16, moe_intermediate_size=20, num_experts=6,
                                                     num_experts_per_tok=2, norm_topk_prob=True,
                                                     mlp_only_layers=[1]),
}


ADAPTER = {"rank": 4, "alpha": 6, "learning_rate": 1e-2,
           "targets": ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]}


def weight(name, shape, norms_add_one):
    """Matrices and biases are uniform in [-0.5, 0.5), and so are norms to which 1 is added; other norms in [0.5, 1.5).
    The random bits of a value are SplitMix64 of FNV-1a of the tensor's name, plus the value's index."""
    digest = 0xcbf29ce484222325
    for byte in name.encode():
        digest = (digest ^ byte) * 0x100000001b3 % 2**64
    bits = numpy.arange(numpy.prod(shape), dtype=numpy.uint64) + numpy.uint64(digest)
    with numpy.errstate(over="ignore"):
        bits += numpy.uint64(0x9e3779b97f4a7c15)
        bits = (bits ^ (bits >> numpy.uint64(30))) * numpy.uint64(0xbf58476d1ce4e5b9)
        bits = (bits ^ (bits >> numpy.uint64(27))) * numpy.uint64(0x94d049bb133111eb)
        bits ^= bits >> numpy.uint64(31)
    uniform = (bits >> numpy.uint64(40)).astype(numpy.float64) / 2**24
    is_plain_norm = len(shape) == 1 and not name.endswith(".bias") and not norms_add_one
    values = uniform + 0.5 if is_plain_norm else uniform - 0.5
    return torch.from_numpy(values.astype(numpy.float32)).reshape(shape).to(torch.bfloat16)


def figures(config):
    """The config.json as saved, the logits of TOKENS, and the norm of each parameter's gradient of their summed
    log-probabilities."""
    with tempfile.TemporaryDirectory() as folder:
        transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
        file = pathlib.Path(folder) / "model.safetensors"
        norms_add_one = config.model_type == "gemma3_text"
        save_file({name: weight(name, tuple(tensor.shape), norms_add_one) for name, tensor in load_file(file).items()},
                  file, metadata={"format": "pt"})
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32,
                                                                  attn_implementation="eager")
        saved = json.loads((pathlib.Path(folder) / "config.json").read_text())
    if norms_add_one:  # transformers rounds this factor to the type of the weights, and policies are in bf16
        scale = model.model.embed_tokens.embed_scale
        scale.copy_(scale.to(torch.bfloat16))
    ids = torch.tensor([TOKENS])
    logits = model(ids).logits[0]
    scores = torch.log_softmax(logits, -1)[:-1].gather(-1, ids[0, 1:, None])
    scores.sum().backward()
    gradients = {name: value.grad.norm().item() for name, value in model.named_parameters() if value.grad is not None}
    return {"config": saved, "logits": logits.detach().tolist(), "gradient_norms": gradients}


def adapter_figures(config):
    """Four steps of AdamW on an adapter of PEFT: the loss before each step, and of every tensor of the adapter the norm
    of its change and its first values. As in the built-in trainer, the optimizer's weights are fp32, and those of the
    model are the same rounded to bf16. The loss is the mean of -log p over TOKENS."""
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.copy_(weight(name, tuple(value.shape), False))
    model = peft.get_peft_model(model, peft.LoraConfig(r=ADAPTER["rank"], lora_alpha=ADAPTER["alpha"],
                                                       target_modules=ADAPTER["targets"]))
    trained = {name.replace(".default", ""): value for name, value in model.named_parameters() if value.requires_grad}
    masters = {}
    with torch.no_grad():
        for name, value in trained.items():
            value.copy_(weight(name, tuple(value.shape), False))
            masters[name] = torch.nn.Parameter(value.clone())
    starts = {name: value.detach().clone() for name, value in masters.items()}
    optimizer = torch.optim.AdamW(masters.values(), lr=ADAPTER["learning_rate"], betas=(0.9, 0.95), eps=1e-8,
                                  weight_decay=0.1)
    ids, losses = torch.tensor([TOKENS]), []
    for _ in range(4):
        loss = -torch.log_softmax(model(ids).logits[0], -1)[:-1].gather(-1, ids[0, 1:, None]).mean()
        losses.append(loss.item())
        loss.backward()
        norm = sum(value.grad.double().square().sum() for value in trained.values()).sqrt().item()
        for name, value in trained.items():
            masters[name].grad = value.grad * min(1.0, 1.0 / norm)
            value.grad = None
        optimizer.step()
        with torch.no_grad():
            for name, value in trained.items():
                value.copy_(masters[name].to(torch.bfloat16))
    return {"config": config.to_dict(), **ADAPTER, "losses": losses,
            "tensors": {name: {"change": (value - starts[name]).norm().item(), "first": value.flatten()[:6].tolist()}
                        for name, value in masters.items()}}


def rounded(value):
    if isinstance(value, float):
        return float(f"{value:.7g}")
    if isinstance(value, list):
        return [rounded(v) for v in value]
    return {k: rounded(v) for k, v in value.items()} if isinstance(value, dict) else value


def main():
    path = HERE / "vectors.json"
    made = {name: figures(config()) for name, config in CONFIGS.items()}
    adapter = adapter_figures(CONFIGS["qwen3"]())
    for family in (*made.values(), adapter):
        family["config"].pop("transformers_version", None)
    if sys.argv[1:] != ["--check"]:
        text = ",\n".join(f"{json.dumps(name)}: {json.dumps(rounded(family))}" for name, family in made.items())
        path.write_text(f'{{"transformers": "{transformers.__version__}", "peft": "{peft.__version__}", '
                        f'"tokens": {TOKENS}, "adapter": {json.dumps(rounded(adapter))}, "models": {{\n{text}}}}}\n')
        return
    stored_losses = torch.tensor(json.loads(path.read_text())["adapter"]["losses"])
    worst = (torch.tensor(adapter["losses"]) - stored_losses).abs().max().item()
    print(f"PEFT: losses differ by at most {worst:.1g}")
    if not worst <= DIFFERENCE_MAX:
        sys.exit(f"PEFT: expected at most {DIFFERENCE_MAX}")
    stored = json.loads(path.read_text())["models"]
    if stored.keys() != made.keys():
        sys.exit(f"{path} has {sorted(stored)}, expected {sorted(made)}: run {__file__} without --check")
    for name, family in made.items():
        worst = (torch.tensor(family["logits"]) - torch.tensor(stored[name]["logits"])).abs().max().item()
        print(f"{name}: logits differ by at most {worst:.1g} from {path.name}")
        if not worst <= DIFFERENCE_MAX:
            sys.exit(f"{name}: expected at most {DIFFERENCE_MAX}")


main()
