#include "worker/engines/builtin_installer.hpp"

#include "delta/patch.hpp"
#include "model/weights.hpp"

namespace echoline::worker {
namespace {

Status check_digest(delta::OwnedState& state, const overlay::Publication& publication) {
  const delta::Digest found = state.digest();
  if (found.bytes == publication.policy_digest) return ok();
  return fail(Code::kCorrupt, "install policy", "version {}: expected digest {}, found {}", publication.version,
              overlay::to_hex(publication.policy_digest), found.hex());
}

}  // namespace

Status Installer::install(const overlay::Publication& publication) {
  ECHO_ASSIGN(const overlay::Slice payload, publication.payload.bytes());
  const delta::DecodeOptions decode{.threads = threads_};
  if (!publication.base) {
    ECHO_ASSIGN(delta::OwnedState fresh, delta::decode_snapshot(payload.bytes(), decode));
    ECHO_TRY(check_digest(fresh, publication));
    ECHO_TRY(model::load_policy(*model_, fresh.view()));
    state_ = std::move(fresh);
  } else {
    if (version_ != publication.base)
      return fail(Code::kStale, "install policy", "version {} is a delta on version {}, but {} is installed",
                  publication.version, *publication.base,
                  version_ ? fmt::format("version {}", *version_) : std::string("nothing"));
    ECHO_ASSIGN(const auto written, delta::apply_delta_and_tell(payload.bytes(), state_, decode));
    // It has verified its own result digest; this ties it to the publication's.
    if (const Status same = check_digest(state_, publication); !same) {
      version_.reset();  // the state is a policy, but not the one that was announced: only a snapshot helps now
      return same;
    }
    if (const Status loaded = model::load_changes(*model_, state_.view(), written); !loaded) {
      version_.reset();  // it may hold some of the changes
      return loaded;
    }
  }
  version_ = publication.version;
  digest_ = publication.policy_digest;
  return ok();
}

}  // namespace echoline::worker
