// Publishes policy versions to a store.
#pragma once
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "base/clock.hpp"
#include "store/lease.hpp"
#include "store/retention.hpp"

namespace echoline::store {

// The operation of the errors of publish() that concern the publication itself.
inline constexpr std::string_view kPublishOperation = "publish to the store";

struct WriterOptions {
  std::string run_id;
  std::string holder;  // of the lease; the same for each start of a run
  StoreSettings settings;
  Version resumed_at;  // the run goes on from this version; stored later versions are void
};

// A publication is stored in five requests: the patch, its manifest, its ready marker, `latest`, and, now and then, the
// lease. A crash between any two leaves a store from which readers get the version before or this one. The manifest is
// stored only if its version has none, so of two publishers that both believe to hold the lease one fails.
//
// One thread, except for lease().
class PolicyWriter {
 public:
  // Takes the lease, reads what the prefix holds, and completes a publication that was interrupted after its manifest.
  // kInvalid: the prefix belongs to another run. Other errors as those of PrefixLease and ObjectStore. All references
  // must outlive the writer.
  static Result<std::unique_ptr<PolicyWriter>> open(ObjectStore& store, const overlay::trust::SigningKey& key,
                                                    WriterOptions options, const Clock& clock, const Waiter& wait);
  // Stores a snapshot or a delta. Ok if it is stored already. kNotFound: the store does not have the delta's base as
  // its newest version, so the next publication must be a snapshot. kStale: another publisher has the lease, or has
  // stored this version. kCorrupt, kInvalid: not a patch.
  Status publish(Version version, std::optional<Version> base, std::span<const std::byte> patch);
  // Stores the files of the model's directory that are not weights, by name.
  Status publish_files(const std::map<std::string, std::string>& files);
  // Whether a snapshot of the newest version should follow.
  bool wants_anchor() const;
  // Removes what the rules of retention do not keep. Each publish() calls it.
  Status prune();
  // Removes patches without a ready marker that earlier terms have left. open() calls it.
  Status remove_leftovers();

  std::optional<Version> newest() const { return newest_ ? std::optional(newest_->name.version) : std::nullopt; }
  std::uint64_t epoch() const { return epoch_; }
  const Contents& contents() const { return contents_; }
  PrefixLease& lease() { return *lease_; }

 private:
  PolicyWriter(ObjectStore& store, const overlay::trust::SigningKey& key, WriterOptions options, const Clock& clock)
      : store_(store), key_(key), verifier_(key.public_key()), options_(std::move(options)), clock_(clock) {}
  Status claim_prefix();
  Status read_contents();
  Status read_publication(const Contents::key_type& version);
  Status read_chain(const Manifest& newest);
  Status store_manifest(const Manifest& manifest);
  Status complete(const Manifest& manifest);
  Status write_latest();
  Result<bool> adopt(const Manifest& found, const Manifest& wanted);
  Result<bool> has_whole_patch(const Manifest& manifest);
  Result<bool> is_marked_ready(const Manifest& manifest);
  std::optional<Manifest> find_anchor(const Manifest& of) const;

  ObjectStore& store_;
  const overlay::trust::SigningKey key_;
  const overlay::trust::Verifier verifier_;
  const WriterOptions options_;
  const Clock& clock_;
  std::unique_ptr<PrefixLease> lease_;
  std::uint64_t epoch_ = 0;
  Contents contents_;
  bool is_latest_due_ = false;      // an attempt to write `latest` failed
  std::optional<Manifest> newest_;  // the newest version's delta, or its snapshot if it has no delta
};

}  // namespace echoline::store
