// Parses keys that a list() returned. Keys of another form are not the store's and are ignored.
#include "store/keys.hpp"

#include <charconv>

namespace echoline::store {
namespace {

// A number of exactly `digits` decimal digits.
std::optional<std::uint64_t> parse_digits(std::string_view text, std::size_t digits) {
  if (text.size() != digits) return std::nullopt;
  std::uint64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return number;
}

constexpr std::size_t kEpochDigits = 8, kVersionDigits = 12;

}  // namespace

std::optional<VersionName> parse_version_name(std::string_view text) {
  if (text.size() != kEpochDigits + 1 + kVersionDigits || text[kEpochDigits] != '.') return std::nullopt;
  const auto epoch = parse_digits(text.substr(0, kEpochDigits), kEpochDigits);
  const auto version = parse_digits(text.substr(kEpochDigits + 1), kVersionDigits);
  if (!epoch || !version) return std::nullopt;
  return VersionName{.epoch = *epoch, .version = Version{*version}};
}

std::optional<PublicationKey> parse_publication_key(std::string_view key) {
  PublicationKey parsed;
  const std::size_t first = key.find('/'), second = key.find('/', first + 1);
  if (first == key.npos || second == key.npos) return std::nullopt;
  const std::string_view folder = key.substr(0, first);
  if (folder == "snapshots")
    parsed.kind = delta::PatchKind::kSnapshot;
  else if (folder != "deltas")
    return std::nullopt;
  const auto name = parse_version_name(key.substr(first + 1, second - first - 1));
  if (!name) return std::nullopt;
  parsed.name = *name;
  parsed.file = key.substr(second + 1);
  return parsed;
}

std::optional<std::uint64_t> parse_lease_key(std::string_view key) {
  constexpr std::string_view kFolder = "lease/";
  if (!key.starts_with(kFolder)) return std::nullopt;
  return parse_digits(key.substr(kFolder.size()), kVersionDigits);
}

}  // namespace echoline::store
