// Where a worker stands: the version it was given last, the one it has installed, the next ones to install, and a
// repair that it needs. It never goes back within an epoch. Knows neither the network nor the disk. Pure.
#pragma once
#include <map>
#include <optional>
#include <set>
#include <vector>

#include "overlay/publication_store.hpp"

namespace echoline::overlay {

class Standing {
 public:
  static constexpr int kInstallFailuresMax = 3;  // in a row, before the worker gives up

  // Goes to the application once its last version is the floor, on disk.
  struct Staged {
    std::vector<act::Deliver> deliveries;
    Installed last;
    std::optional<Installed> before;  // position
    TimePoint at;
    Version first() const { return deliveries.front().publication.version; }
  };

  explicit Standing(std::uint64_t epoch) : epoch_(epoch) {}

  // Everything of an older epoch is void.
  void begin_epoch(std::uint64_t epoch);
  // A publication was announced. Returns whether its version is as new as any.
  bool announced(Version version);
  // The newest published version, as the learner says; absent: none.
  void published(std::optional<Version> newest);

  // Answers of the application, in order. installed() returns what to acknowledge, if anything.
  std::optional<Installed> installed(Version version, const Digest& policy_digest, TimePoint now);
  enum class Failure : std::uint8_t {
    kVoid,    // it was taken back meanwhile
    kRepair,  // a snapshot of at least repair() is needed
    kGiveUp,  // kInstallFailuresMax in a row
  };
  Failure install_failed(Version version);

  // Stages everything in the store that can be installed now: the newest full snapshot ahead, then deltas from there.
  enum class Stage : std::uint8_t {
    kNothing,  // or not yet: what is needed comes from disk, or leads less far than the floor
    kStaged,
    kForeign,         // the delta `foreign` is for another version than the one here: a repair is needed
    kOtherThanFloor,  // the version of the floor, with another digest
  };
  Stage stage(PublicationStore& store, const std::optional<Installed>& floor, TimePoint now, PublicationKey& foreign);
  // The staged publications cannot be activated after all.
  void unstage();
  // It is activated.
  std::vector<act::Deliver> take_staged(TimePoint now);

  // Whether this publication is the next one to install: a delta from here, or a snapshot ahead.
  bool comes_next(const StoredPublication& stored) const;
  // Whether it starts from where this worker stands, or will stand when it is as far again as it has been: then, the
  // least version that is still needed for it.
  std::optional<Version> leads_on_from(const PublicationKey& key, const PublicationStore& store) const;
  // The least version that is still needed when `from` is; what is staged always is.
  Version keep_from(Version from) const { return staged_ ? std::min(from, staged_->first()) : from; }
  Version next_version() const { return {position_ ? position_->version.value + 1 : 0}; }

  std::uint64_t epoch() const { return epoch_; }
  const std::optional<Version>& newest() const { return newest_; }          // published
  const std::optional<Installed>& position() const { return position_; }    // last staged for the application
  const std::optional<Installed>& installed() const { return installed_; }  // by the application
  const std::optional<Version>& repair() const { return repair_; }  // the least version of the snapshot that repairs it
  const std::optional<Staged>& staged() const { return staged_; }
  int install_failures() const { return failures_; }
  bool has(Version version) const { return position_ && position_->version >= version; }
  std::optional<Version> version() const { return position_ ? std::optional(position_->version) : std::nullopt; }
  bool behind() const { return newest_ && !has(*newest_); }
  void check() const;

 private:
  bool starts(const PublicationKey& key) const { return key.full() && (!repair_ || key.version >= *repair_); }
  void needs_repair(Version least);

  struct Given {
    TimePoint at;
    Duration verify;  // before, since its last byte had come
  };
  std::uint64_t epoch_;  // of the learner
  std::optional<Version> newest_, repair_;
  std::optional<Installed> position_, installed_;
  std::optional<Staged> staged_;
  std::map<Version, Given> given_;  // to the application and not yet installed, of this epoch
  std::set<Version> void_;          // likewise, of earlier epochs
  int failures_ = 0;                // of installations in a row
};

}  // namespace echoline::overlay
