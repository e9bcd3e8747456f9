# A BitTorrent swarm of aria2 in a lab: the learner seeds one file, the workers fetch it from it and from each other.
#
# Two ways to start. 'warm' favours the swarm: all processes run and are connected to each other. Then the limit of the
# seed's upload is lifted, and the clock starts when bytes leave it, up to a second later, because aria2 applies limits
# once a second. 'cold' starts the clock when the seed's process starts, with the workers waiting at the tracker, so
# that discovery and the first handshakes count.

import hashlib
import http.client
import http.server
import json
import os
import socket
import struct
import threading
import time
import urllib.parse

import lab as netlab

RPC_PORT = 6800
PEER_PORT = 6881
TRACKER_PORT = 6969
READY_SECONDS_MAX = 90
FLOWING_BYTES = 32768  # more than the announcements and the one block that leave a seed held back


def bencode(value):
    """int, bytes, str, list or dict -> bencoded bytes; dict keys are sorted as the format demands."""
    if isinstance(value, int):
        return b"i%de" % value
    if isinstance(value, str):
        value = value.encode()
    if isinstance(value, bytes):
        return b"%d:%s" % (len(value), value)
    if isinstance(value, list):
        return b"l" + b"".join(map(bencode, value)) + b"e"
    items = sorted((key.encode(), item) for key, item in value.items())
    return b"d" + b"".join(bencode(key) + bencode(item) for key, item in items) + b"e"


def write_torrent(payload, torrent, piece_bytes, announce):
    """Describes the file payload, hashed in pieces of piece_bytes, to the file torrent; returns the info hash."""
    hashes = []
    with open(payload, "rb") as file:
        while piece := file.read(piece_bytes):
            hashes.append(hashlib.sha1(piece).digest())
    info = {"name": os.path.basename(payload), "length": os.path.getsize(payload), "piece length": piece_bytes,
            "pieces": b"".join(hashes), "private": 0}
    with open(torrent, "wb") as file:
        file.write(bencode({"announce": announce, "info": info}))
    return hashlib.sha1(bencode(info)).digest()


class Tracker:
    """An HTTP tracker with compact answers on a listening socket; it tells everybody about everybody."""

    def __init__(self, listening, host, port=TRACKER_PORT):
        peers = self.peers = {}  # address -> whether it has everything

        class Answer(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                query = urllib.parse.parse_qs(urllib.parse.urlsplit(self.path).query, encoding="latin-1")
                address = (self.client_address[0], int(query["port"][0]))
                if query.get("event") == ["stopped"]:
                    peers.pop(address, None)
                else:
                    peers[address] = query.get("left", ["0"])[0] == "0"
                others = [peer for peer in peers if peer != address]
                body = bencode({"interval": 5, "min interval": 1, "complete": sum(peers.values()),
                                "incomplete": len(peers) - sum(peers.values()),
                                "peers": b"".join(socket.inet_aton(host) + struct.pack("!H", port)
                                                  for host, port in others)})
                self.send_response(200)
                self.send_header("Content-Type", "text/plain")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        self._server = http.server.ThreadingHTTPServer((host, port), Answer, bind_and_activate=False)
        self._server.socket.close()
        self._server.socket = listening
        self._server.daemon_threads = True
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(64)
        self.port = listening.getsockname()[1]
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True).start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()


class Aria:
    """One aria2 in a node of the lab, controlled over its JSON-RPC."""

    def __init__(self, net, node, folder, torrent, options=()):
        self.net = net
        self.node = node
        hook = os.path.join(os.path.dirname(folder), "completed")
        argv = ["aria2c", "--no-conf", "--quiet", f"--dir={folder}", "--file-allocation=none", "--enable-rpc",
                f"--rpc-listen-port={RPC_PORT}", f"--listen-port={PEER_PORT}", "--enable-dht=false",
                "--enable-dht6=false", "--bt-enable-lpd=false", "--enable-peer-exchange=true",
                "--bt-require-crypto=false", "--bt-min-crypto-level=plain", "--bt-max-peers=0", "--seed-ratio=0.0",
                "--bt-tracker-interval=2", "--max-overall-upload-limit=0", "--max-upload-limit=0",
                "--bt-request-peer-speed-limit=1000M", "--disk-cache=256M", "--auto-save-interval=0",
                f"--on-bt-download-complete={hook}", *options, torrent]
        self.log = open(os.path.join(folder, "log"), "w")
        self.process = net.start(node, argv, stdout=self.log, stderr=self.log, cwd=folder)

    def call(self, method, *params):
        """The result of an RPC; ConnectionError while aria2 does not listen yet."""
        connection = http.client.HTTPConnection("127.0.0.1", RPC_PORT)
        connection.sock = self.net.socket(self.node)
        try:
            connection.sock.settimeout(5)
            connection.sock.connect(("127.0.0.1", RPC_PORT))
            request = {"jsonrpc": "2.0", "id": "1", "method": method, "params": list(params)}
            connection.request("POST", "/jsonrpc", json.dumps(request), {"Content-Type": "application/json"})
            answer = json.loads(connection.getresponse().read())
        finally:
            connection.close()
        if "error" in answer:
            raise netlab.LabError(f"aria2 on {self.node}: {method}: {answer['error']}")
        return answer["result"]

    def connected_peers(self):
        """Peers with a finished handshake; 0 while aria2 starts."""
        try:
            active = self.call("aria2.tellActive", ["gid", "connections"])
            return int(active[0]["connections"]) if active else 0
        except OSError:
            return 0

    def release_upload(self):
        self.call("aria2.changeGlobalOption", {"max-overall-upload-limit": "0"})

    def stop(self):
        self.process.kill()
        self.process.wait()
        self.log.close()


def broadcast(net, payload, digest, folder, piece_bytes, start, timeout_s=600, on_start=None):
    """Sends the file payload (SHA-256 digest) from the learner to all workers of the lab net.

    Returns {"seconds": {worker: seconds}, "sent_bytes": {node: bytes}}; a worker that did not finish within timeout_s
    is missing. Files are verified after the clock has stopped. on_start(net) is called when the clock starts.
    """
    homes = make_homes(net, folder, payload)
    hook = os.path.join(folder, "completed")
    with open(hook, "w") as file:
        file.write('#!/bin/sh\ndate +%s.%N > "$3.time.part" && mv "$3.time.part" "$3.time"\n')
    os.chmod(hook, 0o755)
    name = os.path.basename(payload)
    torrent = os.path.join(folder, "payload.torrent")
    write_torrent(payload, torrent, piece_bytes, f"http://{netlab.address(netlab.SWITCH)}:{TRACKER_PORT}/announce")

    tracker = Tracker(net.socket(netlab.SWITCH), netlab.address(netlab.SWITCH))
    stamps = {node: os.path.join(homes[node], name + ".time") for node in net.workers}
    clients = {}
    try:
        for node in net.workers:
            clients[node] = Aria(net, node, homes[node], torrent)
        starting = _start_warm if start == "warm" else _start_cold
        began, before = starting(net, homes["learner"], torrent, clients, tracker)
        if on_start:
            on_start(net)
        while not all(map(os.path.exists, stamps.values())) and time.time() < began + timeout_s:
            time.sleep(0.1)
        sent = {node: net.sent_bytes(node) - before[node] for node in net.links}
    finally:
        for client in clients.values():
            client.stop()
        tracker.close()
    seconds = {}
    for node in filter(lambda node: os.path.exists(stamps[node]), net.workers):
        with open(stamps[node]) as file:
            seconds[node] = float(file.read()) - began
    verify(homes, seconds, payload, digest)
    return {"seconds": seconds, "sent_bytes": sent}


def _start_warm(net, home, torrent, clients, _):
    """Adds the seed to the clients and lets it go; returns the time and what every node had sent by then."""
    seed = clients["learner"] = Aria(net, "learner", home, torrent,
                                     ["--bt-seed-unverified=true", "--max-overall-upload-limit=1K"])
    _wait(clients, lambda: all(client.connected_peers() >= len(net.workers) for client in clients.values()),
          "everybody to be connected to everybody")
    before = {node: net.sent_bytes(node) for node in net.links}
    seed.release_upload()
    flowing = before["learner"] + FLOWING_BYTES
    _wait(clients, lambda: net.sent_bytes("learner") > flowing, "the seed to send", pause_s=0.01)
    return time.time(), before


def _start_cold(net, home, torrent, clients, tracker):
    """The same for a seed that nobody knows yet."""
    _wait(clients, lambda: len(tracker.peers) == len(net.workers), "all workers to be at the tracker")
    before = {node: net.sent_bytes(node) for node in net.links}
    began = time.time()
    clients["learner"] = Aria(net, "learner", home, torrent, ["--bt-seed-unverified=true"])
    return began, before


def make_homes(net, folder, payload):
    """A folder for every node, with the payload in the learner's: {node: path}."""
    homes = {node: os.path.join(folder, node) for node in net.links}
    for home in homes.values():
        os.makedirs(home)
    os.link(payload, os.path.join(homes["learner"], os.path.basename(payload)))
    return homes


def verify(homes, nodes, payload, digest):
    """Raises unless each of the nodes has a file with the digest of the payload."""
    for node in nodes:
        if file_digest(os.path.join(homes[node], os.path.basename(payload))) != digest:
            raise netlab.LabError(f"the file of {node} differs from the learner's")


def file_digest(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _wait(clients, condition, what, pause_s=0.25):
    end = time.monotonic() + READY_SECONDS_MAX
    while not condition():
        for node, client in clients.items():
            if client.process.poll() is not None:
                with open(client.log.name) as log:
                    text = log.read(400)
                raise netlab.LabError(f"aria2 on {node} ended with exit {client.process.returncode}: {text}")
        if time.monotonic() > end:
            raise netlab.LabError(f"waited {READY_SECONDS_MAX} s in vain for {what}")
        time.sleep(pause_s)
