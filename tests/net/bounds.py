# The lower bound of every schedule, and the best time of a star: the formulas of chains/broadcast_model.

import math

# Payload of a full-sized TCP segment with timestamps over its Ethernet frame, which is what a cap counts.
TCP_SHARE = 1448 / 1514


def lower_bound_s(payload_bytes, learner, workers):
    """max{F/B, F/d_min, N*F/(B + sum u)}: seconds until every worker has the payload (Kumar-Ross), without
    headers."""
    megabits = payload_bytes * 8 / 1e6
    return max(megabits / learner.up, megabits / min(link.down for link in workers),
               len(workers) * megabits / (learner.up + sum(link.up for link in workers)))


def star_s(payload_bytes, learner, workers):
    """The learner serves everybody itself: F / min(d, B/N) for the slowest, headers not counted."""
    rate = min(min(link.down for link in workers), learner.up / len(workers))
    return payload_bytes * 8 / 1e6 / rate


def quorum_s(seconds, workers, fraction):
    """When ceil(fraction * workers) of them were done; None when fewer finished."""
    needed = math.ceil(fraction * workers - 1e-9)
    done = sorted(seconds)
    return done[needed - 1] if len(done) >= needed else None
