// Reports groups that cannot be generated, for the parts of the rollout desk.
#include "learner/set_aside_groups.hpp"

#include "base/log.hpp"
#include "base/text.hpp"

namespace echoline::learner {

void SetAsideGroups::report_new(bool before_lease) {
  constexpr std::uint64_t kLoggedMax = 20;
  for (replay_buffer::SetAsideGroup& entry : desk_.ledger->newly_set_aside()) {
    const auto problem = desk_.checker.problem(entry.group);
    const GroupSetAside group{.group = entry.group,
                              .problem = problem ? problem->id() : "",
                              .reason = std::move(entry.reason),
                              .detail = std::move(entry.detail)};
    if (++reported_ <= kLoggedMax)
      log::warn("group {} ('{}') is set aside: {}: {}{}", group.group, printable(group.problem), group.reason,
                group.detail, reported_ == kLoggedMax ? "; further ones are in events.jsonl only" : "");
    std::uint32_t& in_a_row = before_lease ? before_lease_in_a_row_ : failed_in_a_row_;
    ++in_a_row;
    // The first such error stays.
    if (in_a_row >= kInARowMax && can_generate_)
      can_generate_ = fail(Code::kInvalid, "generate rollouts",
                           "groups are set aside one after another and none succeeds; the last one ('{}'): {}: {}",
                           printable(group.problem), group.reason, group.detail);
    desk_.checker.forget(group.group);
    if (desk_.events.set_aside) desk_.events.set_aside(group);
  }
}

void SetAsideGroups::check() const {
  ECHO_CHECK(can_generate_ || reported_ >= kInARowMax, "the run is given up after {} groups", reported_);
  ECHO_CHECK(before_lease_in_a_row_ <= reported_ && failed_in_a_row_ <= reported_, "of {} groups {} and {} in a row",
             reported_, before_lease_in_a_row_, failed_in_a_row_);
}

}  // namespace echoline::learner
