// Implements the seeded permutations and the message about unknown names.
#include "data_plane/adapters/adapter_config.hpp"

#include <algorithm>
#include <bit>

#include "base/random.hpp"
#include "base/suggest.hpp"

namespace echoline::data_plane {

std::string unknown_name(std::string_view name, std::span<const std::string> known) {
  constexpr std::size_t kUnknownNameBytesShown = 64;
  name = name.substr(0, kUnknownNameBytesShown);
  return fmt::format("'{}'{}; known: {}", name, did_you_mean(name, known), fmt::join(known, ", "));
}

std::uint64_t permuted(std::uint64_t index, std::uint64_t size, std::uint64_t key) {
  ECHO_CHECK(index < size, "index {} of {}", index, size);
  const auto index_bits = static_cast<std::uint64_t>(std::bit_width(size - 1));
  const std::uint64_t half_bits = std::max<std::uint64_t>(1, (index_bits + 1) / 2);  // rounded up
  const std::uint64_t mask = (std::uint64_t{1} << half_bits) - 1;
  constexpr std::uint64_t kFeistelRounds = 4;
  // A Feistel round mixes one half with a hash of the other and swaps them. That can be undone, so no two numbers of
  // 2 × half_bits bits get the same result. A result that is not below `size` is put through again.
  do {  // there are less than 4 × size such numbers (or 4), so the loop is short
    std::uint64_t left_half = index >> half_bits, right_half = index & mask;
    for (std::uint64_t round = 0; round < kFeistelRounds; ++round) {
      const std::uint64_t mixed = left_half ^ (mix64(mix64(key + round) ^ right_half) & mask);
      left_half = right_half;
      right_half = mixed;
    }
    index = (left_half << half_bits) | right_half;
  } while (index >= size);
  return index;
}

std::uint64_t shuffled_cycle(std::uint64_t index, std::uint64_t size, std::uint64_t key) {
  const std::uint64_t round = index / size + 1;  // from 1
  return permuted(index % size, size, mix64(key ^ mix64(round)));
}

}  // namespace echoline::data_plane
