# echoline's overlay in a lab: one `overlay_bench learner`, and one `overlay_bench worker` in each worker's node.
#
# The learner issues a token per worker into the folder --tokens, and writes a line that begins with 'ready' to stderr.
# Once all workers have joined, it publishes. It leaves in --json one object with the list 'publications', each with
# 'workers' {name: seconds until acknowledged}. All programs end with status 0 if all digests were right.

import json
import os
import time

import lab as netlab

PORT = 7070
READY_SECONDS_MAX = 30
FLOWING_BYTES = 1 << 18  # more than joining takes


def broadcast(net, program, folder, payload_bytes, topology, publications=1, learner_arguments=(), worker_arguments=(),
              declare_links=False, timeout_s=600, on_start=None):
    """Publishes payload_bytes of random data `publications` times from the learner to all workers of the lab net.

    Returns {"publications": [{worker: seconds}], "sent_bytes": {node: bytes}, "reports": {node: its JSON}}; a worker
    that did not acknowledge is missing. With declare_links every node is told the caps of its link, as an operator
    would. on_start(net, forwarders) is called when the first publication begins to flow, with the nodes that forward
    most first.
    """
    os.makedirs(folder)
    tokens = os.path.join(folder, "tokens")
    os.mkdir(tokens)
    listen = f"{netlab.address('learner')}:{PORT}"
    nodes = _Nodes(net, folder)
    try:
        nodes.start("learner", [
            program, "learner", "--listen", listen, "--payload", str(payload_bytes), "--workers", str(len(net.workers)),
            "--nodes", str(len(net.trainer_nodes)), "--topology", topology, "--publications", str(publications),
            "--tokens", tokens,
            *_link_arguments(net.links["learner"], ["--up-mbit"], declare_links), *learner_arguments])
        nodes.wait_until_ready()
        before = {node: net.sent_bytes(node) for node in net.links}
        for index, node in enumerate(net.workers):
            nodes.start(node, [
                program, "worker", "--learner", listen, "--name", f"worker-{index}", "--bind", netlab.address(node),
                "--token-file", os.path.join(tokens, f"worker-{index}.token"),
                *_link_arguments(net.links[node], ["--up-mbit", "--down-mbit"], declare_links), *worker_arguments])
        for index, node in enumerate(net.trainer_nodes):
            nodes.start(node, [
                program, "worker", "--learner", listen, "--name", f"node:{index}", "--bind", netlab.address(node),
                "--token-file", os.path.join(tokens, f"node:{index}.token"),
                *_link_arguments(net.links[node], ["--up-mbit"], declare_links)])
        nodes.wait_until_done(timeout_s, before["learner"] + FLOWING_BYTES, on_start)
        sent = {node: net.sent_bytes(node) - before[node] for node in net.links}
    finally:
        nodes.stop()
    reports = {node: nodes.report(node) for node in net.links}
    names = {f"worker-{index}": node for index, node in enumerate(net.workers)}
    published = [{names[name]: seconds for name, seconds in one["workers"].items() if name in names}
                 for one in reports["learner"]["publications"]]
    return {"publications": published, "sent_bytes": sent, "reports": reports}


def _link_arguments(link, names, declare):
    return [text for name, rate in zip(names, link) for text in (name, f"{rate:g}")] if declare else []


class _Nodes:
    """The processes of one broadcast, each with NODE.log and NODE.json in the folder."""

    def __init__(self, net, folder):
        self.net, self.folder, self.running, self.processes = net, folder, {}, []

    def start(self, node, argv):
        with open(self._path(node, "log"), "w") as log:
            process = self.net.start(node, [*argv, "--json", self._path(node, "json")], stdout=log, stderr=log)
        self.running[node] = process
        self.processes.append(process)

    def wait_until_ready(self):
        end = time.monotonic() + READY_SECONDS_MAX
        while not any(line.startswith("ready") for line in self._log("learner")):
            if self.running["learner"].poll() is not None or time.monotonic() > end:
                self._fail("learner", f"was not ready within {READY_SECONDS_MAX} s")
            time.sleep(0.05)

    def wait_until_done(self, timeout_s, flowing_bytes, on_start):
        """Until all have ended well; an error as soon as one has not. Calls on_start when flowing_bytes were sent."""
        end = time.monotonic() + timeout_s
        while self.running:
            if on_start and self.net.sent_bytes("learner") > flowing_bytes:
                on_start(self.net, self._forwarders())
                on_start = None
            for node, process in list(self.running.items()):
                if process.poll() == 0:
                    del self.running[node]
                elif process.returncode is not None:
                    self._fail(node, f"ended with exit {process.returncode}")
                elif time.monotonic() > end:
                    self._fail(node, f"did not end within {timeout_s} s")
            time.sleep(0.05)

    def _forwarders(self):
        """Nodes by how many others stand behind them in the topology that the learner said last."""
        lines = [line for line in self._log("learner") if line.startswith("topology ")]
        behind = dict.fromkeys(self.net.workers, 0)
        for chain in json.loads(lines[-1].split(" ", 1)[1]) if lines else []:
            for place, name in enumerate(chain):
                if name.startswith("node:"):
                    continue
                behind[self.net.workers[int(name.removeprefix("worker-"))]] += len(chain) - 1 - place
        return sorted(behind, key=behind.get, reverse=True)

    def stop(self):
        for process in self.processes:
            process.kill()
            process.wait()

    def report(self, node):
        with open(self._path(node, "json")) as file:
            return json.load(file)

    def _path(self, node, kind):
        return os.path.join(self.folder, f"{node}.{kind}")

    def _log(self, node):
        with open(self._path(node, "log")) as file:
            return file.read().splitlines()

    def _fail(self, node, what):
        raise netlab.LabError("\n    ".join([f"overlay_bench on {node} {what}", *self._log(node)[-5:]]))
