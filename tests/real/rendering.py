"""What a run hands to a scheduler or cloud: an example of configs/providers, filled in by echoline itself.

The program of the example is replaced by one that records its input, so nothing is rented.
"""
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
ECHOLINE = ROOT / "build" / "release" / "cli" / "echoline"
EXAMPLES = ROOT / "configs" / "providers"
CATALOGUES = ROOT / "tests" / "provisioner" / "catalogues"
# An answer to each command that lists instances: there are none.
RECORDER = """#!/bin/sh
case "$1" in
  status) echo '[]' ;;
  ps) echo '{"runs": []}' ;;
  get) ;;
  delete | down | stop) ;;
  *) { for word; do [ ! -f "$word" ] || cat "$word"; done; cat; } > "$RECORDED.$$" && mv "$RECORDED.$$" "$RECORDED" ;;
esac
"""


def skip(reason):
    print(f"skipped: {reason}")
    sys.exit(77)


def expect(condition, reason):
    if not condition:
        print(f"failed: {reason}")
        sys.exit(1)


def install(folder, *packages):
    """A virtual environment with these packages. Returns its Python."""
    folder.mkdir(parents=True, exist_ok=True)
    python = folder / "venv" / "bin" / "python"
    if not ECHOLINE.exists():
        skip(f"{ECHOLINE} is not built")
    try:
        if not python.exists():
            subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *packages], check=True)
    except subprocess.CalledProcessError as error:
        skip(f"{packages} could not be installed: {error}")
    return python


def rendered(folder, example, program, offers, image="debian:12", bids=False):
    """A run with these offers rents one worker. Returns the plan's row of it, and the recorded input as JSON."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "bin").mkdir(parents=True)
    recorder = folder / "bin" / program
    recorder.write_text(RECORDER)
    recorder.chmod(0o700)
    run_file, recorded = folder / "run.yaml", folder / "recorded"
    run_file.write_text(f"""
run: {{name: rendered, folder: {folder}/runs, seed: 7, steps: 10}}
model: {{preset: tiny-64}}
task: {{adapter: arithmetic, options: {{operations: ["+"], operand_max: 99}}}}
rollout: {{prompts_per_step: 8, group_size: 8, response_tokens_max: 6}}
staleness: {{budget: 3}}
learner: {{warm_start: {{steps_max: 10, batch: 64, learning_rate: 1.5e-3}}}}
network: {{bind: "::", uplink: 100 Mbit/s}}
worker: {{device: cuda}}
fleet:
  offers: {offers}
  provider: exec
  provider_file: {EXAMPLES / example}
  profile: {ROOT}/configs/profiles/gpus.yaml
  image: {image}
  disk: 50 GB
  step_time_expected: 10 s
  workers_max: 1
  pricing: {"bid" if bids else "on_demand"}
  assume: {{storage_usd_per_hour: 0, upload_usd_per_gb: 0, download_usd_per_gb: 0, up: 1 Gbit/s, down: 1 Gbit/s,
           reliability: 0.99, duration: 720 h}}
""")
    environment = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "RECORDED": str(recorded)}
    with (folder / "log").open("w") as log:
        run = subprocess.Popen([ECHOLINE, "up", run_file], env=environment, stdout=log, stderr=subprocess.STDOUT,
                               start_new_session=True)
        deadline = time.monotonic() + 120
        while not recorded.exists() and run.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        try:
            os.killpg(run.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        run.wait()
    expect(recorded.exists(), f"nothing was rented; see {folder}/log")
    plan = json.loads((folder / "runs" / "rendered" / "plan.json").read_text())
    row, = (row for row in plan["offers"] if row["chosen"])
    return row, json.loads(recorded.read_text())
