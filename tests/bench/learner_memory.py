#!/usr/bin/python3
"""Compares the most memory that a run's learner takes with the estimate of `echoline doctor`, in a real run with one
worker and two learner steps. With --trainer external this script trains: it changes about 3 % of the values of every
tensor by one bit.

    tests/bench/learner_memory.py --program build/release/echoline --preset qwen3-0.6b --trainer external \
        [--fp32] [--set KEY=VALUE ...]
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

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "clients" / "python"))

OFFERS = {"schema_version": 1, "offers": [
    {"id": "a", "provider": "local", "host": "h", "gpu": "RTX 4090", "gpu_count": 1, "vram_gb": 80, "place": "DE",
     "up_mbit_per_s": 1000,
     "down_mbit_per_s": 1000, "reliability": 0.999, "duration_days_max": 90, "rollouts_per_s": 50,
     "rollouts_source": "profile", "gpu_usd_per_hour": 0.1, "storage_usd_per_hour": 0.001, "upload_usd_per_gb": 0.001,
     "download_usd_per_gb": 0.001}]}


def train(run):
    import torch

    import echoline

    client = echoline.Client(run, patience=600)
    status = client.status()
    with open(os.path.join(status.raw["model"], "model.safetensors"), "rb") as file:
        tensors = {name: tensor.torch() for name, tensor in echoline.unpack(file.read())[0].items()}
    while True:
        status = client.status()
        if status.version_wanted == status.steps:
            for tensor in tensors.values():
                bits = tensor.view(torch.int16)
                bits ^= (torch.rand(bits.shape) < 0.03).to(torch.int16)
            client.publish(status.steps, {name: echoline.safetensors.Tensor(
                                              "F32", tuple(t.shape), memoryview(t.float().numpy()).cast("B"))
                                          for name, t in tensors.items()} if a.fp32 else tensors)
        if status.steps >= status.steps_total:
            return
        batch = client.take(wait=10)
        if batch is not None:
            client.consume(batch)


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--program", default=str(ROOT / "build/release/cli/echoline"))
parser.add_argument("--preset", default="qwen3-0.6b")
parser.add_argument("--trainer", choices=("built_in", "external"), default="external")
parser.add_argument("--fp32", action="store_true", help="the external trainer sends fp32")
parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
a = parser.parse_args()

with tempfile.TemporaryDirectory() as folder:
    pathlib.Path(folder, "offers.json").write_text(json.dumps(OFFERS))
    pathlib.Path(folder, "run.yaml").write_text(f"""
run: {{name: memory, folder: {folder}, steps: 2}}
model: {{preset: {a.preset}}}
task: {{adapter: arithmetic, options: {{evaluation_problems: 200}}}}
rollout: {{prompts_per_step: 2, group_size: 4, response_tokens_max: 16}}
staleness: {{budget: 3}}
learner: {{trainer: {a.trainer}, microbatch_tokens: 512}}
network: {{uplink: 1 Gbit/s}}
fleet: {{offers: {folder}/offers.json, provider: local, headroom: 0, join_timeout: 5 min,
        step_time_expected: 30 s, delta_ratio_expected: 10, install_time_expected: 1 s}}
""")
    settings = [word for setting in a.set for word in ("--set", setting)]
    info = json.loads(subprocess.run([a.program, "model", "info", "--preset", a.preset, "--json"], check=True,
                                     capture_output=True, text=True).stdout)
    doctor = subprocess.run([a.program, "doctor", folder + "/run.yaml", "--json", *settings], capture_output=True,
                            text=True)
    checks = json.loads(doctor.stdout)["checks"]
    said = next((c["detail"] for c in checks if c["check"] == "memory"), None)
    if said is None:
        sys.exit("\n".join(f"{c['check']}: {c['detail']}" for c in checks if c["verdict"] == "FAILED"))
    learner = subprocess.Popen([a.program, "learner", folder + "/run.yaml", *settings], stderr=subprocess.PIPE,
                               text=True)
    words = []
    reading = threading.Thread(target=lambda: words.extend(learner.stderr))
    reading.start()
    if a.trainer == "external":
        threading.Thread(target=train, args=(folder + "/memory",), daemon=True).start()
    most = 0
    while learner.poll() is None:
        try:
            most = max(most, int(re.search(r"VmHWM:\s+(\d+)",
                                           pathlib.Path(f"/proc/{learner.pid}/status").read_text())[1]) * 1024)
        except (OSError, TypeError):
            pass
        time.sleep(0.1)
    reading.join()
    if learner.returncode != 0:
        sys.exit("".join(words[-20:]))
    policy = 2 * info["parameters"]
    print(f"{a.preset}, {a.trainer}{', sent as fp32' if a.fp32 else ''}: policy {policy / 1e9:.2f} GB; "
          f"the learner took {most / 1e9:.2f} GB, {most / policy:.2f} x the policy; `echoline doctor`: {said}")
