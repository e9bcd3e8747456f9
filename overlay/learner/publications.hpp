// The versions of this run. A version is announced, then closing until its digest is on disk, then published. No I/O
// and no clock.
#pragma once
#include "overlay/learner/broadcast_times.hpp"
#include "overlay/state.hpp"
#include "overlay/wire/proof.hpp"

namespace echoline::overlay {

class Publications {
 public:
  static constexpr std::size_t kVersionsKept = 4096;

  // A version whose manifest waits for its digest to be on disk.
  struct Closing {
    Version version;
    Manifest manifest;
    SignedManifest as_signed;
  };

  // `state` must outlive this object, which changes the published versions there. `quorum`: see BroadcastTimes.
  Publications(LearnerState& state, double quorum) : published_(state.published), broadcasts_(quorum) {}

  bool has_announced() const { return announced_.has_value(); }  // in this process
  // The newest version, announced by this process or published.
  std::optional<Version> newest() const { return std::max(announced_, newest_published()); }
  // The newest published version; with `before`, the newest one below it.
  std::optional<Version> newest_published(std::optional<Version> before = {}) const;
  bool is_published(Version version) const { return published_.contains(version); }
  // Whether this version was published with this digest. True for versions older than all that are kept, because their
  // digests are not known any more.
  bool is_published(const Installed& installed) const;

  // kInvalid: versions do not grow, or the base was not published recently.
  Status check_next(const PublicationKey& key) const;
  void announce(Version version) { announced_ = version; }
  void abandon(const PublicationId& id);
  // Returns whether the version is new, so that its digest must be saved. kInvalid: published before with another
  // digest.
  Result<bool> close(const PublicationKey& key, const Manifest& manifest, const SignedManifest& as_signed);
  std::vector<Closing> take_closing() { return std::exchange(closing_, {}); }  // once the state is on disk

  BroadcastTimes& broadcasts() { return broadcasts_; }
  const BroadcastTimes& broadcasts() const { return broadcasts_; }
  void check() const;

 private:
  std::map<Version, Digest>& published_;  // LearnerState::published; includes the versions that are closing
  std::optional<Version> announced_;      // the newest one of this process
  std::vector<Closing> closing_;
  BroadcastTimes broadcasts_;
};

}  // namespace echoline::overlay
