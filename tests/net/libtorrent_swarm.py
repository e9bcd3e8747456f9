# A BitTorrent swarm of libtorrent (Debian: python3-libtorrent) in a lab. The workers are connected to each other; the
# clock starts when the seed dials them.

import os
import subprocess
import time

import lab as netlab
import swarm

PYTHON = "/usr/bin/python3"  # Debian's, for which its libtorrent is made
NODE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "libtorrent_node.py")
READY_SECONDS_MAX = 60


def available():
    return subprocess.run([PYTHON, "-c", "import libtorrent"], capture_output=True).returncode == 0


def broadcast(net, payload, digest, folder, piece_bytes, timeout_s=600, on_start=None):
    """As swarm.broadcast, without a choice of how to start."""
    homes = swarm.make_homes(net, folder, payload)
    torrent = os.path.join(folder, "payload.torrent")
    swarm.write_torrent(payload, torrent, piece_bytes, "http://nowhere/announce")
    addresses = [netlab.address(node) for node in net.workers]
    peers = {}
    try:
        for index, node in enumerate(net.workers):
            peers[node] = _Peer(net, node, homes[node], torrent, "worker", addresses[:index], len(addresses) - 1)
        seed = peers["learner"] = _Peer(net, "learner", homes["learner"], torrent, "seed", addresses)
        end = time.monotonic() + READY_SECONDS_MAX
        while not all(peer.said("ready") for peer in peers.values()):
            if time.monotonic() > end or any(peer.process.poll() is not None for peer in peers.values()):
                raise netlab.LabError(f"expected all of libtorrent's peers to be ready within {READY_SECONDS_MAX} s")
            time.sleep(0.1)
        before = {node: net.sent_bytes(node) for node in net.links}
        seed.process.stdin.write(b"\n")
        seed.process.stdin.flush()
        if on_start:
            on_start(net)
        end = time.monotonic() + timeout_s
        while not all(peers[node].said("done") for node in net.workers) and time.monotonic() < end:
            time.sleep(0.1)
        sent = {node: net.sent_bytes(node) - before[node] for node in net.links}
    finally:
        for peer in peers.values():
            peer.stop()
    began = seed.said("began")[0]
    seconds = {node: said[0] - began for node in net.workers if (said := peers[node].said("done"))}
    swarm.verify(homes, seconds, payload, digest)
    return {"seconds": seconds, "sent_bytes": sent}


class _Peer:
    """A libtorrent_node.py in a node; what it says goes to a file in its home."""

    def __init__(self, net, node, home, torrent, role, dial, peers=0):
        self._path = os.path.join(home, "said")
        with open(self._path, "w") as out:
            self.process = net.start(node, [
                PYTHON, NODE, role, "--address", netlab.address(node), "--torrent", torrent, "--folder", home,
                "--peers", str(peers), "--dial", *dial], stdin=subprocess.PIPE, stdout=out)

    def said(self, word):
        """The numbers after the word, [0] when it stands alone, [] while it has not been said."""
        with open(self._path) as file:
            lines = [line.split() for line in file.read().splitlines(keepends=True) if line.endswith("\n")]
        return next(([float(number) for number in line[1:]] or [0] for line in lines if line[0] == word), [])

    def stop(self):
        self.process.stdin.close()
        self.process.kill()
        self.process.wait()
