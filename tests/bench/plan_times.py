#!/usr/bin/python3
"""Seconds, CPU seconds and memory of `echoline plan` for markets of several sizes, as the Markdown table of
docs/provisioning.md. The offers are drawn from a seed; a fifth of the machines is offered twice.

    tests/bench/plan_times.py [--program build/release/cli/echoline] [--offers 1000 10000 100000] [--times 3]
"""
import argparse
import json
import os
import pathlib
import random
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
# Enough rollouts/s for some dozens of machines.
SETTINGS = ["fleet.step_time_expected=300ms", "fleet.install_time_expected=10ms"]


def write_offers(path, count):
    draws = random.Random(count)
    offers = []
    for i in range(count):
        speed = 80 + 700 * draws.random() * draws.random()
        offers.append({
            "id": f"a{i}", "provider": "local", "host": f"m{i // 2 if i % 5 == 0 else i}", "owner": f"h{i % 997}",
            "gpu": "RTX 3090", "gpu_count": 1, "vram_gb": 24, "place": "SE",
            "up_mbit_per_s": round(20 + 900 * draws.random(), 1),
            "down_mbit_per_s": round(100 + 900 * draws.random(), 1),
            "reliability": round(0.95 + 0.05 * draws.random(), 4), "duration_days_max": 30,
            "rollouts_per_s": round(speed, 2), "rollouts_source": "profile",
            "gpu_usd_per_hour": round(0.00018 * speed * (0.5 + draws.random()), 4), "storage_usd_per_hour": 0.002,
            "upload_usd_per_gb": 0.004, "download_usd_per_gb": 0.002})
    path.write_text(json.dumps({"schema_version": 1, "offers": offers}))


def measure(program, offers):
    """Seconds, CPU seconds and the largest resident memory in MB of one plan."""
    arguments = [program, "plan", str(ROOT / "configs/quickstart.yaml"), "--offers", str(offers), "--json"]
    for setting in SETTINGS:
        arguments += ["--set", setting]
    begun = time.monotonic()
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.execv(program, arguments)
    _, status, used = os.wait4(child, 0)
    if status != 0:
        sys.exit(f"{' '.join(arguments)}: exit status {os.waitstatus_to_exitcode(status)}")
    return time.monotonic() - begun, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024 / 1e6


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default=str(ROOT / "build/release/cli/echoline"))
    parser.add_argument("--offers", type=int, nargs="+", default=[1000, 10_000, 100_000])
    parser.add_argument("--times", type=int, default=3, help="plans of each size; the fastest counts")
    options = parser.parse_args()
    print("| offers | file, MB | s | CPU s | memory, MB |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for count in options.offers:
            path = pathlib.Path(folder) / "offers.json"
            write_offers(path, count)
            wall, cpu, memory = map(min, zip(*(measure(options.program, path) for _ in range(options.times))))
            megabytes = path.stat().st_size / 1e6
            print(f"| {count:,} | {megabytes:.1f} | {wall:.2f} | {cpu:.2f} | {memory:.0f} |", flush=True)


if __name__ == "__main__":
    main()
