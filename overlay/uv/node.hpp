// The overlay on real machines: a learner node and worker nodes over TCP, each with one event-loop thread inside.
//
// All methods are thread-safe: they hand their work to the loop and return at once (stats() waits for the loop).
// All callbacks run on the loop thread and must not block; they may call the node's methods except stop(), and they may
// come before start() has returned. Work (installing a delta, training) belongs on the application's own threads.
#pragma once
#include <functional>
#include <memory>
#include <string>

#include "base/result.hpp"
#include "chains/topology.hpp"
#include "overlay/types.hpp"

namespace echoline::overlay {

struct LearnerOptions {
  // There is no encryption and no enrolment yet: anything but loopback is for trusted networks and is logged as such.
  std::string bind_host = "127.0.0.1";
  std::uint16_t port = 0;  // 0: any free port, see endpoint()
  LinkLimits limits;
  BitRate chain_rate = BitRate::from_mbit_per_s(8);  // b: rate a chain is planned for; chains = max(1, floor(up / b))
  std::size_t chains_max = 8;                        // when limits.up is absent
  chains::TopologyPolicy policy = chains::TopologyPolicy::kEcho2;
  Bytes chunk{64 * 1024};  // unit that is hashed and forwarded; 1 KiB .. 4 MiB
  Duration heartbeat = std::chrono::milliseconds(500);
  Duration heartbeat_timeout = std::chrono::seconds(3);
  double quorum = 0.9;                // fraction q of the active workers that defines T_b
  std::string run_id;                 // workers of another run are refused
  Bytes store_bytes_max{1ull << 30};  // recent publications kept for catching up
};

struct LearnerEvents {  // each may be empty
  // What a joining worker is told first; at most 256 KiB.
  std::function<std::string(const MemberInfo&)> welcome;
  std::function<void(const MemberInfo&)> joined;
  std::function<void(WorkerId, const std::string& reason)> lost;
  // The worker installed `version` and computed `policy_digest`; comparing it is the application's business.
  std::function<void(WorkerId, Version, const Digest& policy_digest)> acked;
  // Application messages arrive whole, once and in order per worker.
  std::function<void(WorkerId, std::string bytes)> message;
  std::function<void(const BroadcastReport&)> broadcast_done;
  std::function<void(const ChainIds&)> topology_changed;
  // Somebody can only be helped by a full snapshot of the current version: answer with provide_snapshot().
  std::function<void(Version current)> need_snapshot;
};

class LearnerNode {
 public:
  // kInvalid when the port is in use or the options make no sense.
  static Result<std::unique_ptr<LearnerNode>> start(LearnerOptions options, LearnerEvents events);
  ~LearnerNode();  // stop()

  Endpoint endpoint() const;
  // Versions must grow. A delta's base must have been published before it. What breaks this, or is larger than the
  // store, is logged as an error and not sent.
  void publish(Publication publication);
  // A full snapshot of an already published version (normally the newest), for workers that cannot follow by deltas.
  void provide_snapshot(Publication full);
  // At most 4 MiB (larger ones are logged and dropped); nothing happens when the worker is gone. Messages leave at
  // once, ahead of chunks, and count towards limits.up. A worker that leaves 64 MiB unread is lost.
  void send(WorkerId worker, std::string bytes);
  void expel(WorkerId worker, std::string reason);
  LearnerStats stats() const;  // after stop(): the last state
  // Says goodbye to the workers, flushes (for at most 2 s) and joins the thread. Idempotent.
  void stop();

 private:
  struct Impl;
  explicit LearnerNode(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

struct WorkerOptions {
  Endpoint learner;
  std::string bind_host = "127.0.0.1";  // where child workers dial this one; its port is chosen by the system
  std::string name;                     // its offer id
  LinkLimits limits;
  std::string run_id;
  Bytes store_bytes_max{256ull << 20};               // publications kept for children and for catching up
  Duration join_timeout = std::chrono::seconds(10);  // until connected and welcomed, else disconnected()
};

struct WorkerEvents {  // each may be empty
  std::function<void(WorkerId, const std::string& welcome_bytes)> joined;
  // Complete, verified, and in an order that can be installed: a delta comes right after its base was delivered.
  std::function<void(const Publication&)> publication;
  std::function<void(std::string bytes)> message;
  // The learner is gone, refused or expelled this worker; the last callback. Starting again means joining anew.
  std::function<void(const std::string& reason)> disconnected;
};

class WorkerNode {
 public:
  static Result<std::unique_ptr<WorkerNode>> start(WorkerOptions options, WorkerEvents events);
  ~WorkerNode();  // stop()

  void installed(Version version, const Digest& policy_digest);
  // The delivered publication could not be installed: a full snapshot will be delivered instead. Until then, drop the
  // deltas that were already delivered, without a report. After three failures in a row the worker is disconnected.
  void install_failed(Version version, std::string why);
  void send(std::string bytes);               // to the learner; at most 4 MiB
  void set_heartbeat(std::string app_bytes);  // rides on every heartbeat from now on; at most 64 KiB
  WorkerStats stats() const;
  void stop();  // tells the learner, flushes and joins the thread. Idempotent.

 private:
  struct Impl;
  explicit WorkerNode(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace echoline::overlay
