// The policies that workers may generate with, for the rollout desk: their digests, the version that each worker last
// asked with, and unusable versions. Private to learner/.
#pragma once
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/ids.hpp"

namespace echoline::learner {

// A policy that workers cannot generate with, because its log-probabilities are not finite. It gets no further leases.
struct PolicyUnusable {
  Version version;
  std::vector<WorkerId> workers;  // workers that reported it
  std::string detail;
};

// Pure.
class OfferedPolicies {
 public:
  // Number of workers that must report a version as unusable, if at least as many ask for work.
  static constexpr std::size_t kBlamesNeeded = 2;

  // `unusable` is called once per version.
  OfferedPolicies(std::uint32_t staleness_budget, std::function<void(const PolicyUnusable&)> unusable)
      : staleness_budget_(staleness_budget), unusable_(std::move(unusable)) {}

  // Workers may have the version from now on; leases may be granted for it once it is published. Drops versions too old
  // for the staleness budget.
  void publishing(Version version);
  void published(Version version, std::string digest);
  std::optional<Version> newest() const { return newest_; }  // that workers may have
  // The newest that leases may be granted for. At least one must be published.
  Version newest_published() const;
  // Null for a version that no lease may name.
  const std::string* digest_of(Version version) const;

  void asked(WorkerId worker, Version version) { asking_[worker] = version; }
  void left(WorkerId worker) { asking_.erase(worker); }
  const std::map<WorkerId, Version>& asking() const {
    return asking_;
  }  // workers, and the version of the latest request

  // The worker cannot generate with the version that it last asked with. Returns that version; absent if it has not
  // asked.
  struct Blamed {
    Version version;
    bool first = false;  // the worker's first report on this version
  };
  std::optional<Blamed> blame(WorkerId worker, const std::string& detail);
  bool is_unusable(Version version);
  bool is_kept_from(WorkerId worker, Version version);  // unusable, or blamed by this worker
  std::string detail_of(Version version) const;         // of the latest blame

  void check() const;  // aborts if its parts disagree

 private:
  struct Blame {
    std::set<WorkerId> workers;
    std::string detail;
    bool told = false;
  };
  const std::uint32_t staleness_budget_;
  const std::function<void(const PolicyUnusable&)> unusable_;
  std::optional<Version> newest_;
  std::map<Version, std::string> digests_;  // of published versions
  std::map<WorkerId, Version> asking_;
  std::map<Version, Blame> blamed_;
};

}  // namespace echoline::learner
