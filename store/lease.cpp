// Takes, renews and ends the lease of a store's prefix. Called by PolicyWriter.
#include "store/lease.hpp"

#include <algorithm>
#include <optional>

#include "store/keys.hpp"
#include "store/signed_text.hpp"

namespace echoline::store {
namespace {

constexpr std::string_view kOperation = "lease of the store";
constexpr std::size_t kLeaseBytesMax = 1024, kHolderDigits = 32;
constexpr Duration kLook = std::chrono::seconds(1);  // how often a publisher looks for a renewal
constexpr std::uint64_t kTermsKept = 16;             // earlier ones are removed
constexpr int kAcquireTriesMax = 16;
// Before the end of its lease, the holder stops using it by this share of the length: a request may take long.
constexpr int kSafetyShare = 3;

struct LeaseText {
  std::string holder;
  std::uint64_t renewals = 0;
  bool ended = false;
  friend bool operator==(const LeaseText&, const LeaseText&) = default;
};

std::string to_text(const LeaseText& lease) {
  return fmt::format("echoline-lease 1\nholder {}\nrenewals {}\nended {}\n", lease.holder, lease.renewals,
                     lease.ended ? 1 : 0);
}

Result<LeaseText> read_lease(std::string_view text, std::string_view what) {
  LineReader lines(text, what);
  LeaseText lease;
  ECHO_ASSIGN(const std::uint64_t format, lines.number("echoline-lease"));
  ECHO_ASSIGN(lease.holder, lines.hex("holder", kHolderDigits));
  ECHO_ASSIGN(lease.renewals, lines.number("renewals"));
  ECHO_ASSIGN(const std::uint64_t ended, lines.number("ended"));
  if (format != 1 || ended > 1 || !lines.at_end()) return lines.corrupt("the end of a lease of format 1");
  lease.ended = ended == 1;
  return lease;
}

Result<LeaseText> load(ObjectStore& store, std::uint64_t term) {
  const std::string key = lease_key(term);
  ECHO_ASSIGN(const std::string text, store.read(key, kLeaseBytesMax));
  return read_lease(text, key);
}

// Lets the lease of another holder run out; kUnavailable if it is renewed meanwhile.
Status watch(ObjectStore& store, std::uint64_t term, const LeaseText& seen, Duration length, const Clock& clock,
             const Waiter& wait) {
  const TimePoint began_at = clock.now();
  while (clock.now() - began_at < length) {
    ECHO_TRY(wait(std::min(kLook, length)));
    ECHO_ASSIGN(const LeaseText now, load(store, term));
    if (now.ended) return ok();
    if (now != seen)
      return fail(Code::kUnavailable, kOperation,
                  "another learner publishes to this prefix (holder {}, term {}): end it, or choose another prefix",
                  now.holder, term);
  }
  return ok();
}

}  // namespace

Result<std::unique_ptr<PrefixLease>> PrefixLease::acquire(ObjectStore& store, LeaseOptions options, const Clock& clock,
                                                          const Waiter& wait) {
  ECHO_CHECK(is_hex(options.holder, kHolderDigits), "holder '{}'", options.holder);
  std::uint64_t term = 0;  // the newest known term
  std::vector<std::uint64_t> terms;
  ECHO_ASSIGN(const std::vector<ObjectInfo> objects, store.list("lease/"));
  for (const ObjectInfo& object : objects)
    if (const auto found = parse_lease_key(object.key)) {
      terms.push_back(*found);
      term = std::max(term, *found);
    }
  for (int tries = 0; tries < kAcquireTriesMax; ++tries) {
    // The list may be old: later terms are looked for one by one.
    std::optional<LeaseText> newest;
    for (std::uint64_t next = std::max<std::uint64_t>(term, 1);; ++next) {
      auto lease = load(store, next);
      if (!lease && lease.error().code == Code::kNotFound) break;
      if (!lease) return lease.error();
      newest = *lease;
      term = next;
    }
    if (newest && !newest->ended && newest->holder != options.holder)
      ECHO_TRY(watch(store, term, *newest, options.length, clock, wait));
    std::unique_ptr<PrefixLease> lease(new PrefixLease(store, options, clock, term + 1));
    lease->renewed_at_ = clock.now();
    const std::string text = to_text({.holder = options.holder});
    const std::string key = lease_key(lease->term_);
    if (const Status stored = store.put_if_absent(key, as_bytes(text)); !stored) {
      if (stored.error().code == Code::kStale) continue;  // another publisher was faster, or this request was repeated
      return stored.error();
    }
    // A service that ignores the condition would let two publishers hold one term.
    const Status again = store.put_if_absent(key, as_bytes(text));
    if (again || again.error().code != Code::kStale) {
      if (!again) return again.error();
      return fail(Code::kInvalid, kOperation,
                  "the service replaces objects although the request forbids it (If-None-Match: *): two learners could "
                  "publish at once; use a service with conditional writes");
    }
    for (const std::uint64_t old : terms)
      if (old + kTermsKept < lease->term_) ECHO_TRY(store.remove(lease_key(old)));
    return lease;
  }
  return fail(Code::kUnavailable, kOperation, "other learners take the lease of this prefix again and again");
}

Status PrefixLease::write(bool ended) {
  const std::string text = to_text({.holder = options_.holder, .renewals = renewals_, .ended = ended});
  return store_.put(lease_key(term_), as_bytes(text));
}

Status PrefixLease::renew() {
  const std::lock_guard lock(mutex_);
  const auto lost = [&] {
    lost_ = true;
    return fail(Code::kStale, kOperation, "another learner has taken over this prefix (after term {})", term_);
  };
  if (lost_) return lost();
  const TimePoint now = clock_.now();
  const auto later = load(store_, term_ + 1);
  if (later || later.error().code == Code::kCorrupt) return lost();
  if (later.error().code != Code::kNotFound) return later.error();
  ++renewals_;
  ECHO_TRY(write(/*ended=*/false));
  renewed_at_ = now;
  return ok();
}

Status PrefixLease::check() {
  {
    const std::lock_guard lock(mutex_);
    const Duration age = clock_.now() - renewed_at_;
    if (!lost_ && age < options_.length / kSafetyShare) return ok();
  }
  return renew();
}

Status PrefixLease::end() {
  const std::lock_guard lock(mutex_);
  if (lost_) return ok();
  lost_ = true;
  return write(/*ended=*/true);
}

}  // namespace echoline::store
