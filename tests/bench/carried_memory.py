#!/usr/bin/python3
"""Carries the policy of a mixture of experts that this program cannot compute: thousands of tensors of random bytes, an
external trainer that changes 1 % of the values of every tensor between two versions, and workers with a server that
answers without reading the weights. Prints bytes, seconds and the memory of learner and workers.

    tests/bench/carried_memory.py [--gigabytes 1] [--tensors 18000] [--workers 3] [--program build/release/cli/echoline]
"""
import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import threading
import time

import numpy

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "clients" / "python"))
import echoline  # noqa: E402

STEPS = 3


def write_model(a, folder):
    """Experts, of which most tensors are, with a few larger tensors as embeddings have."""
    subprocess.run([a.program, "model", "init", "--preset", "bytes-64", "-o", folder], check=True,
                   stdout=subprocess.DEVNULL)
    config = json.loads((folder / "config.json").read_text())
    config["model_type"], config["architectures"] = "qwen3_moe", ["Qwen3MoeForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config))
    draws = numpy.random.default_rng(1)
    values = int(a.gigabytes * 1e9 / 2)
    large = values // 20  # of the embedding and the head
    rows = max(1, (values - 2 * large) // (a.tensors - 2) // 256)
    shapes = {"model.embed_tokens.weight": (large // 256, 256), "lm_head.weight": (large // 256, 256)}
    for i in range(a.tensors - 2):
        shapes[f"model.layers.{i // 384}.mlp.experts.{i % 384 // 3}.{('gate', 'up', 'down')[i % 3]}_proj.weight"] = (
            rows, 256)
    def bf16(shape):
        bits = (draws.standard_normal(shape, dtype=numpy.float32) * numpy.float32(0.02)).view(numpy.uint32) >> 16
        return echoline.Tensor("BF16", shape, memoryview(bits.astype(numpy.uint16)).cast("B"))

    (folder / "model.safetensors").write_bytes(echoline.pack({name: bf16(shape) for name, shape in shapes.items()}))
    return max(shape[0] * shape[1] * 2 for shape in shapes.values())


def train(run, model):
    """Publishes the checkpoint in the folder `model`, changed in place, for every step."""
    client = echoline.Client(run, patience=600)
    draws = numpy.random.default_rng(2)
    while True:
        status = client.status()
        if status.version_wanted == status.steps:
            data = numpy.memmap(model / "model.safetensors", dtype=numpy.uint8, mode="r+")
            header = 8 + int(data[:8].view(numpy.uint64)[0])
            bits = data[header:].view(numpy.uint16)
            bits[draws.integers(0, len(bits), len(bits) // 100)] ^= 1
            data.flush()
            del bits, data
            client.publish(status.steps, model)
        if status.steps >= status.steps_total:
            return
        batch = client.take(wait=10)
        if batch is not None:
            client.consume(batch)


def peak_memory(pid):
    """The most anonymous memory so far: that of files, which the system can give back, does not count."""
    try:
        text = pathlib.Path(f"/proc/{pid}/status").read_text()
        return int(re.search(r"RssAnon:\s+(\d+)", text)[1]) * 1024
    except (OSError, TypeError):
        return 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--program", default=str(ROOT / "build/release/cli/echoline"))
    parser.add_argument("--engine", default=str(ROOT / "build/release/tests/worker/engine_program"))
    parser.add_argument("--gigabytes", type=float, default=1)
    parser.add_argument("--tensors", type=int, default=18_000)
    parser.add_argument("--workers", type=int, default=3)
    a = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        folder = pathlib.Path(name)
        largest = write_model(a, folder / "model")
        policy = (folder / "model" / "model.safetensors").stat().st_size
        offers = [{"id": f"w{i}", "provider": "local", "host": f"h{i}", "gpu": "RTX 4090", "gpu_count": 1,
                   "vram_gb": 80, "place": "DE", "up_mbit_per_s": 10_000, "down_mbit_per_s": 10_000,
                   "reliability": 0.999, "duration_days_max": 90, "rollouts_per_s": 5, "rollouts_source": "profile",
                   "gpu_usd_per_hour": 0.1, "storage_usd_per_hour": 0.001, "upload_usd_per_gb": 0,
                   "download_usd_per_gb": 0}
                  for i in range(a.workers)]
        (folder / "offers.json").write_text(json.dumps({"schema_version": 1, "offers": offers}))
        (folder / "run.yaml").write_text(f"""
run: {{name: carried, folder: {folder}, steps: {STEPS}}}
model: {{path: {folder}/model}}
task: {{adapter: arithmetic, options: {{evaluation_problems: 200}}}}
rollout: {{prompts_per_step: 6, group_size: 4, response_tokens_max: 16}}
staleness: {{budget: 2}}
learner: {{trainer: external}}
worker: {{engine: vllm, engine_command: '{a.engine} vllm {{model}} {{port}} --hash', engine_patience: 5 min}}
network: {{uplink: 10 Gbit/s}}
fleet: {{offers: {folder}/offers.json, provider: local, headroom: 0.5, join_timeout: 5 min, workers_max: {a.workers},
        step_time_expected: 10 s, delta_ratio_expected: 10, install_time_expected: 2 s}}
""")
        run = folder / "carried"
        log = open(folder / "log", "w+")
        learner = subprocess.Popen([a.program, "learner", folder / "run.yaml"], stdout=log, stderr=log)
        trainer = threading.Thread(target=train, args=(run, folder / "model"), daemon=True)
        trainer.start()
        most = {}
        while learner.poll() is None:
            most["learner"] = max(most.get("learner", 0), peak_memory(learner.pid))
            for process in pathlib.Path("/proc").iterdir():
                try:
                    words = (process / "cmdline").read_bytes().split(b"\0") if process.name.isdigit() else []
                except OSError:
                    continue
                if b"worker" in words[1:2] and os.fsencode(run) in b"\0".join(words):
                    most["worker"] = max(most.get("worker", 0), peak_memory(process.name))
            time.sleep(0.05)
        if learner.returncode != 0:
            log.seek(0)
            sys.exit(log.read()[-3000:])
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        report = json.loads((run / "report.json").read_text())
    print(f"policy: {policy / 1e9:.3f} GB in {a.tensors} tensors, the largest of {largest / 1e6:.1f} MB; "
          f"{a.workers} workers")
    for row in rows:
        if row["kind"] == "publication":
            print(f"version {row['version']}: {'snapshot' if row['snapshot'] else 'delta'} of "
                  f"{row['patch_bytes'] / 1e6:.1f} MB, density {row['density']:.4f}, encoded in "
                  f"{row['encode_seconds']:.2f} s")
        if row["kind"] == "broadcast" and row.get("t_b_seconds"):
            parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in row["t_b_parts"].items())
            print(f"version {row['version']}: T_b {row['t_b_seconds']:.2f} s ({parts})")
    for name, size in sorted(most.items()):
        print(f"{name}: at most {size / 1e9:.2f} GB of memory, {size / policy:.2f} x the policy")
    print(f"all workers identical: {report['weights']['all_workers_identical']}")


main()
