#include "sim/world_state.hpp"

namespace echoline::sim {

Result<overlay::trust::PeerIdentity> Certificates::verify(const std::string& certificate, double now_unix_s,
                                                          CertificateDates dates) {
  if (certificate.empty()) return fail(Code::kInvalid, "handshake", "the peer has no certificate");
  const auto der = std::as_bytes(std::span(certificate));
  auto it = checked.find(certificate);
  if (it == checked.end()) {
    Checked first{.identity = overlay::trust::check_certificate(der, authority->key, authority->run_id,
                                                                /*now_unix_s=*/std::nullopt),
                  .valid_from_unix_s = 0};
    // No time is known to be valid yet, so the check below parses the certificate again.
    first.valid_from_unix_s = first.identity ? first.identity->expires_unix_s : 0;
    it = checked.emplace(certificate, std::move(first)).first;
  }
  Checked& known = it->second;
  if (!known.identity) return known.identity.error();
  if (dates == CertificateDates::kIgnored) return *known.identity;
  if (now_unix_s >= known.valid_from_unix_s && now_unix_s < known.identity->expires_unix_s) return *known.identity;
  ECHO_TRY(overlay::trust::check_certificate(der, authority->key, authority->run_id, now_unix_s));
  known.valid_from_unix_s = std::min(known.valid_from_unix_s, now_unix_s);
  return *known.identity;
}

std::uint64_t Partitions::start(const std::vector<HostId>& from, const std::vector<HostId>& to, bool one_way,
                                std::size_t host_count) {
  Partition partition{.number = next_number_++,
                      .from = std::vector<bool>(host_count),
                      .to = std::vector<bool>(host_count),
                      .one_way = one_way};
  for (const HostId host : from) partition.from[host.value] = true;
  for (const HostId host : to) partition.to[host.value] = true;
  partitions_.push_back(std::move(partition));
  return partitions_.back().number;
}

bool Partitions::separates(std::size_t from, std::size_t to) const {
  for (const Partition& partition : partitions_) {
    // A host that was added after the partition is in neither group.
    const auto contains = [](const std::vector<bool>& group, std::size_t host_index) {
      return host_index < group.size() && group[host_index];
    };
    if (contains(partition.from, from) && contains(partition.to, to)) return true;
    if (!partition.one_way && contains(partition.from, to) && contains(partition.to, from)) return true;
  }
  return false;
}

TimePoint RegionLinks::passed_at(const chains::Regions& regions, std::uint32_t from, std::uint32_t to,
                                 std::size_t bytes, TimePoint sent_at) {
  if (from != to) bytes_crossed += bytes;
  const double rate = regions.rate(from, to).bytes_per_s();
  if (!std::isfinite(rate)) return sent_at;
  TimePoint& link_free_at = free_at[{from, to}];
  link_free_at = std::max(link_free_at, sent_at) + from_seconds(static_cast<double>(bytes) / rate);
  return link_free_at;
}

}  // namespace echoline::sim
