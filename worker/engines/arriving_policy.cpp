#include "worker/engines/arriving_policy.hpp"

#include <algorithm>
#include <utility>

namespace echoline::worker {
namespace {

constexpr std::string_view kOperation = "install policy";

Status add_to(auto& patch, std::span<const std::byte> bytes) {
  return std::visit([&](auto& incoming) { return incoming.add(bytes); }, patch);
}
std::uint64_t bytes_of(const auto& patch) {
  return std::visit([](const auto& incoming) { return incoming.bytes(); }, patch);
}

}  // namespace

ArrivingPolicy::Incoming ArrivingPolicy::begin(const overlay::PublicationId& id, bool snapshot) const {
  if (snapshot) return {id, delta::IncomingSnapshot(options_)};
  return {id, begin_delta_()};
}

void ArrivingPolicy::add(const overlay::PublicationPart& part, std::optional<Version> installed) {
  if (part.base && installed != part.base) return;
  if (part.offset == 0) incoming_.emplace(begin(part.id, !part.base));
  if (!incoming_ || incoming_->id != part.id || bytes_of(incoming_->patch) != part.offset) return;
  if (!add_to(incoming_->patch, part.bytes.bytes())) incoming_.reset();  // whole() will say what is wrong
}

Result<ArrivingPolicy::Incoming> ArrivingPolicy::whole(const overlay::Publication& publication) {
  std::optional<Incoming> incoming = std::exchange(incoming_, std::nullopt);
  const bool snapshot = !publication.base;
  if (!incoming || incoming->id != publication.id ||
      std::holds_alternative<delta::IncomingSnapshot>(incoming->patch) != snapshot)
    incoming.emplace(begin(publication.id, snapshot));
  std::uint64_t here = bytes_of(incoming->patch);  // of it: the rest follows
  ECHO_TRY(publication.payload.visit([&](std::span<const std::byte> piece) -> Status {
    const std::size_t known = std::min<std::uint64_t>(here, piece.size());
    here -= known;
    return known == piece.size() ? ok() : add_to(incoming->patch, piece.subspan(known));
  }));
  const auto result = std::visit([](const auto& patch) { return patch.result(); }, incoming->patch);
  if (result && result->bytes != publication.policy_digest)
    return fail(Code::kCorrupt, kOperation, "version {}: expected digest {}, found {}", publication.version,
                overlay::to_hex(publication.policy_digest), result->hex());
  return std::move(*incoming);
}

Result<delta::OwnedState> ArrivingPolicy::snapshot(const overlay::Publication& publication) {
  ECHO_ASSIGN(Incoming incoming, whole(publication));
  return std::get<delta::IncomingSnapshot>(incoming.patch).finish();
}

Result<std::vector<delta::TensorWrite>> ArrivingPolicy::apply_delta(const overlay::Publication& publication,
                                                                    std::optional<Version> installed) {
  if (installed != publication.base) {
    incoming_.reset();
    return fail(Code::kStale, kOperation, "version {} is a delta on version {}, but {} is installed",
                publication.version, *publication.base,
                installed ? fmt::format("version {}", *installed) : std::string("nothing"));
  }
  ECHO_ASSIGN(Incoming incoming, whole(publication));
  return std::get<delta::IncomingDelta>(incoming.patch).apply();
}

}  // namespace echoline::worker
