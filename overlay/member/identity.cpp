// Renews a worker's certificate and follows the learner's clock. Called by MemberCore and LearnerLink.
#include "overlay/member/identity.hpp"

#include "base/log.hpp"

namespace echoline::overlay {
namespace {

constexpr std::int64_t kSavedOffsetToleranceMs = 1000;

}  // namespace

void Identity::accept(std::vector<std::byte> certificate, TimePoint now) {
  const auto identity = read_certificate(certificate, /*unix_s=*/std::nullopt);  // its expiry is not checked
  if (!identity || identity->worker != config_.state.worker || identity->key != config_.key.public_key())
    return log::warn("worker {}: the renewed certificate is not for it", config_.state.worker);
  file_.state().certificate = std::move(certificate);
  use_certificate();
  plan_renewal(now);
  file_.save();
}

bool Identity::has_expired(TimePoint now) const {
  const auto identity = read_certificate(file_.state().certificate, static_cast<double>(learner_unix_ms(now)) / 1e3);
  return !identity && identity.error().code == Code::kStale;
}

bool Identity::take_renewal(TimePoint now) {
  if (now < renew_at_) return false;
  renew_at_ = now + kRenewRetry;
  return true;
}

void Identity::plan_renewal(TimePoint now) {
  const auto identity = read_certificate(file_.state().certificate, /*unix_s=*/std::nullopt);
  if (!identity) return;
  const double lifetime_left_s = identity->expires_unix_s - static_cast<double>(learner_unix_ms(now)) / 1e3;
  renew_at_ = now + from_seconds(std::max(0.0, lifetime_left_s / 2));
}

void Identity::set_clock(std::uint64_t unix_ms, TimePoint now) {
  clock_offset_ms_ = static_cast<std::int64_t>(unix_ms) - own_unix_ms(now);
  plan_renewal(now);
}

void Identity::save_clock() {
  if (std::abs(clock_offset_ms_ - file_.state().clock_offset_ms) <= kSavedOffsetToleranceMs) return;
  file_.state().clock_offset_ms = clock_offset_ms_;
  file_.save();
}

}  // namespace echoline::overlay
