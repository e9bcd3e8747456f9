# A small network on one machine: the learner and its workers in namespaces of their own, joined by a switch, every link
# capped both ways. The trainer's nodes have, besides such a link, one to the learner alone without a cap. Needs root,
# iproute2 and the kernel's veth, bridge and tbf.
#
# The switch has a namespace too, so nothing of a lab shows in the machine's own network, two labs never meet although
# they use the same addresses, and deleting the namespaces deletes everything. A lab belongs to the process that opened
# it: that process holds a lock on /run/netlab/PREFIX, and a lab whose lock is free is stale and swept by the next one.

import collections
import contextlib
import ctypes
import fcntl
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time

LOCKS = "/run/netlab"
NAMESPACES = "/run/netns"
ETC = "/etc/netns"
SWITCH = "switch"
CLONE_NEWNET = 0x40000000

# Capacity of one node's link in Mbit/s (10^6 bits, Ethernet headers included).
Link = collections.namedtuple("Link", "up down")


class LabError(Exception):
    """A lab could not be built or used; the text says what to do."""


def parse_fleet(spec):
    """{"learner": "UP/DOWN", "workers": ["UP/DOWN", "COUNTxUP/DOWN", ..]} in Mbit/s -> (Link, [Link]).

    "nodes": how many nodes of the trainer there are, each with a link as the learner's.
    """
    workers = [link for text in spec["workers"] for link in parse_links(text)]
    if not 1 <= len(workers) <= 200:
        raise LabError(f"expected 1 to 200 workers, found {len(workers)}")
    return parse_links(spec["learner"])[0], workers


def parse_links(text):
    """"100/50" -> [Link(100, 50)], "4x100/50" -> four of them."""
    match = re.fullmatch(r"(?:(\d+)x)?(\d+(?:\.\d+)?)/(\d+(?:\.\d+)?)", text)
    if not match or float(match[2]) <= 0 or float(match[3]) <= 0:
        raise LabError(f"expected a link as UP/DOWN or COUNTxUP/DOWN in Mbit/s, found '{text}'")
    return [Link(float(match[2]), float(match[3]))] * int(match[1] or 1)


def load_fleets(path=os.path.join(os.path.dirname(os.path.abspath(__file__)), "fleets.json")):
    """Name -> fleet, in the order of the file."""
    with open(path) as file:
        return json.load(file)


def _run(*argv, check=True):
    done = subprocess.run(argv, capture_output=True, text=True)
    if check and done.returncode != 0:
        raise LabError(f"{' '.join(argv)}: exit {done.returncode}: {done.stderr.strip()}")
    return done.stdout


class Lab:
    """with Lab(learner, workers) as lab: nodes 'learner', 'w1' .. 'wN', and of the trainer 't1' .. 'tN', reachable
    under address(node)."""

    def __init__(self, learner, workers, congestion=None, real_packets=False, trainer_nodes=0):
        self.links = {"learner": learner}
        self.trainer_nodes = [f"t{index}" for index in range(1, trainer_nodes + 1)]
        self.links.update(dict.fromkeys(self.trainer_nodes, learner))
        for index, link in enumerate(workers, start=1):
            self.links[f"w{index}"] = link
        self.workers = [node for node in self.links if node.startswith("w")]
        self.congestion = congestion
        self.real_packets = real_packets
        self.prefix = f"netlab{os.getpid()}x{time.monotonic_ns() % 100000}"
        self._lock = None

    def __enter__(self):
        sweep()
        with _registry():
            self._lock = os.open(os.path.join(LOCKS, self.prefix), os.O_CREAT | os.O_RDWR, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            self._build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        _remove(self.prefix)
        os.close(self._lock)

    def _build(self):
        switch = namespace(self.prefix, SWITCH)
        _run("ip", "netns", "add", switch)
        _run("ip", "-n", switch, "link", "add", "br0", "type", "bridge", "stp_state", "0", "forward_delay", "0")
        _run("ip", "-n", switch, "addr", "add", f"{address(SWITCH)}/24", "dev", "br0")
        _run("ip", "-n", switch, "addr", "add", f"{address(SWITCH, 6)}/64", "dev", "br0", "nodad")
        _run("ip", "-n", switch, "link", "set", "lo", "up")
        _run("ip", "-n", switch, "link", "set", "br0", "up")
        for node, link in self.links.items():
            own = namespace(self.prefix, node)
            _run("ip", "netns", "add", own)
            _run("ip", "-n", own, "link", "add", "eth0", "type", "veth", "peer", "name", node, "netns", switch)
            _run("ip", "-n", own, "addr", "add", f"{address(node)}/24", "dev", "eth0")
            _run("ip", "-n", own, "addr", "add", f"{address(node, 6)}/64", "dev", "eth0", "nodad")
            _run("ip", "-n", switch, "link", "set", node, "master", "br0", "up")
            _run("ip", "-n", own, "link", "set", "lo", "up")
            if self.real_packets:  # otherwise what travels between the namespaces is many packets in one
                _run("ip", "-n", own, "link", "set", "eth0", "gso_max_segs", "1")
            _run("ip", "-n", own, "link", "set", "eth0", "up")
            if self.congestion:  # by route: a namespace may not always choose its own default
                for version, net, metric in ((4, "10.77.0.0/24", "0"), (6, "fd77::/64", "256")):
                    _run("ip", "-n", own, f"-{version}", "route", "replace", net, "dev", "eth0", "proto", "kernel",
                         "src", address(node, version), "metric", metric, "congctl", self.congestion)
            self.set_rate(node, link.up, link.down)
        for node in self.trainer_nodes:
            self._join_directly("learner", node)

    def _join_directly(self, one, other):
        """A second link between two nodes, without a cap: what they send to each other's address goes over it."""
        for node, device, peer, peer_device in ((one, other, other, one), (other, one, one, other)):
            own = namespace(self.prefix, node)
            if node == one:
                _run("ip", "-n", own, "link", "add", device, "type", "veth", "peer", "name", peer_device, "netns",
                     namespace(self.prefix, peer))
            _run("ip", "-n", own, "link", "set", device, "up")
            _run("ip", "-n", own, "route", "add", f"{address(peer)}/32", "dev", device, "src", address(node))

    def set_rate(self, node, up=None, down=None):
        """Changes a node's caps (Mbit/s) while traffic flows."""
        set_rate(self.prefix, node, up, down)

    def start(self, node, argv, **options):
        """Starts argv in the node's namespace; returns the Popen with the program's pid. It dies with this thread."""
        return subprocess.Popen(["ip", "netns", "exec", namespace(self.prefix, node), "setpriv", "--pdeathsig", "KILL",
                                 *argv], **options)

    def hosts(self, node, lines):
        """What the node's programs find in /etc/hosts."""
        folder = os.path.join(ETC, namespace(self.prefix, node))
        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(folder, "hosts"), "w") as file:
            file.writelines(line + "\n" for line in ["127.0.0.1 localhost", *lines])

    def packets_max(self, node, size):
        """Larger packets are lost between the node and the switch, and nobody is told."""
        _run("ip", "-n", namespace(self.prefix, SWITCH), "link", "set", node, "mtu", str(size))

    def socket(self, node, family=socket.AF_INET):
        """A TCP socket that lives in the node's namespace, usable from this process."""
        made = []

        def enter():
            libc = ctypes.CDLL(None, use_errno=True)
            with open(os.path.join(NAMESPACES, namespace(self.prefix, node))) as file:
                if libc.setns(file.fileno(), CLONE_NEWNET) == 0:
                    made.append(socket.socket(family, socket.SOCK_STREAM))

        thread = threading.Thread(target=enter)  # setns moves only the thread that calls it
        thread.start()
        thread.join()
        if not made:
            raise LabError(f"expected to enter the namespace of '{node}': is this process root?")
        return made[0]

    def sent_bytes(self, node):
        """Bytes the node's interface has sent, headers included."""
        shown = _run("ip", "-n", namespace(self.prefix, node), "-s", "-j", "link", "show", "dev", "eth0")
        return json.loads(shown)[0]["stats64"]["tx"]["bytes"]


def namespace(prefix, node):
    return f"{prefix}-{node}"


def address(node, version=4):
    """The learner: .1, node i of the trainer: .(1 + i), worker i: .(10 + i), the switch: .254. Its link has no cap."""
    host = {"learner": 1, SWITCH: 254}.get(node) or {"w": 10, "t": 1}[node[0]] + int(node[1:])
    return f"10.77.0.{host}" if version == 4 else f"fd77::{host:x}"


def set_rate(prefix, node, up=None, down=None):
    """Changes the caps of a node of any running lab, in Mbit/s; None leaves a direction as it is."""
    if up is not None:
        _tbf(namespace(prefix, node), "eth0", up)
    if down is not None:
        _tbf(namespace(prefix, SWITCH), node, down)


def _tbf(own, device, rate_mbit):
    _run("tc", "-n", own, "qdisc", "replace", "dev", device, "root", "tbf",
         "rate", f"{round(rate_mbit * 1e6)}bit", "burst", "64kb", "latency", "50ms")


def sweep():
    """Removes labs whose process is gone; returns their prefixes."""
    swept = []
    with _registry():
        for prefix in os.listdir(LOCKS):
            with open(os.path.join(LOCKS, prefix)) as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    _remove(prefix)
                    swept.append(prefix)
                except BlockingIOError:
                    pass
    return swept


@contextlib.contextmanager
def _registry():
    """One at a time among those who open or sweep labs, so that a lab being opened does not look stale."""
    os.makedirs(LOCKS, exist_ok=True)
    with open(LOCKS + ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def running():
    """Prefixes of the labs that have a lock, in no order."""
    return os.listdir(LOCKS) if os.path.isdir(LOCKS) else []


def _remove(prefix):
    """Kills what runs in the namespaces of a lab, deletes them and gives up its name."""
    own = [name for name in _listed(NAMESPACES) if name.startswith(prefix + "-")]
    for name in own:
        for pid in _run("ip", "netns", "pids", name, check=False).split():
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                pass
    for name in own:
        _run("ip", "netns", "del", name, check=False)
        shutil.rmtree(os.path.join(ETC, name), ignore_errors=True)
    try:
        os.unlink(os.path.join(LOCKS, prefix))
    except FileNotFoundError:
        pass


def _listed(folder):
    return os.listdir(folder) if os.path.isdir(folder) else []


def raise_on_signals():
    """Makes SIGTERM and SIGHUP leave through the with blocks, as SIGINT already does."""
    def leave(number, _):
        raise SystemExit(128 + number)
    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGHUP, leave)
