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
  repair_.reset();
  newest_.reset();
}

bool InstallState::on_announced(Version version) {
  if (newest_ && version < *newest_) return false;
  newest_ = version;
  return true;
}

void InstallState::on_published(std::optional<Version> newest) {
  newest_ = newest;
  if (repair_ && newest_) repair_ = std::min(*repair_, *newest_);
}

std::optional<Installed> InstallState::on_installed(Version version, const Digest& policy_digest, TimePoint now) {
  if (void_deliveries_.contains(version)) {  // it was delivered by an earlier epoch
    void_deliveries_.erase(void_deliveries_.begin(), void_deliveries_.upper_bound(version));
    return std::nullopt;
  }
  const auto delivered = delivered_.find(version);
  const Delivered from = delivered == delivered_.end() ? Delivered{now, {}} : delivered->second;
  delivered_.erase(delivered_.begin(), delivered_.upper_bound(version));
  if (!has_reached(version)) return std::nullopt;  // withdrawn meanwhile
  failures_ = 0;
  if (installed_ && version < installed_->version) return std::nullopt;  // a version never goes backwards
  installed_ = Installed{version, policy_digest, epoch_};
  return Installed{version, policy_digest, epoch_, from.verify, now - from.at};
}

InstallState::Failure InstallState::on_install_failed(Version version) {
  delivered_.clear();
  void_deliveries_.clear();
  if (!has_reached(version)) return Failure::kVoid;
  if (++failures_ >= kInstallFailuresMax) return Failure::kGiveUp;
  require_repair(std::max(version, position_->version));
  staged_.reset();
  return Failure::kRepair;
}

void InstallState::require_repair(Version least) {
  repair_ = std::max(least, newest_.value_or(least));
  position_.reset();
}

// No version below the floor is staged, because the worker has been past it.
InstallState::Stage InstallState::stage(PublicationStore& store, const std::optional<Installed>& floor, TimePoint now,
                                        PublicationKey& mismatched) {
  Staged staged;
  std::optional<Installed> at = position_;
  for (;;) {
    const StoredPublication* next = nullptr;
    for (const auto& [key, stored] : std::as_const(store).entries()) {
      if (!stored.complete || (at && key.version <= at->version)) continue;
      if (!at && repair_ && key.version < *repair_) continue;
      if (key.full() || (at && key.base == at->version)) next = &stored;
    }
    if (!next) break;
    const PublicationKey key = next->key();
    if (key.base && next->announcement.base_digest != at->policy_digest) {
      mismatched = key;
      require_repair(key.version);
      return Stage::kBaseMismatch;
    }
    auto delivery = store.delivery(*store.find(key));
    if (!delivery) return Stage::kNothing;  // parts of it come from disk
    delivery->publication.activate = false;
    at = Installed{key.version, delivery->publication.policy_digest, epoch_};
    staged.deliveries.push_back(std::move(*delivery));
  }
  if (staged.deliveries.empty()) return Stage::kNothing;
  const bool same_epoch = floor && floor->epoch == epoch_;
  if (same_epoch && at->version < floor->version) return Stage::kNothing;
  if (same_epoch && at->version == floor->version && at->policy_digest != floor->policy_digest) {
    mismatched = {at->version, {}};
    return Stage::kFloorMismatch;
  }
  staged.deliveries.back().publication.activate = true;
  staged.last = *at;
  staged.position_before = std::exchange(position_, at);
  staged.staged_at = now;
  staged_ = std::move(staged);
  return Stage::kStaged;
}

void InstallState::unstage() {
  position_ = staged_->position_before;
  staged_.reset();
}

std::vector<act::Deliver> InstallState::take_staged(TimePoint now) {
  for (const act::Deliver& delivery : staged_->deliveries)
    delivered_.insert_or_assign(delivery.publication.version, Delivered{now, now - staged_->staged_at});
  auto deliveries = std::move(staged_->deliveries);
  staged_.reset();
  repair_.reset();
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
  std::map<Version, Version> begins;  // by version that stored publications can restore: the newest snapshot for it
  for (const auto& [each, stored] : store.entries()) {
    const auto before = each.base ? begins.find(*each.base) : begins.end();
    if (!stored.complete || (!can_start_with(each) && before == begins.end())) continue;
    const Version from = can_start_with(each) ? each.version : before->second;
    Version& begin = begins.try_emplace(each.version, from).first->second;
    begin = std::max(begin, from);
  }
  const auto begin = begins.find(*key.base);
  return begin == begins.end() ? std::nullopt : std::optional(begin->second);
}

void InstallState::check() const {
  ECHO_CHECK(!installed_ || installed_->epoch == epoch_, "installed in epoch {}, now {}", installed_->epoch, epoch_);
  ECHO_CHECK(!position_ || position_->epoch == epoch_, "positioned in epoch {}, now {}", position_->epoch, epoch_);
  ECHO_CHECK(!staged_ || (position_ == staged_->last && !staged_->deliveries.empty()), "staged elsewhere");
  ECHO_CHECK(failures_ <= kInstallFailuresMax);
}

}  // namespace echoline::overlay
