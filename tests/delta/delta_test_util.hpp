// Random states and small helpers shared by the delta tests.
#pragma once
#include <gtest/gtest.h>
#include <unistd.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "base/random.hpp"
#include "delta/digest.hpp"
#include "delta/patch.hpp"
#include "patch_frames.hpp"
#include "tests/delta/in_memory.hpp"

namespace echoline::delta::test {

inline TensorView spec(std::string name, DType dtype, std::vector<std::int64_t> shape) {
  return {std::move(name), dtype, std::move(shape), {}};
}

inline OwnedState zeros(const StateView& like) {
  auto state = OwnedState::empty_like(like);
  EXPECT_TRUE(state) << (state ? "" : state.error().message());
  for (std::size_t i = 0; i < state->size(); ++i) std::ranges::fill(state->mutable_bytes(i), std::byte{0});
  state->seal();
  return std::move(state).value();
}

inline OwnedState copy(const StateView& original) {
  auto state = copy_of(original);
  EXPECT_TRUE(state) << (state ? "" : state.error().message());
  return std::move(state).value();
}

inline void fill_random(OwnedState& state, Random& random) {
  for (std::size_t i = 0; i < state.size(); ++i)
    for (std::byte& b : state.mutable_bytes(i)) b = static_cast<std::byte>(random.next());
  state.seal();
}

// Like apply_delta(), but the patch arrives in parts of at most `part_bytes_max` bytes.
inline Status apply_in_parts(std::span<const std::byte> patch, OwnedState& state, std::size_t part_bytes_max,
                             Random& random, const DecodeOptions& options = {}) {
  IncomingDelta incoming(state, options);
  while (!patch.empty()) {
    const std::size_t part_bytes = std::min<std::size_t>(patch.size(), 1 + random.below(part_bytes_max));
    ECHO_TRY(incoming.add(patch.first(part_bytes)));
    patch = patch.subspan(part_bytes);
  }
  ECHO_TRY(incoming.apply());
  return ok();
}

// Flips a random bit of each element with probability `density`; returns the number of changed elements.
inline std::uint64_t flip_elements(OwnedState& state, double density, Random& random) {
  std::uint64_t changed = 0;
  const StateView view = state.view();
  for (std::size_t i = 0; i < state.size(); ++i) {
    const auto bytes = state.mutable_bytes(i);
    const std::size_t element_bytes = dtype_bytes(view[i].dtype);
    for (std::size_t e = 0; e < bytes.size() / element_bytes; ++e) {
      if (random.uniform() >= density) continue;
      const std::uint64_t bit = random.below(element_bytes * 8);
      bytes[e * element_bytes + bit / 8] ^= static_cast<std::byte>(1u << bit % 8);
      ++changed;
    }
  }
  state.seal();
  return changed;
}

// A state of one tensor `w` with weights of a trained layer, and the state after an optimiser step of about `step` on
// fp32 copies of the weights. `dtype`: kBF16, kF16, kF32 or kF64.
inline std::pair<OwnedState, OwnedState> weight_update(DType dtype, std::vector<std::int64_t> shape, double step,
                                                       Random& random) {
  OwnedState prev = zeros({spec("w", dtype, std::move(shape))});
  OwnedState cur = zeros(prev.view());
  const auto normal = [&] {
    return std::sqrt(-2 * std::log(1 - random.uniform())) * std::cos(6.283185307179586 * random.uniform());
  };
  const auto put = [&](OwnedState& state, std::size_t i, double value) {
    std::byte* to = state.mutable_bytes(0).data() + i * dtype_bytes(dtype);
    const auto single = static_cast<float>(value);
    std::uint32_t bits = std::bit_cast<std::uint32_t>(single);
    if (dtype == DType::kF64) {
      std::memcpy(to, &value, 8);
    } else if (dtype == DType::kF32) {
      std::memcpy(to, &bits, 4);
    } else if (dtype == DType::kBF16) {
      const auto half = static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
      std::memcpy(to, &half, 2);
    } else {  // F16 without subnormals and infinities, rounded towards zero
      const int exponent = static_cast<int>(bits >> 23 & 0xff) - 127 + 15;
      const auto half = static_cast<std::uint16_t>(
          (bits >> 16 & 0x8000) | (exponent <= 0 ? 0u : static_cast<unsigned>(exponent) << 10 | (bits >> 13 & 0x3ff)));
      std::memcpy(to, &half, 2);
    }
  };
  const std::size_t count = cur.bytes(0).size() / dtype_bytes(dtype);
  for (std::size_t i = 0; i < count; ++i) {
    const double weight = 0.016 * normal();
    put(prev, i, weight);
    put(cur, i, weight + step * normal());
  }
  prev.seal();
  cur.seal();
  return {std::move(prev), std::move(cur)};
}

// Whether two states are equal bit for bit. Uses no digests.
inline bool same_bytes(const StateView& a, const StateView& b) {
  if (a.size() != b.size()) return false;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (a[i].name != b[i].name || a[i].dtype != b[i].dtype || a[i].shape != b[i].shape) return false;
    if (a[i].bytes.size() != b[i].bytes.size()) return false;
    if (!a[i].bytes.empty() && std::memcmp(a[i].bytes.data(), b[i].bytes.data(), a[i].bytes.size()) != 0) return false;
  }
  return true;
}

// A state of up to `tensors_max` tensors of every type and odd shapes, scalars and empty ones among them.
inline StateView random_layout(Random& random, std::size_t tensors_max, std::int64_t dim_max) {
  StateView layout;
  const std::size_t count = random.below(tensors_max + 1);
  for (std::size_t i = 0; i < count; ++i) {
    std::vector<std::int64_t> shape(random.below(4));
    for (std::int64_t& dim : shape) dim = random.between(0, dim_max);
    const std::string name = "t" + std::to_string(random.below(1000)) + "." + std::to_string(i);
    const DType dtype = kAllDTypes[random.below(kAllDTypes.size())];
    if (dtype_bits(dtype) < 8) shape.push_back(4);  // packed elements fill their bytes
    layout.push_back(spec(name, dtype, shape));
  }
  return layout;
}

inline std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

// A folder that is removed at the end of the test.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "echoline-delta-XXXXXX").string();
    EXPECT_NE(::mkdtemp(pattern.data()), nullptr);
    path_ = pattern;
  }
  ~TemporaryFolder() { std::filesystem::remove_all(path_); }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  std::filesystem::path operator/(std::string_view name) const { return path_ / name; }
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

inline void write_raw(const std::filesystem::path& path, std::string_view content) {
  std::ofstream(path, std::ios::binary) << content;
}

// A whole safetensors file from header text and data.
inline std::string safetensors_bytes(std::string_view header, std::string_view data) {
  std::string file(8, '\0');
  const std::uint64_t length = header.size();
  std::memcpy(file.data(), &length, 8);
  return file.append(header).append(data);
}

}  // namespace echoline::delta::test
