// Reads policy versions from a store: which there are, the cheapest way to one, and its verified bytes.
#pragma once
#include <filesystem>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "store/retention.hpp"

namespace echoline::store {

// A version that a reader has, with the digest of its weights.
struct HeldVersion {
  VersionName name;
  delta::Digest digest;
  friend bool operator==(const HeldVersion&, const HeldVersion&) = default;
};

// Trusts only what the run's key has signed. Following the newest version makes no list, so old lists do not matter.
class PolicyReader {
 public:
  // `key`: the run's key, if the caller knows it; otherwise the key in the store is trusted. kNotFound: the prefix
  // holds no store. kInvalid: it is of another key. `store` must outlive the reader.
  static Result<std::unique_ptr<PolicyReader>> open(ObjectStore& store,
                                                    std::optional<overlay::trust::PublicKey> key = std::nullopt);
  const RunDescription& run() const { return run_; }

  // kNotFound: no version is published yet.
  Result<Latest> latest();
  // A version by its number, in the latest epoch that has it. kNotFound says which versions there are.
  Result<Manifest> find(Version version);
  // All complete snapshots and deltas, oldest first. Complete for the newest version's history, even if lists are old.
  Result<Contents> contents();
  Result<std::vector<StoredFile>> files();  // empty if the store has none
  Result<std::string> file(const StoredFile& file);

  // The cheapest way in bytes to `target`: a snapshot and the deltas after it, or only deltas if the first applies to
  // `held`. `avoided`: snapshots that are not used. `anchor`: a snapshot that is known to exist, such as
  // Latest::anchor. kNotFound: no way is left, for instance because `target` was removed meanwhile.
  Result<std::vector<Manifest>> path_to(const Manifest& target, const std::optional<HeldVersion>& held,
                                        const std::optional<Manifest>& anchor = std::nullopt,
                                        const std::set<VersionName>& avoided = {});
  // Appends what `path` lacks of the patch, then checks the whole file. A file that is wrong is removed: kCorrupt.
  Status download(const Manifest& manifest, const std::filesystem::path& path);

 private:
  PolicyReader(ObjectStore& store, RunDescription run) : store_(store), run_(std::move(run)), verifier_(run_.key) {}
  Result<Manifest> read(delta::PatchKind kind, const VersionName& name);
  Status add_history(const Manifest& newest, Contents& contents);

  ObjectStore& store_;
  const RunDescription run_;
  const overlay::trust::Verifier verifier_;
};

}  // namespace echoline::store
