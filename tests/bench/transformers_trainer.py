#!/usr/bin/python3
"""The learner step of train_bench --device in Hugging Face's transformers, as its baseline, which train_bench starts.

transformers_trainer.py CONFIG ROWS PROMPT RESPONSE MICROBATCH_TOKENS STEPS
    CONFIG is a config.json of Qwen3. Random weights in bf16, rows of one length, whole logits, SDPA, AdamW as one fused
    kernel without fp32 masters. Prints a line of JSON: seconds of every step, most bytes allocated, and versions.

transformers_trainer.py --gradients FOLDER
    Reads FOLDER/config.json, FOLDER/model.safetensors and FOLDER/rows.json (rows of tokens of one length). Prints a
    line of JSON: relative errors of FOLDER/gradients-*.safetensors against this model in fp32, and of this model in
    bf16.
"""
import json
import pathlib
import sys
import time

import torch
import transformers


def shape(path):
    values = json.loads(pathlib.Path(path).read_text())
    for key in ("architectures", "model_type", "torch_dtype", "rope_scaling"):
        values.pop(key, None)
    return transformers.Qwen3Config(**values, attn_implementation="sdpa")


def model_of(config, dtype, device):
    torch.manual_seed(1)
    with torch.device(device):
        model = transformers.Qwen3ForCausalLM(config).to(dtype)
    model.config.use_cache = False
    return model.train()


def logprobs(model, ids):
    logits = model(ids[:, :-1]).logits
    return logits.float().log_softmax(-1).gather(2, ids[:, 1:].unsqueeze(2)).squeeze(2)


def time_steps(config, rows, prompt, response, tokens_max, steps):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    model = model_of(config, torch.bfloat16, device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-6, betas=(0.9, 0.95), weight_decay=0.0, fused=device == "cuda")
    ids = torch.randint(config.vocab_size, (rows, prompt + response), device=device)
    advantage = torch.tensor([1.0 if i % 2 else -1.0 for i in range(rows)], device=device)
    each = max(1, tokens_max // (prompt + response))
    seconds = []
    for _ in range(steps):
        wait()
        begin = time.perf_counter()
        for at in range(0, rows, each):
            scores = logprobs(model, ids[at:at + each])[:, prompt - 1:]
            ratio = (scores - scores.detach()).exp()
            loss = -(ratio * advantage[at:at + each, None]).sum() / (rows * response)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        wait()
        seconds.append(time.perf_counter() - begin)
    return {"seconds": seconds, "bytes": torch.cuda.max_memory_allocated() if device == "cuda" else 0,
            "torch": torch.__version__, "transformers": transformers.__version__}


def gradients(folder):
    from safetensors.torch import load_file
    folder = pathlib.Path(folder)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    weights = load_file(folder / "model.safetensors")
    ids = torch.tensor(json.loads((folder / "rows.json").read_text()), device=device)

    def of(dtype):
        model = model_of(shape(folder / "config.json"), dtype, device)
        model.load_state_dict({name: weights.get(name, weights["model.embed_tokens.weight"]).to(device, dtype)
                               for name in model.state_dict()})
        logprobs(model, ids).mean().backward()
        return {name: p.grad.float() for name, p in model.named_parameters()}

    exact = of(torch.float32)

    def errors(found):
        return {name: float((value.to(device).float() - exact[name]).norm() / exact[name].norm())
                for name, value in found.items()}

    found = {path.stem: errors(load_file(path)) for path in sorted(folder.glob("gradients-*.safetensors"))}
    rounded = of(torch.bfloat16)
    names = next(iter(found.values())).keys() if found else rounded.keys()
    found["transformers-bf16"] = errors({name: rounded[name] for name in names})
    return found


if sys.argv[1] == "--gradients":
    print(json.dumps(gradients(sys.argv[2])))
else:
    print(json.dumps(time_steps(shape(sys.argv[1]), *map(int, sys.argv[2:7]))))
