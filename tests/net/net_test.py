#!/usr/bin/env python3
# Checks of the parts of the broadcast bench that need neither root nor a network of their own.

import hashlib
import os
import socket
import sys
import tempfile
import unittest
import urllib.request

sys.dont_write_bytecode = True
import bounds  # noqa: E402
import lab as netlab  # noqa: E402
import swarm  # noqa: E402


class Links(unittest.TestCase):
    def test_counts_and_rates(self):
        learner, workers = netlab.parse_fleet({"learner": "50/100", "workers": ["2x100/90", "7.5/8"]})
        self.assertEqual(learner, (50, 100))
        self.assertEqual(workers, [(100, 90), (100, 90), (7.5, 8)])

    def test_what_is_no_link_is_refused(self):
        for text in ("", "100", "0/5", "5/0", "x5/5", "-1/5", "5/5/5", "1e9/5"):
            with self.assertRaises(netlab.LabError, msg=text):
                netlab.parse_links(text)

    def test_every_fleet_of_the_file_is_well_formed(self):
        for fleet in netlab.load_fleets().values():
            netlab.parse_fleet(fleet)

    def test_addresses_differ(self):
        nodes = ["learner", netlab.SWITCH, *(f"w{index}" for index in range(1, 201))]
        self.assertEqual(len({netlab.address(node) for node in nodes}), len(nodes))
        self.assertEqual(len({netlab.address(node, 6) for node in nodes}), len(nodes))


class Bounds(unittest.TestCase):
    def test_each_term_can_be_the_largest(self):
        link = netlab.Link
        self.assertEqual(bounds.lower_bound_s(10**6, link(2, 9), [link(99, 99)] * 2), 4)     # the learner's upload
        self.assertEqual(bounds.lower_bound_s(10**6, link(99, 9), [link(99, 1)] * 2), 8)     # the slowest download
        self.assertEqual(bounds.lower_bound_s(10**6, link(2, 9), [link(1, 99)] * 8), 6.4)    # everybody's upload

    def test_star_shares_the_upload(self):
        self.assertEqual(bounds.star_s(10**6, netlab.Link(8, 8), [netlab.Link(1, 4)] * 8), 8)
        self.assertEqual(bounds.star_s(10**6, netlab.Link(800, 8), [netlab.Link(1, 4)] * 8), 2)

    def test_quorum_is_rounded_up(self):
        self.assertEqual(bounds.quorum_s([3, 1, 2], 3, 0.9), 3)
        self.assertEqual(bounds.quorum_s(range(10), 10, 0.9), 8)
        self.assertIsNone(bounds.quorum_s([1, 2], 3, 0.9))


class Torrent(unittest.TestCase):
    def test_bencode(self):
        self.assertEqual(swarm.bencode({"b": [1, b"xy"], "a": "z"}), b"d1:a1:z1:bli1e2:xyee")

    def test_pieces_are_hashed_one_by_one(self):
        with tempfile.TemporaryDirectory() as folder:
            payload, torrent = os.path.join(folder, "p"), os.path.join(folder, "t")
            with open(payload, "wb") as file:
                file.write(b"abc")
            swarm.write_torrent(payload, torrent, 2, "http://x/")
            with open(torrent, "rb") as file:
                self.assertIn(b"6:pieces40:" + hashlib.sha1(b"ab").digest() + hashlib.sha1(b"c").digest(), file.read())


class TrackerAnswers(unittest.TestCase):
    def test_peers_are_compact_and_without_the_asker(self):
        tracker = swarm.Tracker(socket.socket(), "127.0.0.1", 0)
        try:
            url = f"http://127.0.0.1:{tracker.port}/announce?info_hash=%%01%%ff&left=%d&port=%d"

            def ask(left, port):
                with urllib.request.urlopen(url % (left, port)) as answer:
                    return answer.read()

            self.assertIn(b"5:peers0:", ask(5, 258))
            answer = ask(0, 772)
            self.assertIn(b"5:peers6:\x7f\x00\x00\x01\x01\x02", answer)
            self.assertIn(b"8:completei1e10:incompletei1e", answer)
        finally:
            tracker.close()


if __name__ == "__main__":
    unittest.main()
