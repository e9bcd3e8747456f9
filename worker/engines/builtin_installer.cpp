#include "worker/engines/builtin_installer.hpp"

#include <utility>

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

void Installer::arriving(const overlay::PublicationPart& part) { arriving_.add(part, version_, begin_); }

Status Installer::install(const overlay::Publication& publication) {
  if (!publication.base) {
    arriving_.forget();
    ECHO_ASSIGN(const overlay::Slice payload, publication.payload.bytes());
    ECHO_ASSIGN(delta::OwnedState fresh, delta::decode_snapshot(payload.bytes(), {.threads = threads_}));
    ECHO_TRY(check_digest(fresh, publication));
    ECHO_TRY(model::load_policy(*model_, fresh.view()));
    version_.reset();  // until the device knows it as well
    if (on_device_) ECHO_TRY(on_device_->loaded());
    state_ = std::move(fresh);
  } else {
    ECHO_ASSIGN(const auto written, arriving_.finish(publication, version_, begin_));
    if (const Status loaded = load_changes(written); !loaded) {
      version_.reset();  // it may hold some of the changes: only a snapshot helps now
      return loaded;
    }
  }
  version_ = publication.version;
  digest_ = publication.policy_digest;
  return ok();
}

// What state_ holds since `written`, into the model; a GPU proves that its memory then holds the same.
Status Installer::load_changes(std::span<const delta::TensorWrite> written) {
  if (on_device_) return on_device_->apply(written, state_.digest());
  return model::load_changes(*model_, state_.view(), written);
}

}  // namespace echoline::worker
