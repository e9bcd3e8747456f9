// Groups in the making: from a lease to sequences for an engine, from what came of them to a scored submission. No network
// and no engine.
#pragma once
#include <map>
#include <memory>
#include <optional>
#include <variant>
#include <vector>

#include "base/ids.hpp"
#include "base/result.hpp"
#include "data_plane/adapters/adapter.hpp"
#include "data_plane/schema.pb.h"
#include "model/config.hpp"
#include "model/phrasing.hpp"
#include "worker/engine.hpp"

namespace echoline::worker {

// What the run told this worker, made usable.
struct Task {
  schema::RunSpec spec;
  std::unique_ptr<data_plane::Adapter> adapter;
  std::optional<model::Phrasing> phrasing;
  model::ModelConfig model;
};

Result<Task> make_task(schema::RunSpec spec);

// What the learner is to be told of a lease.
using Settled = std::variant<schema::Submission, schema::WorkFailed>;

// A group fails as a whole and alone: with the first of its sequences that does, or where it cannot be scored. One thread.
class Groups {
 public:
  // The task must outlive it.
  Groups(const Task& task, WorkerId worker) : task_(task), worker_(worker) {}

  // The sequences of a group, in order, or why there are none.
  std::variant<std::vector<Sequence>, schema::WorkFailed> begin(schema::Lease lease, TimePoint now);

  struct Ended {
    TimePoint begun;
    Settled what;
    std::vector<std::uint64_t> abandoned;  // sequences that are still inside
  };
  // Nothing while others of its group are outstanding. A sequence that is not known is one that was abandoned.
  std::optional<Ended> take(Outcome outcome);

  std::vector<std::uint64_t> leases() const;
  std::size_t rollouts() const;  // of all groups, however many of them are finished
  bool empty() const { return groups_.empty(); }
  // All groups are forgotten; their sequences are returned.
  std::vector<std::uint64_t> drop();

 private:
  struct Group {
    schema::Lease lease;
    std::vector<model::Token> prompt;
    TimePoint begun;
    std::vector<std::optional<Response>> responses;  // by member
    std::size_t missing = 0;
  };
  struct Place {
    std::uint64_t lease = 0;
    std::size_t member = 0;
  };

  Settled settle(const Group& group) const;
  std::vector<std::uint64_t> forget(std::uint64_t lease);

  const Task& task_;
  WorkerId worker_;
  std::map<std::uint64_t, Group> groups_;     // by lease
  std::map<std::uint64_t, Place> sequences_;  // that are inside, by id
  std::uint64_t next_ = 0;
};

}  // namespace echoline::worker
