"""Carries the policy of a mixture of experts that this program cannot compute: thousands of tensors of random bytes, an
external trainer that changes 1 % of the values of every tensor between two versions, and workers with a server that
answers without reading the weights. Prints bytes, seconds, and the memory of learner, workers and trainer: anonymous
memory, and pages of files, which the system can give back.

    tests/bench/carried_memory.py [--gigabytes 1] [--tensors 18000] [--workers 3] [--program build/release/cli/echoline]
"""
import argparse
import json
import os
import pathlib
import re
import struct
import subprocess
import sys
import tempfile
import time

import numpy

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "clients" / "python"))
import echoline  # noqa: E402

STEPS = 3
KINDS = {"RssAnon": "anonymous", "RssFile": "of files", "RssShmem": "of files in memory"}
VALUES_PER_CALL = 1 << 22  # drawn at a time


def write_model(a, folder):
    """Experts, of which most tensors are, with a few larger tensors as embeddings have. Returns the largest one's
    bytes."""
    subprocess.run([a.program, "model", "init", "--preset", "bytes-64", "-o", folder], check=True,
                   stdout=subprocess.DEVNULL)
    config = json.loads((folder / "config.json").read_text())
    config["model_type"], config["architectures"] = "qwen3_moe", ["Qwen3MoeForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config))
    values = int(a.gigabytes * 1e9 / 2)
    large = values // 20  # of the embedding and the head
    rows = max(1, (values - 2 * large) // (a.tensors - 2) // 256)
    shapes = {"model.embed_tokens.weight": (large // 256, 256), "lm_head.weight": (large // 256, 256)}
    for i in range(a.tensors - 2):
        shapes[f"model.layers.{i // 384}.mlp.experts.{i % 384 // 3}.{('gate', 'up', 'down')[i % 3]}_proj.weight"] = (
            rows, 256)
    header, end = {}, 0
    for name, shape in shapes.items():
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + shape[0] * shape[1] * 2]}
        end += shape[0] * shape[1] * 2
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    draws = numpy.random.default_rng(1)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for begin in range(0, end // 2, VALUES_PER_CALL):
            count = min(VALUES_PER_CALL, end // 2 - begin)
            bits = (draws.standard_normal(count, dtype=numpy.float32) * numpy.float32(0.02)).view(numpy.uint32) >> 16
            file.write(bits.astype(numpy.uint16))
    return max(shape[0] * shape[1] * 2 for shape in shapes.values())


def change_model(path, draws):
    """Changes 1 % of the values in place."""
    data = numpy.memmap(path, dtype=numpy.uint8, mode="r+")
    header = 8 + int(data[:8].view(numpy.uint64)[0])
    bits = data[header:].view(numpy.uint16)
    for begin in range(0, len(bits), VALUES_PER_CALL):
        part = bits[begin:begin + VALUES_PER_CALL]
        part[draws.integers(0, len(part), len(part) // 100)] ^= 1
    data.flush()


def train(run, model, as_tensors):
    """Publishes the checkpoint in the folder `model`, changed in place, for every step. `as_tensors`: sends the tensors
    themselves instead of the folder's path."""
    while not (run / "trainer-api.json").exists():
        time.sleep(0.05)
    client = echoline.Client(run, patience=600)
    draws = numpy.random.default_rng(2)
    while True:
        status = client.status()
        if status.version_wanted == status.steps:
            change_model(model / "model.safetensors", draws)
            began_at = time.monotonic()
            if as_tensors:
                mapped = numpy.memmap(model / "model.safetensors", dtype=numpy.uint8, mode="r")
                client.publish(status.steps, echoline.unpack(mapped)[0], keep_types=True)
                del mapped
            else:
                client.publish(status.steps, model)
            print(f"version {status.steps}: publish() took {time.monotonic() - began_at:.2f} s", flush=True)
        if status.steps >= status.steps_total:
            return
        batch = client.take(wait=10)
        if batch is not None:
            client.consume(batch)


def add_memory(most, pid):
    """Raises the peaks `most` to the memory that the process has now."""
    try:
        text = pathlib.Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return
    for kind in KINDS:
        found = re.search(kind + r":\s+(\d+)", text)
        if found:
            most[kind] = max(most.get(kind, 0), int(found[1]) * 1024)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--program", default=str(ROOT / "build/release/cli/echoline"))
    parser.add_argument("--engine", default=str(ROOT / "build/release/tests/worker/engine_program"))
    parser.add_argument("--gigabytes", type=float, default=1)
    parser.add_argument("--tensors", type=int, default=18_000)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--as-tensors", action="store_true", help="send the tensors, instead of the folder's path")
    parser.add_argument("--train", nargs=2, type=pathlib.Path, metavar=("RUN", "MODEL"), help="be the trainer")
    a = parser.parse_args()
    if a.train:
        return train(*a.train, a.as_tensors)
    began_at = time.monotonic()
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        folder = pathlib.Path(name)
        largest = write_model(a, folder / "model")
        policy = (folder / "model" / "model.safetensors").stat().st_size
        offers = [{"id": f"w{i}", "provider": "local", "host": f"h{i}", "gpu": "RTX 4090", "gpu_count": 1,
                   "vram_gb": 80, "place": "DE", "up_mbit_per_s": 10_000, "down_mbit_per_s": 10_000,
                   "reliability": 0.999, "duration_days_max": 90, "rollouts_per_s": 5 / a.workers,
                   "rollouts_source": "profile", "gpu_usd_per_hour": 0.1, "storage_usd_per_hour": 0.001,
                   "upload_usd_per_gb": 0, "download_usd_per_gb": 0}
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
        trainer = subprocess.Popen([sys.executable, __file__, *["--as-tensors"] * a.as_tensors, "--train", run,
                                    folder / "model"], stdout=log, stderr=log)
        run_began_at = time.monotonic()
        most = {"learner": {}, "worker": {}, "trainer": {}}
        while learner.poll() is None:
            add_memory(most["learner"], learner.pid)
            add_memory(most["trainer"], trainer.pid)
            for process in pathlib.Path("/proc").iterdir():
                try:
                    words = (process / "cmdline").read_bytes().split(b"\0") if process.name.isdigit() else []
                except OSError:
                    continue
                if b"worker" in words[1:2] and os.fsencode(run) in b"\0".join(words):
                    add_memory(most["worker"], process.name)
            time.sleep(0.05)
        run_seconds = time.monotonic() - run_began_at
        trainer.kill()
        trainer.wait()
        if learner.returncode != 0:
            log.seek(0)
            sys.exit(log.read()[-3000:])
        log.seek(0)
        published = [line.rstrip() for line in log if "publish() took" in line]
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
    print("\n".join(published))
    for name, peaks in most.items():
        print(f"{name}: at most " + ", ".join(
            f"{peaks.get(kind, 0) / 1e9:.3f} GB {text} ({peaks.get(kind, 0) / policy:.2f} x the policy)"
            for kind, text in KINDS.items()))
    print(f"the model was written in {run_began_at - began_at:.0f} s; the run took {run_seconds:.0f} s")
    print(f"all workers identical: {report['weights']['all_workers_identical']}")


main()
