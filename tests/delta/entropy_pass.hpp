// The entropy bound in a pass of its own over two states, and by tensor. It is the reference for an encoder's counts
// and cost.
#pragma once
#include <algorithm>
#include <string>
#include <vector>

#include "base/parallel.hpp"
#include "delta/block.hpp"
#include "delta/entropy.hpp"

namespace echoline::delta {

struct TensorEntropy {
  std::string name;
  DType dtype = DType::kU8;
  EntropyBound bound;  // from this tensor's own counts
};

struct StateEntropy {
  EntropyBound total;  // from counts pooled over all tensors of a type
  std::vector<TensorEntropy> tensors;
};

inline EntropyCounter count_tensor(const TensorView& prev, const TensorView& cur, unsigned threads) {
  constexpr std::size_t kThreadElementsMin = 1u << 18;
  const std::size_t element_bytes = dtype_bytes(cur.dtype);
  const std::size_t elements = cur.bytes.size() / element_bytes;
  const std::size_t parts = std::clamp<std::size_t>(elements / kThreadElementsMin, 1, std::clamp(threads, 1u, 256u));
  std::vector<EntropyCounter> counters(parts);
  for_each_parallel(parts, static_cast<unsigned>(parts), [&](unsigned, std::size_t part) {
    const std::size_t end = part + 1 == parts ? elements : elements / parts * (part + 1);
    std::uint32_t changed[kBlockWordsMax];
    for (std::size_t begin = elements / parts * part; begin < end; begin += kBlockElementsMax) {
      const auto count = static_cast<std::uint32_t>(std::min<std::size_t>(end - begin, kBlockElementsMax));
      const std::byte* old = prev.bytes.data() + begin * element_bytes;
      const std::byte* now = cur.bytes.data() + begin * element_bytes;
      kernels().diff[width_index(element_bytes)](old, now, count, changed);
      counters[part].add(cur.dtype, old, now, count, changed);
    }
  });
  for (std::size_t part = 1; part < parts; ++part) counters[0].merge(std::move(counters[part]));
  return std::move(counters[0]);
}

// Both states have the same tensors. The result does not depend on `threads`.
inline Result<StateEntropy> entropy_bound(const StateView& prev, const StateView& cur, unsigned threads = 1) {
  ECHO_ASSIGN(const StateView from, canonical(prev));
  ECHO_ASSIGN(const StateView to, canonical(cur));
  StateEntropy result;
  EntropyCounter pool;
  for (std::size_t i = 0; i < to.size(); ++i) {
    EntropyCounter counter = count_tensor(from[i], to[i], threads);
    result.tensors.push_back({.name = to[i].name, .dtype = to[i].dtype, .bound = counter.bound()});
    pool.merge(std::move(counter));
  }
  result.total = pool.bound();
  return result;
}

}  // namespace echoline::delta
