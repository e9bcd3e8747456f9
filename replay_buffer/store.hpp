// The open SQLite file that ReplayBuffer and JobLedger share: its schema, its limits, and inserts. Private to this
// folder.
#pragma once
#include <functional>
#include <memory>
#include <thread>

#include "replay_buffer/buffer.hpp"
#include "replay_buffer/rules.hpp"
#include "replay_buffer/sqlite.hpp"
#include "replay_buffer/waiting_groups.hpp"

namespace echoline::replay_buffer {

inline constexpr std::uint64_t kSchemaVersion = 4;
inline constexpr std::uint64_t kApplicationId = 0x4543484f;  // "ECHO"

class Store {
 public:
  static Result<std::unique_ptr<Store>> open(const std::filesystem::path& path, const BufferOptions& options);

  // Inserts one checked trajectory inside the caller's transaction. True if stored, false for a duplicate. kInvalid if
  // the file has another trajectory for the same group and member, kExhausted at a limit.
  Result<bool> insert(const Trajectory& trajectory);
  // Adds `trajectories` to the reports' count of refusals for `reason`, inside the caller's transaction.
  Status count_rejected(std::string_view reason, std::uint64_t trajectories);
  // Oldest version that is fresh enough at the step.
  std::uint64_t version_min(std::uint64_t step) const {
    return oldest_admissible(step, options.staleness_budget).value;
  }
  // The first thread that calls this owns the store. Ends the process if another thread calls.
  void check_thread();

  // Updates `waiting` from the file, for all groups or for one. Call after a commit.
  Status load_waiting();
  Status reload_waiting(GroupId group);

  std::unique_ptr<Database> database;
  BufferOptions options;
  // The groups in the file that were neither consumed nor dropped. load_waiting() sets the group size.
  WaitingGroups waiting{/*group_size=*/0};
  // Called after a commit that put a discarded group into the table `pool`, so that it is leased again.
  std::function<void(GroupId)> on_discard = [](GroupId) {};
  // Totals of the stored data. insert() updates them, so a rollback must restore the earlier value.
  struct Totals {
    std::uint64_t rows = 0;
    std::uint64_t bytes = 0;  // bodies only
  } totals;

 private:
  Store() = default;
  Status create_or_check();
  Status load_totals();
  std::thread::id owner_;  // set by check_thread()
};

}  // namespace echoline::replay_buffer
