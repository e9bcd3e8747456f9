#include "overlay/member/standing.hpp"

#include <algorithm>

namespace echoline::overlay {

void Standing::begin_epoch(std::uint64_t epoch) {
  epoch_ = epoch;
  for (const auto& [version, given] : std::exchange(given_, {})) void_.insert(version);
  position_.reset();
  installed_.reset();
  staged_.reset();
  repair_.reset();
  newest_.reset();
}

bool Standing::announced(Version version) {
  if (newest_ && version < *newest_) return false;
  newest_ = version;
  return true;
}

void Standing::published(std::optional<Version> newest) {
  newest_ = newest;
  if (repair_ && newest_) repair_ = std::min(*repair_, *newest_);
}

std::optional<Installed> Standing::installed(Version version, const Digest& policy_digest, TimePoint now) {
  if (void_.contains(version)) {  // it was given by an earlier epoch
    void_.erase(void_.begin(), void_.upper_bound(version));
    return std::nullopt;
  }
  const auto given = given_.find(version);
  const Given from = given == given_.end() ? Given{now, {}} : given->second;
  given_.erase(given_.begin(), given_.upper_bound(version));
  if (!has(version)) return std::nullopt;  // of what was taken back
  failures_ = 0;
  if (installed_ && version < installed_->version) return std::nullopt;  // a version never goes backwards
  installed_ = Installed{version, policy_digest, epoch_};
  return Installed{version, policy_digest, epoch_, from.verify, now - from.at};
}

Standing::Failure Standing::install_failed(Version version) {
  given_.clear();
  void_.clear();
  if (!has(version)) return Failure::kVoid;
  if (++failures_ >= kInstallFailuresMax) return Failure::kGiveUp;
  needs_repair(std::max(version, position_->version));
  staged_.reset();
  return Failure::kRepair;
}

void Standing::needs_repair(Version least) {
  repair_ = std::max(least, newest_.value_or(least));
  position_.reset();
}

// No version below the floor is activated: the worker has been farther.
Standing::Stage Standing::stage(PublicationStore& store, const std::optional<Installed>& floor, TimePoint now,
                                PublicationKey& foreign) {
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
      foreign = key;
      needs_repair(key.version);
      return Stage::kForeign;
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
    foreign = {at->version, {}};
    return Stage::kOtherThanFloor;
  }
  staged.deliveries.back().publication.activate = true;
  staged.last = *at;
  staged.before = std::exchange(position_, at);
  staged.at = now;
  staged_ = std::move(staged);
  return Stage::kStaged;
}

void Standing::unstage() {
  position_ = staged_->before;
  staged_.reset();
}

std::vector<act::Deliver> Standing::take_staged(TimePoint now) {
  for (const act::Deliver& delivery : staged_->deliveries)
    given_.insert_or_assign(delivery.publication.version, Given{now, now - staged_->at});
  auto deliveries = std::move(staged_->deliveries);
  staged_.reset();
  repair_.reset();
  return deliveries;
}

bool Standing::comes_next(const StoredPublication& stored) const {
  const PublicationKey key = stored.key();
  if (key.full()) return position_ ? key.version > position_->version : starts(key);
  return position_ && key.base == position_->version && stored.announcement.base_digest == position_->policy_digest;
}

std::optional<Version> Standing::leads_on_from(const PublicationKey& key, const PublicationStore& store) const {
  if (position_) {
    if (key.full()) return key.version;
    return key.base == position_->version ? std::optional(next_version()) : std::nullopt;
  }
  if (key.full()) return starts(key) ? std::optional(key.version) : std::nullopt;
  std::map<Version, Version> begins;  // of what can be reached with what is here: with which snapshot, the newest
  for (const auto& [each, stored] : store.entries()) {
    const auto before = each.base ? begins.find(*each.base) : begins.end();
    if (!stored.complete || (!starts(each) && before == begins.end())) continue;
    const Version from = starts(each) ? each.version : before->second;
    Version& begin = begins.try_emplace(each.version, from).first->second;
    begin = std::max(begin, from);
  }
  const auto begin = begins.find(*key.base);
  return begin == begins.end() ? std::nullopt : std::optional(begin->second);
}

void Standing::check() const {
  ECHO_CHECK(!installed_ || installed_->epoch == epoch_, "installed in epoch {}, now {}", installed_->epoch, epoch_);
  ECHO_CHECK(!position_ || position_->epoch == epoch_, "positioned in epoch {}, now {}", position_->epoch, epoch_);
  ECHO_CHECK(!staged_ || (position_ == staged_->last && !staged_->deliveries.empty()), "staged elsewhere");
  ECHO_CHECK(failures_ <= kInstallFailuresMax);
}

}  // namespace echoline::overlay
