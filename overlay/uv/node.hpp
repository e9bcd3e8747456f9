// The overlay on real machines: a learner node and worker nodes over mutual TLS, each with one event-loop thread
// inside.
//
// All methods are thread-safe: they hand their work to the loop and return at once, unless they say otherwise. All
// callbacks run on the loop thread and must not block; they may call the node's methods except stop(), and they may
// come before start() has returned. Work (installing a delta, training) belongs on the application's own threads.
#pragma once
#include <filesystem>
#include <functional>
#include <memory>
#include <string>

#include "base/result.hpp"
#include "overlay/settings.hpp"
#include "overlay/trust/token.hpp"
#include "overlay/types.hpp"
#include "overlay/uv/bundle.hpp"

namespace echoline::overlay {

struct LearnerOptions : LearnerRules {  // `network` says where it listens, what it sends and what it keeps
  std::string run_id;                   // 1 to 64 printable characters
  Bytes policy_bytes;  // of the policy: what learner and workers have room for follows from it (overlay/sizes.hpp)
  Duration publication_lifetime = std::chrono::hours(24);
  // Where the run's authority and the overlay's state are kept (run.key, run.crt, state); empty: nothing survives the
  // process, and workers of an earlier one cannot come back.
  std::filesystem::path folder;
  Bytes message_max{kMessageBytesMax};  // of a worker's messages; a longer one is not kept, and counted against it
  std::filesystem::path bundle;         // handed out to machines that show a join token; empty: none
  // After a restart, the version the application goes on from: what was published beyond it is disowned.
  std::optional<Version> resumed_at;
};

struct LearnerEvents {  // each may be empty
  // What a joining worker is told first; at most 192 KiB, or nobody can join.
  std::function<std::string(const MemberInfo&)> welcome;
  // Where a joining worker stands, of LearnerOptions::regions; empty: all with the learner.
  std::function<std::uint32_t(const MemberInfo&)> region_of;
  // Whether what rides on a worker's heartbeat is as it should be; of what is not, the fifth ends the membership.
  std::function<Status(std::string_view)> check_heartbeat;
  std::function<void(const HeardFrom&)> heartbeat;
  std::function<void(const MemberInfo&)> joined;  // again when it came back after away()
  // Out of reach: what it was doing is void. Its place is kept for away_max; then it is lost.
  std::function<void(WorkerId, const std::string& reason)> away;
  std::function<void(WorkerId, const std::string& reason)> lost;
  // Something on the worker's machine needs a person: its store is too small, its disk is full.
  std::function<void(WorkerId, const std::string& what)> trouble;
  // The worker installed `version` and computed `policy_digest`; comparing it is the application's business.
  std::function<void(WorkerId, Version, const Digest& policy_digest)> acked;
  // Application messages arrive whole, once and in order per worker.
  std::function<void(WorkerId, std::string bytes)> message;
  std::function<void(const BroadcastReport&)> broadcast_done;
  std::function<void(const chains::Topology&)> topology_changed;
  std::function<void(const SlowHop&)> slow_hop;
  std::function<void(const std::string&)> chose_topology;
  // A late worker needs a publication that is not stored: answer with one of `current`, the stored deltas from version
  // `from` folded into one (deltas_from()) or, if `from` is absent, a full snapshot.
  std::function<void(Version current, std::optional<Version> from)> need_catch_up;
};

struct PublicationHead {
  Version version;
  std::optional<Version> base;  // absent: a full snapshot
  Digest base_digest{};         // of the policy that `base` is
  bool catch_up = false;        // for late workers: `version` is published already
};

// Bytes of a publication on their way to the workers while the rest of them is still being made. Belongs to one thread;
// hashing and signing happen on it. Destroyed before finish(), it takes the publication back.
class PublicationWriter {
 public:
  ~PublicationWriter();
  Status write(std::span<const std::byte> bytes);
  // Closes the publication. Workers get the note with it (Publication::note). kInvalid: the version was published
  // before with another digest, or the note has more than kNoteBytesMax.
  Status finish(const Digest& policy_digest, const std::string& note = {});

 private:
  friend class LearnerNode;
  struct Impl;
  explicit PublicationWriter(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

class LearnerNode {
 public:
  // kInvalid when the port is in use or the options make no sense; kIo when the folder cannot be used.
  static Result<std::unique_ptr<LearnerNode>> start(LearnerOptions options, LearnerEvents events);
  ~LearnerNode();  // stop(); no writer may be left

  Endpoint endpoint() const;
  // A single-use join token for the machine that calls itself `instance`.
  Result<trust::Secret> issue_token(std::string_view instance, Duration lifetime = trust::kTokenLifetime) const;
  // Of the bundle that is handed out, if one is.
  const std::optional<BundleTerms>& bundle() const;
  // Opens a publication; waits for the loop. kInvalid: versions must grow, also over restarts of the learner, and a
  // base must have been published.
  Result<std::unique_ptr<PublicationWriter>> begin(const PublicationHead& head);
  // begin(), write(), finish(): for bytes that are all there.
  Status publish(const PublicationHead& head, std::span<const std::byte> payload, const Digest& policy_digest);
  // The stored deltas that lead from version `from` to the newest, as need_catch_up asks for them; waits for the loop.
  // kNotFound: some are no longer stored.
  Result<StoredDeltas> deltas_from(Version from) const;
  // kExhausted above kMessageBytesMax, kCancelled once the node has stopped; nothing happens when the worker is not
  // there. Messages take turns with chunks and count towards limits.up. The connection of a worker that leaves four of
  // the largest unread is given up.
  Status send(WorkerId worker, std::string bytes);
  Status send(WorkerId worker, std::shared_ptr<const std::string> bytes);  // the same bytes for many
  void expel(WorkerId worker, std::string reason);
  // Its machine has ended: lost() comes now instead of after away_max.
  void give_up(WorkerId worker, std::string reason);
  LearnerStats stats() const;  // waits for the loop; after stop(): the last state
  // Says goodbye to the workers, flushes (for at most 2 s) and joins the thread. Idempotent.
  void stop();

 private:
  friend class PublicationWriter;
  struct Impl;
  explicit LearnerNode(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

struct WorkerOptions {
  Endpoint learner;  // an address or host name
  // With a folder that holds this worker's identity no token is needed as long as its certificate is valid.
  trust::Secret token;
  std::string bind_host = "127.0.0.1";  // where child workers dial this one
  std::uint16_t port = 0;               // 0: any free port
  std::optional<Endpoint> advertise;    // what others should dial, where a port is mapped; absent: the bound one
  std::string name;                     // its offer id, and the instance its token was issued for
  std::string place;                    // where it stands, as the learner's regions know places; "": not said
  LinkLimits limits;
  std::optional<Bytes> memory_max;  // chunks kept in memory; absent: by the policy's size, as the next
  std::optional<Bytes> disk_max;    // publications kept in the folder
  // Identity, floor and chunks survive a restart here; empty: they do not, and everything stays in memory.
  std::filesystem::path folder;
  Duration join_timeout = kJoinTimeout;  // until enrolled, and again until welcomed
  std::optional<Duration> away_max;      // without the learner, else disconnected(); absent: the learner's away_max
};

struct WorkerEvents {  // each may be empty
  // Welcomed by the learner; again when it came back after away().
  std::function<void(WorkerId, const std::string& welcome_bytes)> joined;
  // Complete, verified, and in an order that can be installed: a delta comes right after its base was delivered.
  std::function<void(const Publication&)> publication;
  // Of one that arrives, before it is complete. No more than kPartsUnreadMax come until parts_read() says that they are
  // used.
  std::function<void(const PublicationPart&)> part;
  std::function<void(std::string bytes)> message;
  // The learner is out of reach: messages sent to it are lost until joined() comes again.
  std::function<void(const std::string& reason)> away;
  // The last callback. `in_order`: the run has ended, or this side left; otherwise the learner is gone, or has refused
  // or expelled this worker. Starting again means joining anew.
  std::function<void(const std::string& reason, bool in_order)> disconnected;
};

class WorkerNode {
 public:
  // Enrols first if it has to, which takes until the learner answers. kInvalid: no token, or refused. kUnavailable.
  static Result<std::unique_ptr<WorkerNode>> start(WorkerOptions options, WorkerEvents events);
  ~WorkerNode();  // stop()

  Endpoint endpoint() const;
  void installed(Version version, const Digest& policy_digest);
  // The delivered publication could not be installed: a full snapshot will be delivered instead. Until then, drop the
  // deltas that were already delivered, without a report. After three failures in a row the worker is disconnected.
  void install_failed(Version version, std::string why);
  void parts_read(std::uint64_t bytes);
  // To the learner. kExhausted above kMessageBytesMax, kCancelled once the node has stopped.
  Status send(std::string bytes);
  void set_heartbeat(std::string app_bytes);  // rides on every heartbeat from now on; at most 64 KiB
  // Hands children over to others, then disconnected() comes; within ten seconds.
  void drain();
  WorkerStats stats() const;
  void stop();  // tells the learner, flushes and joins the thread. Idempotent.

 private:
  struct Impl;
  explicit WorkerNode(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace echoline::overlay
