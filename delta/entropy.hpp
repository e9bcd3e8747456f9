// How few bytes a delta can have: the empirical conditional entropy of an update, the figure deltas are held against.
//
// The receiver has the old weights, and whether a float changes depends on the spacing of floats at its old value: its
// exponent. With exponent classes c, n_c elements and k_c changed ones in class c, an ideal coder that knows these
// counts spends
//   Σ_c  n_c · H2(k_c / n_c)   on which elements change, and
//   Σ_c  k_c · H(step | c)     on how, step = new − old bit pattern, both read as ordered integers (neighbouring floats
//                              differ by one),
// where H2 is the entropy of a coin and H that of the observed steps: H(X | Y) of Shannon 1948, with counts for
// probabilities (Cover and Thomas, Elements of Information Theory, chapter 2). A coder that conditions on more than the
// exponent (the row, say) can get below it, and so can counts on few elements or on steps that hardly repeat, as those
// of 32 and 64 bit types.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>

#include "delta/tensor.hpp"

namespace echoline::delta {

struct EntropyBound {
  std::uint64_t elements = 0;
  std::uint64_t changed = 0;  // elements whose bits differ
  double position_bits = 0;   // given the old exponent
  double step_bits = 0;       // given the old exponent
  double bytes() const { return (position_bits + step_bits) / 8; }
  double density() const { return elements ? static_cast<double>(changed) / static_cast<double>(elements) : 0.0; }
};

// Takes the counts, block by block and in any order, as an encoder passes them. Classes are the exponent fields of
// floats, signs excluded; integers and bools have one class. Steps of at most 63 are counted in a table; larger ones
// are kept apart, each different one of them once.
class EntropyCounter {
 public:
  // `count` elements of one type, of which those differ whose bit i % 32 of changed[i / 32] is set.
  void add(DType dtype, const std::byte* prev, const std::byte* cur, std::uint32_t count, const std::uint32_t* changed);
  // As if everything that `other` was given had been given to this one.
  void join(EntropyCounter&& other);
  // From counts pooled over all that was given, type by type. The order in which it came does not matter.
  EntropyBound bound();

  EntropyCounter();
  ~EntropyCounter();
  EntropyCounter(EntropyCounter&&) noexcept;
  EntropyCounter& operator=(EntropyCounter&&) noexcept;

 private:
  struct Types;
  std::unique_ptr<Types> types_;
};

}  // namespace echoline::delta
