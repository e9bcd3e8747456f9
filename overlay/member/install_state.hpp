// The progress of a worker's installations. No I/O and no clock.
//
// The floor is a version in the state file: after a restart, the worker activates no older one. So a publication is
// first staged; it is delivered to the application once its version is the floor on disk. The position is the version
// staged or delivered last. It grows until the learner withdraws versions, which begins a new epoch, or until an
// installation fails. After a failure the worker needs a repair: a full snapshot.
#pragma once
#include <map>
#include <optional>
#include <set>
#include <vector>

#include "overlay/publication_store.hpp"

namespace echoline::overlay {

class InstallState {
 public:
  static constexpr int kInstallFailuresMax = 3;  // in a row, before the worker gives up

  // Publications that go to the application together, once the version of the last one is the floor on disk.
  struct Staged {
    std::vector<act::DeliverPublication> deliveries;
    Installed last;
    std::optional<Installed> position_before;  // the position to return to if they are unstaged
    TimePoint staged_at;
    Version first() const { return deliveries.front().publication.version; }
  };

  explicit InstallState(std::uint64_t epoch) : epoch_(epoch) {}

  // Starts again without a version: publications of older epochs are void.
  void begin_epoch(std::uint64_t epoch);
  // A publication was announced. Returns whether no newer version is known.
  bool on_announced(Version version);
  // The learner reports the newest published version; absent: none.
  void on_published(std::optional<Version> newest);

  // Answers of the application, in order. on_installed() returns what to acknowledge, if anything.
  std::optional<Installed> on_installed(Version version, const Digest& policy_digest, TimePoint now);
  enum class Failure : std::uint8_t {
    kVoid,    // the version was withdrawn meanwhile
    kRepair,  // a snapshot of at least repair_version_min() is needed
    kGiveUp,  // kInstallFailuresMax in a row
  };
  Failure on_install_failed(Version version);

  // Stages all publications that can be installed now: the newest full snapshot beyond the position, then deltas on it.
  // `mismatched` receives a key for kBaseMismatch and kFloorMismatch.
  enum class Stage : std::uint8_t {
    kNothing,  // nothing can be installed yet: chunks must first be read from disk, or the version would be below the
               // floor
    kStaged,
    kBaseMismatch,   // the delta's base has another digest than the version here: a repair is needed
    kFloorMismatch,  // the version equals the floor's, but its digest differs
  };
  Stage stage(PublicationStore& store, const std::optional<Installed>& floor, TimePoint now,
              PublicationKey& mismatched);
  // The staged publications cannot be activated after all.
  void unstage();
  // Returns the staged publications, which the caller delivers to the application now.
  std::vector<act::DeliverPublication> take_staged(TimePoint now);

  // Whether this publication can be installed next: a delta on the position, or a newer full snapshot.
  bool is_next(const StoredPublication& stored) const;
  // Returns the oldest version whose publication is needed to install this one. Absent if this one cannot be installed:
  // it is a delta on neither the worker's version nor one that stored publications lead to.
  std::optional<Version> oldest_needed_for(const PublicationKey& key, const PublicationStore& store) const;
  // The oldest version whose publication is still needed, if those from `from` on are. Staged ones always are.
  Version oldest_needed(Version from) const { return staged_ ? std::min(from, staged_->first()) : from; }
  Version next_version() const { return {position_ ? position_->version.value + 1 : 0}; }

  std::uint64_t epoch() const { return epoch_; }
  const std::optional<Version>& newest() const { return newest_published_; }
  const std::optional<Installed>& position() const { return position_; }  // the version staged last
  // The version that the application installed last.
  const std::optional<Installed>& installed() const { return installed_; }
  // Absent: no repair is needed.
  const std::optional<Version>& repair_version_min() const { return repair_version_min_; }
  const std::optional<Staged>& staged() const { return staged_; }
  int install_failures() const { return failures_in_a_row_; }
  bool has_reached(Version version) const { return position_ && position_->version >= version; }
  std::optional<Version> position_version() const {
    return position_ ? std::optional(position_->version) : std::nullopt;
  }
  bool is_behind() const { return newest_published_ && !has_reached(*newest_published_); }
  void check() const;

 private:
  bool can_start_with(const PublicationKey& key) const {
    return key.full() && (!repair_version_min_ || key.version >= *repair_version_min_);
  }
  void require_repair(Version version_min);

  struct Delivered {
    TimePoint delivered_at;
    Duration verify;  // from its last byte until `delivered_at`
  };
  std::uint64_t epoch_;  // of the learner
  std::optional<Version> newest_published_, repair_version_min_;
  std::optional<Installed> position_, installed_;
  std::optional<Staged> staged_;
  std::map<Version, Delivered> delivered_;  // to the application and not yet installed, of this epoch
  std::set<Version> void_deliveries_;       // likewise, of earlier epochs
  int failures_in_a_row_ = 0;               // of installations
};

}  // namespace echoline::overlay
