// Decodes publications and loads them into the built-in engine's model. The engine calls it between two tokens.
#include "worker/engines/builtin_installer.hpp"

#include <utility>

#include "model/weights.hpp"

namespace echoline::worker {

void Installer::decode_part(const overlay::PublicationPart& part) { arriving_.add(part, version_); }

Status Installer::install(const overlay::Publication& publication) {
  if (!publication.base) {
    ECHO_ASSIGN(delta::OwnedState snapshot, arriving_.finish_snapshot(publication));
    ECHO_TRY(model::load_policy(*model_, snapshot.view()));  // after an error, the model is unchanged
    version_.reset();                                        // absent until the GPU has the policy, too
    if (on_device_) ECHO_TRY(on_device_->on_weights_replaced());
    state_ = std::move(snapshot);
  } else {
    ECHO_ASSIGN(const auto writes, arriving_.finish_delta(publication, version_));
    if (const Status loaded = load_changes(writes); !loaded) {
      version_.reset();  // the model may hold some of the changes: only a snapshot helps now
      return loaded;
    }
  }
  version_ = publication.version;
  digest_ = publication.policy_digest;
  return ok();
}

// Loads the changes into the model; state_ contains them already. On a GPU, verifies that its memory holds the same
// values as state_.
Status Installer::load_changes(std::span<const delta::TensorWrite> writes) {
  if (on_device_) return on_device_->apply(writes, state_.digest());
  return model::load_changes(*model_, state_.view(), writes);
}

}  // namespace echoline::worker
