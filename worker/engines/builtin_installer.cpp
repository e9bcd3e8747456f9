#include "worker/engines/builtin_installer.hpp"

#include <algorithm>
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

void Installer::arriving(const overlay::PublicationPart& part) {
  if (version_ != part.base) return;
  if (part.offset == 0) incoming_.emplace(Incoming{part.id, delta::IncomingDelta(state_, {.threads = threads_})});
  if (!incoming_ || incoming_->id != part.id || incoming_->delta.bytes() != part.offset) return;
  if (!incoming_->delta.add(part.bytes.bytes())) incoming_.reset();  // install() will say what is wrong
}

Status Installer::install(const overlay::Publication& publication) {
  std::optional<Incoming> incoming = std::exchange(incoming_, std::nullopt);
  const delta::DecodeOptions decode{.threads = threads_};
  if (!publication.base) {
    ECHO_ASSIGN(const overlay::Slice payload, publication.payload.bytes());
    ECHO_ASSIGN(delta::OwnedState fresh, delta::decode_snapshot(payload.bytes(), decode));
    ECHO_TRY(check_digest(fresh, publication));
    ECHO_TRY(model::load_policy(*model_, fresh.view()));
    state_ = std::move(fresh);
  } else {
    if (version_ != publication.base)
      return fail(Code::kStale, "install policy", "version {} is a delta on version {}, but {} is installed",
                  publication.version, *publication.base,
                  version_ ? fmt::format("version {}", *version_) : std::string("nothing"));
    if (!incoming || incoming->id != publication.id) incoming.emplace(Incoming{publication.id, delta::IncomingDelta(state_, decode)});
    std::uint64_t here = incoming->delta.bytes();  // of it: the rest follows
    ECHO_TRY(publication.payload.visit([&](std::span<const std::byte> piece) -> Status {
      const std::size_t known = std::min<std::uint64_t>(here, piece.size());
      here -= known;
      return known == piece.size() ? ok() : incoming->delta.add(piece.subspan(known));
    }));
    ECHO_ASSIGN(const auto written, incoming->delta.apply());
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
