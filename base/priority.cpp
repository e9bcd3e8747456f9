// Short time slices by sched_setattr(2), for the overlay's threads.
#include "base/priority.hpp"

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace echoline {
namespace {

// The struct of sched_setattr(2); <linux/sched/types.h> conflicts with <sched.h>.
struct Attributes {
  std::uint32_t size = sizeof(Attributes);
  std::uint32_t policy = 0;
  std::uint64_t flags = 0;
  std::int32_t nice = 0;
  std::uint32_t priority = 0;
  std::uint64_t runtime = 0, deadline = 0, period = 0;
};
static_assert(sizeof(Attributes) == 48);

constexpr std::uint64_t kShortSliceNanoseconds = 100'000;  // the minimum that Linux accepts

}  // namespace

void request_short_time_slices() {
  Attributes attributes;
  if (::syscall(SYS_sched_getattr, 0, &attributes, sizeof attributes, 0U) != 0) return;
  if (attributes.policy != SCHED_OTHER) return;  // another policy was set on purpose
  attributes.runtime = kShortSliceNanoseconds;
  (void)::syscall(SYS_sched_setattr, 0, &attributes, 0U);
}

}  // namespace echoline
