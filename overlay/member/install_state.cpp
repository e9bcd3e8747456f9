// Decides which publications a worker installs next. Called by MemberCore.
#include "overlay/member/install_state.hpp"

#include <algorithm>

namespace echoline::overlay {

void InstallState::begin_epoch(std::uint64_t epoch) {
  epoch_ = epoch;
  for (const auto& [version, delivered] : std::exchange(delivered_, {})) void_deliveries_.insert(version);
  position_.reset();
  installed_.reset();
  staged_.reset();
  repair_version_min_.reset();
  newest_published_.reset();
}

bool InstallState::on_announced(Version version) {
  if (newest_published_ && version < *newest_published_) return false;
  newest_published_ = version;
  return true;
}

void InstallState::on_published(std::optional<Version> newest) {
  newest_published_ = newest;
  if (repair_version_min_ && newest_published_)
    repair_version_min_ = std::min(*repair_version_min_, *newest_published_);
}

std::optional<Installed> InstallState::on_installed(Version version, const Digest& policy_digest, TimePoint now) {
  if (void_deliveries_.contains(version)) {  // it was delivered by an earlier epoch
    void_deliveries_.erase(void_deliveries_.begin(), void_deliveries_.upper_bound(version));
    return std::nullopt;
  }
  const auto delivered = delivered_.find(version);
  const Delivered times =
      delivered == delivered_.end() ? Delivered{.delivered_at = now, .verify = {}} : delivered->second;
  delivered_.erase(delivered_.begin(), delivered_.upper_bound(version));
  if (!has_reached(version)) return std::nullopt;  // withdrawn meanwhile
  failures_in_a_row_ = 0;
  if (installed_ && version < installed_->version) return std::nullopt;  // a version never goes backwards
  installed_ = Installed{version, policy_digest, epoch_};
  return Installed{.version = version,
                   .policy_digest = policy_digest,
                   .epoch = epoch_,
                   .verify = times.verify,
                   .install = now - times.delivered_at};
}

InstallState::Failure InstallState::on_install_failed(Version version) {
  delivered_.clear();  // the application drops all that it was given, without further answers
  void_deliveries_.clear();
  if (!has_reached(version)) return Failure::kVoid;
  if (++failures_in_a_row_ >= kInstallFailuresMax) return Failure::kGiveUp;
  require_repair(std::max(version, position_->version));
  staged_.reset();
  return Failure::kRepair;
}

void InstallState::require_repair(Version version_min) {
  repair_version_min_ = std::max(version_min, newest_published_.value_or(version_min));
  position_.reset();
}

// No version below the floor is staged, because the worker has been past it.
InstallState::Stage InstallState::stage(PublicationStore& store, const std::optional<Installed>& floor, TimePoint now,
                                        PublicationKey& mismatched) {
  Staged staged;
  std::optional<Installed> reached = position_;  // after the publications staged so far
  for (;;) {
    const StoredPublication* next = nullptr;
    for (const auto& [key, stored] : std::as_const(store).entries()) {
      if (!stored.complete || (reached && key.version <= reached->version)) continue;
      if (!reached && repair_version_min_ && key.version < *repair_version_min_) continue;
      if (key.full() || (reached && key.base == reached->version)) next = &stored;  // the newest: versions ascend
    }
    if (!next) break;
    const PublicationKey key = next->key();
    if (key.base && next->announcement.base_digest != reached->policy_digest) {
      mismatched = key;
      require_repair(key.version);
      return Stage::kBaseMismatch;
    }
    auto delivery = store.delivery(*store.find(key));
    if (!delivery) return Stage::kNothing;   // some of its chunks are being read from disk
    delivery->publication.activate = false;  // only the last one is activated, below
    reached = Installed{key.version, delivery->publication.policy_digest, epoch_};
    staged.deliveries.push_back(std::move(*delivery));
  }
  if (staged.deliveries.empty()) return Stage::kNothing;
  // A floor of an earlier epoch is void.
  const bool floor_is_of_epoch = floor && floor->epoch == epoch_;
  if (floor_is_of_epoch && reached->version < floor->version) return Stage::kNothing;
  if (floor_is_of_epoch && reached->version == floor->version && reached->policy_digest != floor->policy_digest) {
    mismatched = {.version = reached->version, .base = {}};
    return Stage::kFloorMismatch;
  }
  staged.deliveries.back().publication.activate = true;
  staged.last = *reached;
  staged.position_before = std::exchange(position_, reached);
  staged.staged_at = now;
  staged_ = std::move(staged);
  return Stage::kStaged;
}

void InstallState::unstage() {
  position_ = staged_->position_before;
  staged_.reset();
}

std::vector<act::DeliverPublication> InstallState::take_staged(TimePoint now) {
  for (const act::DeliverPublication& delivery : staged_->deliveries)
    delivered_.insert_or_assign(delivery.publication.version,
                                Delivered{.delivered_at = now, .verify = now - staged_->staged_at});
  auto deliveries = std::move(staged_->deliveries);
  staged_.reset();
  repair_version_min_.reset();
  return deliveries;
}

bool InstallState::is_next(const StoredPublication& stored) const {
  const PublicationKey key = stored.key();
  if (key.full()) return position_ ? key.version > position_->version : can_start_with(key);
  return position_ && key.base == position_->version && stored.announcement.base_digest == position_->policy_digest;
}

std::optional<Version> InstallState::oldest_needed_for(const PublicationKey& key, const PublicationStore& store) const {
  if (position_) {
    if (key.full()) return key.version;
    return key.base == position_->version ? std::optional(next_version()) : std::nullopt;
  }
  if (key.full()) return can_start_with(key) ? std::optional(key.version) : std::nullopt;
  // For each version that stored publications lead to: the newest snapshot from which they do.
  std::map<Version, Version> snapshot_for;
  for (const auto& [stored_key, stored] : store.entries()) {
    const auto base = stored_key.base ? snapshot_for.find(*stored_key.base) : snapshot_for.end();
    if (!stored.complete || (!can_start_with(stored_key) && base == snapshot_for.end())) continue;
    const Version snapshot = can_start_with(stored_key) ? stored_key.version : base->second;
    Version& newest_snapshot = snapshot_for.try_emplace(stored_key.version, snapshot).first->second;
    newest_snapshot = std::max(newest_snapshot, snapshot);
  }
  const auto snapshot = snapshot_for.find(*key.base);
  return snapshot == snapshot_for.end() ? std::nullopt : std::optional(snapshot->second);
}

void InstallState::check() const {
  ECHO_CHECK(!installed_ || installed_->epoch == epoch_, "installed in epoch {}, now {}", installed_->epoch, epoch_);
  ECHO_CHECK(!position_ || position_->epoch == epoch_, "positioned in epoch {}, now {}", position_->epoch, epoch_);
  ECHO_CHECK(!staged_ || (position_ == staged_->last && !staged_->deliveries.empty()), "staged elsewhere");
  ECHO_CHECK(failures_in_a_row_ <= kInstallFailuresMax);
}

}  // namespace echoline::overlay
