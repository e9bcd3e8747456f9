// The overlay on real machines: a learner node and worker nodes, connected by mutual TLS. Each node has one event-loop
// thread. A publication is one version of the policy as it travels: a full snapshot, or a delta on an older version.
//
// All methods are thread-safe: they pass their work to the loop and return at once, unless stated otherwise. All
// callbacks run on the loop thread and must not block. They may call the node's methods except stop(), and may run
// before start() has returned. Long work, such as installing a delta or training, belongs on the application's own
// threads.
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

struct LearnerOptions : LearnerRules {  // `network`: address, links and stores
  std::string run_id;                   // 1 to 64 printable characters
  Bytes policy_bytes;  // size of the policy, which determines the stores of learner and workers (overlay/sizes.hpp)
  Duration publication_lifetime = std::chrono::hours(24);
  // Folder of the run's authority and the overlay's state (run.key, run.crt, state). Empty: nothing survives the
  // process, and workers cannot come back after a restart.
  std::filesystem::path folder;
  Bytes message_max{kMessageBytesMax};  // of a worker's messages; a longer one is dropped and counts as misconduct
  trust::Secret relay_key;              // of network.relay
  std::filesystem::path bundle;         // served to machines that show a join token; empty: none
  // After a restart, the version from which the application continues. Later versions become invalid.
  std::optional<Version> resumed_at;
};

struct LearnerEvents {  // each may be empty
  // The first message to a joining worker; above 192 KiB, no worker can join.
  std::function<std::string(const MemberInfo&)> welcome;
  // The region of a joining worker, of LearnerOptions::regions; empty: all workers are in the learner's region.
  std::function<std::uint32_t(const MemberInfo&)> region_of;
  // The links of a joining worker that states none, by its offer. They are not enforced. Empty: not known.
  std::function<LinkLimits(const MemberInfo&)> links_of;
  // Checks the application's part of a heartbeat. The fifth invalid one ends the worker's membership.
  std::function<Status(std::string_view)> check_heartbeat;
  std::function<void(const HeartbeatReceived&)> heartbeat;
  std::function<void(const MemberInfo&)> joined;  // also after away(), when the worker has come back
  // The worker is unreachable and its leases are void. Its membership is kept for away_max; then lost() follows.
  std::function<void(WorkerId, const std::string& reason)> away;
  std::function<void(WorkerId, const std::string& reason)> lost;
  // An operator must solve a problem on the worker's machine: its store is too small, or its disk is full.
  std::function<void(WorkerId, const std::string& what)> trouble;
  // The worker installed `version` and computed `policy_digest`; the application compares it.
  std::function<void(WorkerId, Version, const Digest& policy_digest)> installed;
  // Application messages arrive whole, once and in order per worker.
  std::function<void(WorkerId, std::string bytes)> message;
  std::function<void(const BroadcastReport&)> broadcast_done;
  std::function<void(const chains::Topology&)> topology_changed;
  std::function<void(const SlowHop&)> slow_hop;
  std::function<void(const std::string&)> chose_topology;
  // A late worker needs a publication that is not stored. Answer with a publication of `current`: the stored deltas
  // from version `from` folded into one (deltas_from()) or, if `from` is absent, a full snapshot.
  std::function<void(Version current, std::optional<Version> from)> need_catch_up;
};

// Describes a publication before its bytes are known.
struct PublicationHead {
  Version version;
  std::optional<Version> base;  // absent: a full snapshot
  Digest base_digest{};         // of the policy of version `base`
  bool catch_up = false;        // for late workers: `version` has been published before
};

// Sends a publication to the workers while the rest of it is still being encoded. Belongs to one thread, which also
// hashes and signs. Destroying it before finish() withdraws the publication.
class PublicationWriter {
 public:
  ~PublicationWriter();
  Status write(std::span<const std::byte> bytes);
  // Closes the publication. Workers get the note with it (Publication::note). kInvalid: the version was published
  // before with another digest, or the note exceeds kNoteBytesMax.
  Status finish(const Digest& policy_digest, const std::string& note = {});

 private:
  friend class LearnerNode;
  struct Impl;
  explicit PublicationWriter(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

class LearnerNode {
 public:
  // kInvalid if the port is in use or the options are inconsistent; kIo if the folder cannot be used.
  static Result<std::unique_ptr<LearnerNode>> start(LearnerOptions options, LearnerEvents events);
  ~LearnerNode();  // calls stop(); all writers must be destroyed before

  Endpoint endpoint() const;
  // Where other machines may reach this node: its relay first, then its own addresses.
  std::vector<Endpoint> remote_endpoints() const;
  // The name by which a relay knows this run. A client that sends it as the server name of TLS reaches this node.
  std::string relay_name() const;
  // Issues a single-use join token for the machine with instance name `instance`.
  Result<trust::Secret> issue_token(std::string_view instance, Duration lifetime = trust::kTokenLifetime) const;
  // Terms of the served bundle; absent if none is served.
  const std::optional<BundleTerms>& bundle() const;
  // Opens a publication; waits for the loop. kInvalid: the version does not grow (restarts included), or the base was
  // never published.
  Result<std::unique_ptr<PublicationWriter>> begin(const PublicationHead& head);
  // begin(), write() and finish() in one, for a complete payload.
  Status publish(const PublicationHead& head, std::span<const std::byte> payload, const Digest& policy_digest);
  // Returns the stored deltas from version `from` to the newest, for need_catch_up; waits for the loop. kNotFound: some
  // are no longer stored.
  Result<StoredDeltas> deltas_from(Version from) const;
  // Sends a message; no effect if the worker is not connected. kExhausted above kMessageBytesMax; kCancelled once the
  // node has stopped. Messages take turns with chunks and count towards limits.up. A worker that leaves four messages
  // of the largest size unread loses its connection.
  Status send(WorkerId worker, std::string bytes);
  Status send(WorkerId worker, std::shared_ptr<const std::string> bytes);  // shares the bytes between several workers
  void expel(WorkerId worker, std::string reason);
  // The worker's machine has ended: lost() comes now instead of after away_max.
  void give_up(WorkerId worker, std::string reason);
  LearnerStats stats() const;  // waits for the loop; after stop(): the last state
  // Sends goodbye to the workers, flushes (for at most 2 s) and joins the thread. Idempotent.
  void stop();

 private:
  friend class PublicationWriter;
  struct Impl;
  explicit LearnerNode(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

struct WorkerOptions {
  Endpoint learner;  // an address or host name
  // No token is needed if the folder holds this worker's identity and its certificate is valid.
  trust::Secret token;
  std::string bind_host = "127.0.0.1";  // where child workers dial this one
  std::uint16_t port = 0;               // 0: any free port
  std::optional<Endpoint> advertise;    // the address that others dial, for mapped ports; absent: the bound one
  std::string name;                     // its offer id, and the instance its token was issued for
  std::string place;                    // its location, in the names of the learner's regions; "": not reported
  LinkLimits limits;
  std::optional<Bytes> memory_max;  // chunks kept in memory; absent: by the policy's size
  std::optional<Bytes> disk_max;    // publications kept in the folder; absent: by the policy's size
  // Identity, floor and chunks survive a restart here. Empty: they do not, and all data stays in memory.
  std::filesystem::path folder;
  Duration join_timeout = kJoinTimeout;  // to enrol, and again to be welcomed
  // Longest time without the learner, then disconnected(); absent: the learner's away_max.
  std::optional<Duration> away_max;
};

struct WorkerEvents {  // each may be empty
  // The learner has welcomed this worker, for the first time or after away().
  std::function<void(WorkerId, const std::string& welcome_bytes)> joined;
  // A complete, verified publication. Publications come in an installable order: a delta right after its base.
  std::function<void(const Publication&)> publication;
  // Bytes of a publication that is still arriving. At most kPartsUnreadMax are outstanding; on_parts_consumed() reports
  // bytes as used.
  std::function<void(const PublicationPart&)> part;
  std::function<void(std::string bytes)> message;
  // The learner is unreachable: messages sent to it are lost until joined() is called again.
  std::function<void(const std::string& reason)> away;
  // The last callback. `in_order`: the run has ended, or this side left. Otherwise the learner is gone, or has refused
  // or expelled this worker, and only a new join helps.
  std::function<void(const std::string& reason, bool in_order)> disconnected;
};

class WorkerNode {
 public:
  // Enrols first if necessary, which takes until the learner answers. kInvalid: no token, or refused. kUnavailable: the
  // learner does not answer.
  static Result<std::unique_ptr<WorkerNode>> start(WorkerOptions options, WorkerEvents events);
  ~WorkerNode();  // calls stop()

  Endpoint endpoint() const;
  void installed(Version version, const Digest& policy_digest);
  // The delivered publication could not be installed: a full snapshot will follow. Until then, the application drops
  // deltas that were already delivered, without a report. After three failures in a row, the worker is disconnected.
  void install_failed(Version version, std::string why);
  void on_parts_consumed(std::uint64_t bytes);
  // Sends a message to the learner. kExhausted above kMessageBytesMax, kCancelled once the node has stopped.
  Status send(std::string bytes);
  void set_heartbeat_payload(std::string application_bytes);  // part of every heartbeat from now on; at most 64 KiB
  // Hands the children over to other parents; disconnected() follows within ten seconds.
  void drain();
  WorkerStats stats() const;
  void stop();  // sends goodbye, flushes and joins the thread. Idempotent.

 private:
  struct Impl;
  explicit WorkerNode(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace echoline::overlay
