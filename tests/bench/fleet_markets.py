#!/usr/bin/python3
"""Simulates runs in random markets: the fleet that is resized during the run, against the cheapest fleet of a fixed
size with which the learner waits at most 2 % of its time after the first step. That size is found afterwards, among
those of ten headrooms; lost machines are replaced in both.

    tests/bench/fleet_markets.py [--markets 200] [--first 1] [--all] [--program build/release/cli/echoline]

Prints the markets in which the resized fleet costs over 5 % more or lets the learner wait more than 2 % of its time
(--all: every market), and the distribution. A market without any fixed fleet below 2 % is only counted: there, long
responses or a small staleness budget keep the learner waiting, however large the fleet is. One market is one seed.
"""
import argparse
import concurrent.futures
import json
import os
import pathlib
import random
import statistics
import subprocess
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
HEADROOMS = (0, 0.04, 0.08, 0.12, 0.16, 0.2, 0.25, 0.35, 0.5, 0.7)  # of the fixed fleets
IDLE_MAX = 0.02
RUN_SECONDS = 2.5 * 3600


def between(draws, low, high):
    """A number between the two, evenly on a logarithmic scale."""
    return low * (high / low) ** draws.random()


def scenario(seed):
    draws = random.Random(seed)
    step_s = between(draws, 20, 120)
    prompts, group = draws.choice((32, 64, 128, 256)), draws.choice((4, 8, 16))
    tokens, tokens_per_s = between(draws, 300, 3000), between(draws, 800, 4000)
    workers = max(4, prompts * group * 1.4 * tokens / step_s / tokens_per_s)
    regions = draws.randint(1, 4)
    lines = [
        f"run: {{name: market-{seed}, seed: {seed}, steps: {int(RUN_SECONDS / step_s)}}}",
        f"rollout: {{prompts_per_step: {prompts}, group_size: {group}, response_tokens_max: 16384}}",
        f"staleness: {{budget: {draws.choice((2, 3, 4, 6, 8))}, publish_every: {draws.choice((1, 1, 1, 2))}}}",
        f"learner: {{usd_per_hour: {draws.choice((2, 4, 12, 24))}}}",
        f"network: {{uplink: {draws.choice((1, 2, 5))} Gbit/s, delay_expected: 15 ms}}",
        "fleet:",
        f"  step_time_expected: {step_s * draws.choice((0.93, 1, 1, 1, 1.07)):.3f} s",
        f"  install_time_expected: {between(draws, 0.2, 3):.3f} s",
        f"  workers_max: {int(workers * 3) + 8}",
        f"  headroom: {draws.choice((0.1, 0.15, 0.25))}",
        "  join_timeout: 6 min",
        "  away_max: 20 min",
        "simulation:",
        f"  parameters: {between(draws, 3e8, 8e9):.0f}",
        f"  density: {between(draws, 0.003, 0.05):.4f}",
        f"  rate_error: {draws.choice((0.05, 0.15, 0.3))}",
        f"  step_time: {step_s:.3f} s",
        f"  boot: {draws.randint(40, 150)} s",
        f"  boot_p95: {draws.randint(160, 400)} s",
        f"  sequence_tokens_per_s: {draws.randint(40, 150)}",
        f"  tokens: {{median: {tokens:.0f}, p95: {tokens * between(draws, 2, 6):.0f}}}",
        f"  churn: {{per_hour: {draws.choice((0.02, 0.05, 0.1, 0.2))}, announced: 0.5, notice: 30 s}}",
        "  market:",
    ]
    for _ in range(regions):
        usd, rate = between(draws, 0.15, 0.8), tokens_per_s * draws.uniform(0.7, 1.4)
        lines.append(
            f"    - {{count: {int(workers * 4 / regions) + 6}, usd_per_hour: {usd:.3f}, "
            f"usd_per_hour_p95: {usd * draws.uniform(1.3, 2.2):.3f}, tokens_per_s: {rate:.0f}, "
            f"tokens_per_s_p95: {rate * draws.uniform(1.2, 1.8):.0f}, up: 300 Mbit/s, up_p95: 900 Mbit/s, "
            "down: 700 Mbit/s, upload_usd_per_gb: 0.003, download_usd_per_gb: 0.002}")
    return "\n".join(lines) + "\n"


def simulate(program, path, *settings):
    command = [program, "sim", "run", path, "--json"]
    for setting in settings:
        command += ["--set", setting]
    done = subprocess.run(command, capture_output=True, text=True)
    report = json.loads(done.stdout) if done.stdout.startswith("{") else {}
    if "cost" not in report:
        raise SystemExit(f"{' '.join(map(str, command))}: {done.stdout[-500:]}{done.stderr[-500:]}")
    decisions = report["simulation"]["decisions"]
    return {
        "completed": report["ended"] == "completed",
        "usd": report["cost"]["usd_total"],
        "idle": report["simulation"]["idle_fraction_after_first_step"],
        "planned": report["fleet"]["workers_planned"],
        "added": decisions.get("added", 0),
        "released": decisions.get("released", 0),
    }


def compare(program, seed):
    """The resized fleet, and the best fixed one or None."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / f"market-{seed}.yaml"
        path.write_text(scenario(seed))
        resized = simulate(program, path)
        fixed = [simulate(program, path, "simulation.fleet_size=planned", f"fleet.headroom={h}") for h in HEADROOMS]
    good = [run for run in fixed if run["completed"] and run["idle"] <= IDLE_MAX]
    return seed, resized, min(good, key=lambda run: run["usd"], default=None)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markets", type=int, default=200)
    parser.add_argument("--first", type=int, default=1, help="seed of the first market")
    parser.add_argument("--all", action="store_true", help="print every market")
    parser.add_argument("--program", default=str(ROOT / "build" / "release" / "cli" / "echoline"))
    a = parser.parse_args()
    rows = []
    print("  seed  cost/best  idle %  best idle %  planned  added  released")
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for seed, resized, best in pool.map(lambda s: compare(a.program, s), range(a.first, a.first + a.markets)):
            if not best:
                continue
            ratio = resized["usd"] / best["usd"]
            rows.append((ratio, resized))
            if a.all or ratio > 1.05 or resized["idle"] > IDLE_MAX:
                print(f"{seed:6}{ratio:11.3f}{100 * resized['idle']:8.1f}{100 * best['idle']:13.1f}"
                      f"{resized['planned']:9}{resized['added']:7}{resized['released']:10}", flush=True)
    ratios = sorted(ratio for ratio, _ in rows)
    print(f"{a.markets} markets, {len(rows)} with a fixed fleet that keeps the learner's waiting below 2 %")
    print(f"cost / that of the best fixed fleet: median {statistics.median(ratios):.3f}, "
          f"p95 {ratios[int(0.95 * (len(ratios) - 1))]:.3f}, most {ratios[-1]:.3f}; "
          f"over 1.05 in {sum(r > 1.05 for r in ratios)}")
    print(f"learner waits over 2 % in {sum(run['idle'] > IDLE_MAX for _, run in rows)}, "
          f"most {100 * max(run['idle'] for _, run in rows):.1f} %")
    changes = [(run["added"] + run["released"]) / max(1, run["planned"]) for _, run in rows]
    print(f"machines added and released per planned one: median {statistics.median(changes):.2f}")


if __name__ == "__main__":
    main()
