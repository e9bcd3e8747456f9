// Strongly typed identifiers, so that a version, a worker and a lease cannot be confused.
#pragma once
#include <fmt/format.h>

#include <compare>
#include <cstdint>
#include <functional>
#include <string>

namespace echoline {

template <class Tag>
struct Id {
  std::uint64_t value = 0;
  friend auto operator<=>(const Id&, const Id&) = default;
};

// Learner step at which a policy was published; 0 is the policy before the first step.
using Version = Id<struct VersionTag>;
// A worker of this run, assigned by the learner and never reused. 0 is the learner itself.
using WorkerId = Id<struct WorkerTag>;
inline constexpr WorkerId kLearnerId{0};
// A worker's time-limited right to generate one group (below).
using LeaseId = Id<struct LeaseTag>;
// The rollouts of one prompt, whose rewards are compared with each other.
using GroupId = Id<struct GroupTag>;

}  // namespace echoline

template <class Tag>
struct std::hash<echoline::Id<Tag>> {
  std::size_t operator()(echoline::Id<Tag> id) const noexcept { return std::hash<std::uint64_t>{}(id.value); }
};

template <class Tag>
struct fmt::formatter<echoline::Id<Tag>> : fmt::formatter<std::uint64_t> {
  template <class Context>
  auto format(echoline::Id<Tag> id, Context& context) const {
    return fmt::formatter<std::uint64_t>::format(id.value, context);
  }
};
