// Publications that bring late workers to the newest version: a queue of wanted ones, made one at a time. No I/O and no
// clock.
#pragma once
#include <set>

#include "overlay/publication_store.hpp"

namespace echoline::overlay {

// Returns the bytes of the cheapest path from version `position` (absent: from nothing) to `target` or beyond; absent
// if there is no path. `bytes_of` lists the whole publications and their sizes. A full snapshot starts anywhere, a
// delta continues from its base. `full_only`: the path must be one full snapshot of `target` or newer.
std::optional<std::uint64_t> cheapest_path_bytes(const std::map<PublicationKey, std::uint64_t>& bytes_of,
                                                 std::optional<Version> position, Version target, bool full_only);

class CatchUps {
 public:
  static constexpr std::size_t kWantedMax = 8;

  // A worker needs a delta from version `from`, or a full snapshot if `from` is absent. Returns false if the queue is
  // full.
  bool enqueue(std::optional<Version> from);
  // The application has begun to make the requested publication.
  void on_begun(const PublicationId& id);
  // Returns the next publication to request from the application; absent while one is being made. Appends to `given_up`
  // the versions from which no delta will be made. A snapshot serves every worker, a delta the workers at its base.
  std::optional<PublicationKey> next(std::optional<Version> newest, const PublicationStore& store,
                                     std::vector<Version>& given_up);
  void check() const { ECHO_CHECK(wanted_.size() <= kWantedMax + 1); }  // the snapshot always has room

 private:
  enum class Phase : std::uint8_t { kIdle, kRequested, kBeingMade };  // of the one request to the application

  std::set<std::optional<Version>> wanted_;
  Phase phase_ = Phase::kIdle;
  PublicationKey requested_key_;   // not used in kIdle
  PublicationId id_being_made_{};  // only used in kBeingMade
};

}  // namespace echoline::overlay
