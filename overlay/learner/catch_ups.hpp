// Publications that bring late workers to the newest version: a queue of wanted ones, made one at a time. No I/O and no
// clock.
#pragma once
#include <set>

#include "overlay/publication_store.hpp"

namespace echoline::overlay {

// Bytes of the cheapest way from `position` (absent: from nothing) to `target` or beyond, over whole publications of
// the given sizes: a full snapshot starts anywhere, a delta continues from its base. `full_only`: by one full snapshot
// of `target` or newer. Absent: there is no way.
std::optional<std::uint64_t> cheapest_path_bytes(const std::map<PublicationKey, std::uint64_t>& bytes_of,
                                                 std::optional<Version> position, Version target, bool full_only);

class CatchUps {
 public:
  static constexpr std::size_t kWantedMax = 8;

  // A worker needs a delta from `from`, or (absent) a full snapshot. Returns false if the queue is full.
  bool want(std::optional<Version> from);
  // The application has begun to make the requested publication.
  void begun(const PublicationId& id);
  // Returns the next publication to request from the application, absent while one is being made. Appends the versions
  // from which no delta will be made to `given_up`. A snapshot serves every worker, a delta those at its base.
  std::optional<PublicationKey> next(std::optional<Version> newest, const PublicationStore& store,
                                     std::vector<Version>& given_up);
  void check() const { ECHO_CHECK(wanted_.size() <= kWantedMax + 1); }

 private:
  enum class Phase : std::uint8_t { kIdle, kAsked, kBegun };

  std::set<std::optional<Version>> wanted_;
  Phase phase_ = Phase::kIdle;
  PublicationKey asked_;  // unless kIdle
  PublicationId id_{};    // in kBegun
};

}  // namespace echoline::overlay
