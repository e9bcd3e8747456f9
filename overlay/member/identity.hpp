// A worker's certificate, and the time of the learner's clock, by which certificates, grants and announcements expire.
// No I/O: writes are requested through WorkerFile. Reads no clock: callers pass the time as `now`.
#pragma once
#include "overlay/member/member_config.hpp"
#include "overlay/member/worker_file.hpp"

namespace echoline::overlay {

// The message Return, by which a machine whose certificate has expired requests another: the signature proves
// possession of the key. "return 4" is part of the signed bytes, so that the signature is not valid for another
// message, nor for another version of Return.
inline Return certificate_request(const trust::SigningKey& key, const trust::PublicKey& run_key) {
  return {key.public_key(), key.sign("return 4", trust::fingerprint(run_key))};
}

class Identity {
 public:
  static constexpr Duration kRenewRetry = std::chrono::minutes(1);  // after a request without an answer

  // All three must outlive the identity.
  Identity(const MemberConfig& config, WorkerFile& file, std::vector<Action>& actions)
      : config_(config), file_(file), actions_(actions), clock_offset_ms_(file.state().clock_offset_ms) {}

  void use_certificate() {
    actions_.push_back(act::UseCertificate{file_.state().certificate, file_.state().authority});
  }
  // Uses and saves the certificate, if it is for this worker.
  void accept(std::vector<std::byte> certificate, TimePoint now);
  bool has_expired(TimePoint now) const;
  // Returns whether a renewal is due: once at half of the certificate's life, and again after kRenewRetry.
  bool take_renewal(TimePoint now);
  TimePoint renew_at() const { return renew_at_; }

  std::uint64_t learner_unix_ms(TimePoint now) const {
    return static_cast<std::uint64_t>(own_unix_ms(now) + clock_offset_ms_);
  }
  // The learner's clock shows `unix_ms` now.
  void set_clock(std::uint64_t unix_ms, TimePoint now);
  // Saves the clock offset if it differs by more than a second from the saved one, because each save is a disk write.
  void save_clock();
  Duration clock_offset() const { return std::chrono::milliseconds(clock_offset_ms_); }

 private:
  void plan_renewal(TimePoint now);
  std::int64_t own_unix_ms(TimePoint now) const {
    return static_cast<std::int64_t>((config_.core.unix_origin_s + seconds(now.time_since_epoch())) * 1e3);
  }
  Result<trust::PeerIdentity> read_certificate(const std::vector<std::byte>& certificate,
                                               std::optional<double> unix_s) const {
    return trust::check_certificate(certificate, config_.checker->run_key(), config_.state.run_id, unix_s);
  }

  const MemberConfig& config_;
  WorkerFile& file_;
  std::vector<Action>& actions_;
  std::int64_t clock_offset_ms_;  // the learner's clock minus this machine's
  TimePoint renew_at_ = kNever;
};

}  // namespace echoline::overlay
