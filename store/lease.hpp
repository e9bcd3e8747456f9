// The right of one publisher to write to a store. At most one holds it.
#pragma once
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>

#include "base/clock.hpp"
#include "store/object_store.hpp"

namespace echoline::store {

// Waits between two looks at a store; an error ends the wait.
using Waiter = std::function<Status(Duration)>;

struct LeaseOptions {
  std::string holder;                          // 32 hexadecimal digits; the same for each start of a run
  Duration length = std::chrono::seconds(30);  // without a renewal for this long, another holder may take over
};

// Terms are numbered. A term begins when its object, lease/TERM, is stored where there was none: the service lets only
// one publisher do that. The holder renews its term by rewriting the object. It checks first that no later term exists.
// A publisher takes over from itself (the same holder) and from a term that ended. From another holder it takes over
// only after it has seen no renewal for `length`, by its own clock; so clocks need not agree.
class PrefixLease {
 public:
  // kUnavailable: another publisher holds the lease. kInvalid: the service ignores the condition of put_if_absent().
  static Result<std::unique_ptr<PrefixLease>> acquire(ObjectStore& store, LeaseOptions options, const Clock& clock,
                                                      const Waiter& wait);
  std::uint64_t term() const { return term_; }
  // Ok if the lease is valid for a while; renews it if it ends soon. kStale: another publisher has it.
  Status check();
  // Renews it now. Any thread.
  Status renew();
  // Ends the term, so that the next publisher need not wait.
  Status end();

 private:
  PrefixLease(ObjectStore& store, LeaseOptions options, const Clock& clock, std::uint64_t term)
      : store_(store), options_(std::move(options)), clock_(clock), term_(term) {}
  Status write(bool ended);

  ObjectStore& store_;
  const LeaseOptions options_;
  const Clock& clock_;
  const std::uint64_t term_;
  std::mutex mutex_;
  std::uint64_t renewals_ = 0;
  TimePoint renewed_at_{};  // before the request, so that the holder ends its use earlier than others may begin
  bool lost_ = false;
};

}  // namespace echoline::store
