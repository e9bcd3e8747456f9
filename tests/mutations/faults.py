"""Deliberate faults, one at a time in the protocol and planning cores, with the test program that must find each.

A fault replaces text that occurs exactly once in its file. `soak` says that the soak test must find it as well.
"""
from typing import NamedTuple


class Fault(NamedTuple):
    name: str
    file: str
    old: str
    new: str
    test: str  # the program that must fail
    soak: bool = False


PROOF, STORE, SEALER = "overlay/proof.cpp", "overlay/publication_store.cpp", "overlay/sealer.cpp"
EDGE, UPLINK, CATCH_UP = "overlay/edge_sender.cpp", "overlay/uplink.cpp", "overlay/catch_up.cpp"
MEMBER, MEMBER_PUB = "overlay/member_core.cpp", "overlay/member_publications.cpp"
LEARNER_PUB, PRESENCE = "overlay/learner_publications.cpp", "overlay/learner_presence.cpp"
TOPOLOGY, TREES = "overlay/learner_topology.cpp", "chains/trees.cpp"

FAULTS = [
    # What is believed.
    Fault("an announcement's signature is not checked", PROOF,
          "Result<Announcement> Checker::open(const SignedAnnouncement& message) const {\n  ECHO_TRY(check(kAnnouncement, message));",
          "Result<Announcement> Checker::open(const SignedAnnouncement& message) const {", "frame_test"),
    Fault("a manifest's signature is not checked", PROOF,
          "Result<Manifest> Checker::open(const SignedManifest& message) const {\n  ECHO_TRY(check(kManifest, message));",
          "Result<Manifest> Checker::open(const SignedManifest& message) const {", "frame_test"),
    Fault("a beacon's signature is not checked", PROOF,
          "Result<Beacon> Checker::open(const Signed& message) const {\n  ECHO_TRY(check(kBeacon, message));",
          "Result<Beacon> Checker::open(const Signed& message) const {", "frame_test"),
    Fault("an announcement of another run is taken", PROOF,
          "if (a.run_id != run_id_) return bad(\"expected an announcement", "if (false) return bad(\"expected an announcement",
          "frame_test"),
    Fault("a base may be newer than its version", PROOF, "if (w.base() >= w.version())", "if (w.base() > w.version() + 1)",
          "frame_test"),
    Fault("the sides of the tree are swapped", PROOF, "at = position & 1 ? parent_of(sibling, at) : parent_of(at, sibling);",
          "at = position & 1 ? parent_of(at, sibling) : parent_of(sibling, at);", "frame_test", True),
    Fault("a seal's signature is not checked", STORE, "if (!checker_.seal_holds(head, root))",
          "if (false && !checker_.seal_holds(head, root))", "overlay_parts_test", True),
    Fault("a known seal stands for any other chunk", STORE,
          "known != seals.end() && known->second.count == head.seal_count && known->second.root == root", "known != seals.end()",
          "overlay_parts_test", True),
    Fault("a chunk may be longer than it says", STORE,
          "if (beyond || head.length != frame.body.size() || head.length > chunk_bytes)", "if (beyond)", "overlay_parts_test"),
    Fault("chunks beyond the end are kept", STORE,
          "const bool beyond = p.manifest && head.index >= *p.chunk_count();", "const bool beyond = false;",
          "overlay_parts_test"),
    Fault("a publication is whole whatever its manifest says", STORE,
          "content.finish() != entry.manifest->content) {", "false) {", "overlay_parts_test"),
    Fault("another manifest replaces the first", STORE, "if (entry.manifest == manifest) return false;", "return false;",
          "overlay_parts_test"),
    Fault("what comes back from disk is not hashed", STORE,
          "if (data.size() != chunk.length || checker_.chunk_hash(data) != chunk.hash) {", "if (data.size() != chunk.length) {",
          "overlay_parts_test"),
    # What is kept.
    Fault("a publication is whole one chunk early", STORE, "if (entry.have.count() < count) return false;",
          "if (entry.have.count() + 1 < count) return false;", "overlay_parts_test", True),
    Fault("memory is not given back", STORE, "if (!chunk.data.empty()) memory_ -= chunk.length;", "",
          "overlay_parts_test", True),
    Fault("nothing is evicted", STORE, "memory_ > limits_.memory_max.count / 2 && !resident_.empty()",
          "false && !resident_.empty()", "overlay_parts_test"),
    Fault("what is still needed makes room", STORE, "if (key.version >= keep_from) break;", "", "overlay_parts_test"),
    Fault("a chunk counts as on disk before it is", STORE, "chunk.on_disk = recovering_;", "chunk.on_disk = true;",
          "overlay_parts_test", True),
    Fault("what was taken back is kept", STORE, "if (newest && last.key().version <= *newest) break;", "break;",
          "overlay_parts_test", True),
    # What is sent.
    Fault("a chunk is sent twice", EDGE, "      known.insert(*index);\n", "", "overlay_parts_test", True),
    Fault("a manifest is never sent", EDGE, "if (stored->manifest && edge.closed.insert(stored->id).second)", "if (false)",
          "overlay_parts_test", True),
    Fault("a chunk that was asked for again is not sent", EDGE, "  known.erase(request.index);\n", "", "overlay_parts_test"),
    Fault("what was under way on a broken connection counts as there", EDGE,
          "if (std::exchange(edge.lossy, false)) {", "if (false) {", "overlay_parts_test", True),
    Fault("the dearest way is taken", EDGE, "if (added || cost < it->second.cost) it->second", "if (added || cost > it->second.cost) it->second",
          "overlay_parts_test"),
    Fault("urgent messages cut into a frame", UPLINK, "if (it != lines_.end() && it->second.frame && it->second.done > 0)",
          "if (false)", "overlay_parts_test", True),
    Fault("who was idle is owed all of it", UPLINK,
          "member.turn = std::max(member.turn, turn_ - static_cast<double>(kWindowBytes) / member.source->weight());", "",
          "overlay_parts_test"),
    Fault("there is no window", UPLINK, "if (line.in_flight >= kWindowBytes) continue;", "", "overlay_parts_test"),
    Fault("a delta costs nothing", CATCH_UP, "cost += from->second;", "cost = from->second;", "overlay_core_test"),
    # What a worker does with it.
    Fault("a base with another digest is good enough", MEMBER_PUB,
          "if (key.base && next->announcement.base_digest != at->policy_digest) {", "if (false) {", "overlay_core_test"),
    Fault("a worker goes back below its floor", MEMBER_PUB,
          "if (same_epoch && at->version < floor->version) return;", "", "overlay_core_test"),
    Fault("a version may come back with another digest", MEMBER_PUB,
          "if (same_epoch && at->version == floor->version && at->policy_digest != floor->policy_digest) {", "if (false) {",
          "overlay_core_test"),
    Fault("the floor is not saved before it is activated", MEMBER_PUB, "if (config_.durable)\n    save(now);\n  else\n    activate(now);",
          "activate(now);", "overlay_core_test", True),
    Fault("an expired announcement is taken", MEMBER_PUB,
          "const bool expired = up && announcement->expires_unix_ms < learner_unix_ms(now);", "const bool expired = false;",
          "overlay_core_test"),
    Fault("bad chunks are not told of", MEMBER_PUB, "  tell_learner(Poisoned{", "  if (false) tell_learner(Poisoned{",
          "overlay_core_test", True),
    Fault("an epoch leaves what was stored", MEMBER_PUB,
          "while (!store_.entries().empty()) store_.erase(PublicationKey(store_.entries().begin()->first));", "",
          "overlay_core_test", True),
    Fault("a new epoch leaves the position", MEMBER_PUB, "  position_.reset();\n  installed_.reset();", "  installed_.reset();",
          "overlay_core_test", True),
    Fault("a beacon of an earlier epoch is believed", MEMBER, "if (beacon->epoch < epoch_) return;", "", "overlay_core_test"),
    Fault("an old beacon is believed", MEMBER, "if (beacon->sequence <= beacon_sequence_) return;", "", "overlay_core_test"),
    Fault("an expired beacon is believed", MEMBER, "if (beacon->expires_unix_ms < learner_unix_ms(now)) {", "if (false) {",
          "overlay_core_test"),
    Fault("a failed installation needs no snapshot", MEMBER,
          "repair_ = std::max({version, position_->version, newest_.value_or(version)});", "", "overlay_core_test", True),
    Fault("an installation of an earlier epoch counts", MEMBER, "if (void_.contains(version)) {", "if (false) {",
          "overlay_core_test", True),
    # What the learner believes and does.
    Fault("an acknowledgement of an earlier epoch counts", LEARNER_PUB, "if (ack.epoch != state_.epoch) return;", "",
          "overlay_core_test", True),
    Fault("a version goes backwards in the learner's eyes", LEARNER_PUB,
          "if (worker.view.installed && ack.version < *worker.view.installed) return;", "", "overlay_core_test"),
    Fault("versions need not grow", LEARNER_PUB, "if (newest_ && key.version <= *newest_)", "if (false)", "overlay_core_test"),
    Fault("a version is published twice with different digests", LEARNER_PUB,
          "if (!added && it->second != manifest.policy_digest) {", "if (false) {", "overlay_core_test"),
    Fault("the digest is not on disk when a publication closes", LEARNER_PUB, "  if (added)\n    save(now);\n  else if",
          "  if (added && false)\n    save(now);\n  else if", "overlay_core_test", True),
    Fault("the quorum is everybody", LEARNER_PUB, "std::ceil(config_.quorum * static_cast<double>", "std::ceil(1.0 * static_cast<double>",
          "overlay_core_test"),
    Fault("nobody asks for a snapshot", LEARNER_PUB, "actions_.push_back(act::NeedSnapshot{published, snapshot_wanted_for_});", "",
          "overlay_core_test", True),
    Fault("a silent worker helps others", LEARNER_PUB, "id == worker.view.info.id || other.silent ||", "id == worker.view.info.id ||",
          "overlay_core_test"),
    Fault("who is silent keeps its place", PRESENCE, "  take_out(id, now);\n", "", "overlay_core_test", True),
    Fault("who is heard again gets no place", PRESENCE, "  plan_soon(now);\n}\n\n// Nothing is expected", "}\n\n// Nothing is expected",
          "overlay_core_test", True),
    Fault("who is away is gone at once", PRESENCE, "if (now >= worker.away_since + config_.away_max)", "if (now >= worker.away_since)",
          "overlay_core_test", True),
    Fault("a pause of the learner's own is held against others", PRESENCE, "    worker.heard += late;\n", "", "overlay_core_test", True),
    Fault("children of who is taken out keep it", TOPOLOGY, "set_topology(chains::detach(topology_, id), now);\n}\n\n// Tells",
          "}\n\n// Tells", "overlay_core_test", True),
    Fault("nobody is quarantined", TOPOLOGY, "if (std::exchange(worker.quarantined, true)) return;", "return;",
          "overlay_core_test", True),
]
