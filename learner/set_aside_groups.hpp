// Groups that are set aside: they cannot be generated and are never leased again. Private to learner/.
#pragma once
#include "learner/desk_context.hpp"

namespace echoline::learner {

// One thread, the desk's. If kInARowMax groups in a row are set aside and none succeeds meanwhile, the fault is the
// run's, not the groups': can_generate() becomes an error. Groups set aside before a lease are counted apart, because a
// granted lease is enough to show that prompts are usable.
class SetAsideGroups {
 public:
  static constexpr std::uint32_t kInARowMax = 256;

  explicit SetAsideGroups(DeskContext& desk) : desk_(desk) {}

  // Reports the groups that the ledger has set aside since the last call. `before_lease`: no worker has leased them.
  void report_new(bool before_lease = false);
  void on_group_leased() { before_lease_in_a_row_ = 0; }
  void on_group_succeeded() { failed_in_a_row_ = 0; }
  // The error that ends the run; ok while groups succeed.
  const Status& can_generate() const { return can_generate_; }

  void check() const;  // aborts if its parts disagree

 private:
  DeskContext& desk_;
  std::uint64_t reported_ = 0;  // number of groups
  std::uint32_t before_lease_in_a_row_ = 0, failed_in_a_row_ = 0;
  Status can_generate_;
};

}  // namespace echoline::learner
