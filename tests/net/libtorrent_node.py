#!/usr/bin/env python3
# One peer of a libtorrent swarm, in a node of a lab (see libtorrent_swarm.py). Says 'ready' on stdout, and then, a seed
# when it has read a line: 'began TIME', a worker when it has everything: 'done TIME'.

import argparse
import sys
import time

import libtorrent

PORT = 6881
# Short queues of requests leave room to choose; with the defaults a swarm of eight takes up to a fifth longer.
SETTINGS = {"enable_dht": False, "enable_lsd": False, "enable_upnp": False, "enable_natpmp": False,
            "enable_outgoing_utp": False, "enable_incoming_utp": False, "in_enc_policy": 2, "out_enc_policy": 2,
            "unchoke_slots_limit": 8, "request_queue_time": 1, "max_out_request_queue": 100,
            "send_buffer_watermark": 131072, "connection_speed": 200, "torrent_connect_boost": 200,
            "alert_mask": int(libtorrent.alert.category_t.status_notification)}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=("seed", "worker"))
    parser.add_argument("--address", required=True, help="to listen on")
    parser.add_argument("--torrent", required=True)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--dial", nargs="*", default=[], help="addresses of peers to connect to")
    parser.add_argument("--peers", type=int, default=0, help="how many a worker waits for before it is ready")
    options = parser.parse_args()
    session = libtorrent.session({**SETTINGS, "listen_interfaces": f"{options.address}:{PORT}"})
    what = libtorrent.add_torrent_params()
    what.ti = libtorrent.torrent_info(options.torrent)
    what.save_path = options.folder
    what.flags &= ~(libtorrent.torrent_flags.auto_managed | libtorrent.torrent_flags.paused)
    if options.role == "seed":
        what.flags |= libtorrent.torrent_flags.seed_mode
    handle = session.add_torrent(what)
    {"seed": seed, "worker": worker}[options.role](session, handle, options)


def seed(_, handle, options):
    print("ready", flush=True)
    sys.stdin.readline()
    print("began", repr(time.time()), flush=True)
    dial(handle, options)
    sys.stdin.read()


def worker(session, handle, options):
    while not handle.status().state == libtorrent.torrent_status.downloading:
        time.sleep(0.1)
    dial(handle, options)
    while handle.status().num_peers < options.peers:
        time.sleep(0.1)
    print("ready", flush=True)
    while True:
        session.wait_for_alert(1000)
        for alert in session.pop_alerts():
            if isinstance(alert, libtorrent.torrent_finished_alert):
                print("done", repr(time.time()), flush=True)


def dial(handle, options):
    for address in options.dial:
        handle.connect_peer((address, PORT))


if __name__ == "__main__":
    main()
