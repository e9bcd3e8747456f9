#include "sim/fleet_state.hpp"

#include <utility>

#include "overlay/trainer_node.hpp"

namespace echoline::sim {

using namespace overlay;

std::string WorkerOptions::name(std::size_t index) const {
  return fmt::format("{}simulated-{}", is_node ? kTrainerNodePrefix : "", index);
}

void WorkerTable::check() const {
  ECHO_CHECK(by_host_.size() == workers_.size());
  for (std::size_t i = 0; i < workers_.size(); ++i)
    ECHO_CHECK(on_host(workers_[i].host) == i && (!workers_[i].state || with_id(workers_[i].id()) == i), "worker {}",
               i);
}

void PublishedPolicies::restore(std::map<Version, Digest> published, std::uint64_t versions_lost) {
  digests_ = std::move(published);
  for (; versions_lost > 0 && digests_.size() > 1; --versions_lost) digests_.erase(std::prev(digests_.end()));
}

void PublishedPolicies::finish(Version version, const Digest& digest, std::uint64_t bytes, std::size_t recent_max) {
  is_publishing_ = false;
  digests_[version] = digest;
  recent_.emplace_back(version, bytes);
  if (recent_.size() > recent_max) recent_.pop_front();
}

std::uint64_t PublishedPolicies::bytes_between(Version from, Version to) const {
  std::uint64_t sum = 0;
  for (const auto& [version, bytes] : recent_)
    if (version > from && version <= to) sum += bytes;
  return sum;
}

void PublishedPolicies::check() const {
  for (std::size_t i = 0; i < recent_.size(); ++i)
    ECHO_CHECK(find(recent_[i].first) && (i == 0 || recent_[i - 1].first < recent_[i].first), "version {}",
               recent_[i].first);
  ECHO_CHECK(recent_.empty() || recent_.back().first == newest());
}

RunIdentities::RunIdentities(const std::string& run_id, const trust::SigningKey& key, const PublishedContent& content) {
  auto authority = trust::Authority::create(run_id, key);
  ECHO_CHECK(authority.has_value());
  authority_ = std::make_shared<const trust::Authority>(std::move(*authority));
  checker_ = std::make_shared<const CachingChecker>(run_id, key, content);
}

std::vector<std::byte> RunIdentities::certificate(WorkerId id, const trust::SigningKey& key, double now_unix_s,
                                                  Duration lifetime) const {
  auto certificate = authority_->issue({.subject = key.public_key(),
                                        .kind = trust::PeerIdentity::Kind::kWorker,
                                        .worker = id,
                                        .serial = id.value,
                                        .now_unix_s = now_unix_s,
                                        .lifetime = lifetime});
  ECHO_CHECK(certificate.has_value(), "{}", certificate ? "" : certificate.error().message());
  return *std::move(certificate);
}

}  // namespace echoline::sim
