// The empirical conditional entropy of an update: the number of bytes that a delta is compared with.
//
// The receiver has the old weights. Whether a float changes depends on the spacing of floats at its old value, that is
// on its exponent. Class c is an exponent, with n_c elements of which k_c have changed. An ideal coder that knows these
// counts needs, in bits,
//
//   Σ_c  n_c · H2(k_c / n_c)   for which elements change, and
//   Σ_c  k_c · H(step | c)     for how: step = new − old bit pattern, both as ordered integers, in which
//                              neighbouring floats differ by one.
// H2 is the entropy of a coin, H that of the observed steps: H(X | Y) of Shannon 1948, with counts for probabilities
// (Cover and Thomas, Elements of Information Theory, chapter 2). A coder can need less if it conditions on more than
// the exponent (such as the row). It can also need less if the counts are small: log2 of the number of arrangements
// with these counts is then clearly below their entropy. This concerns 32 and 64 bit types, whose steps have so many
// values that each of them is rare.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>

#include "delta/tensor.hpp"

namespace echoline::delta {

struct EntropyBound {
  std::uint64_t elements = 0;
  std::uint64_t changed = 0;  // elements whose bits differ
  double position_bits = 0;   // given the old exponents
  double step_bits = 0;       // given the old exponents
  double bytes() const { return (position_bits + step_bits) / 8; }
  double density() const { return elements ? static_cast<double>(changed) / static_cast<double>(elements) : 0.0; }
};

// Accumulates counts, block by block in any order, as an encoder passes the blocks. Classes are the exponent fields of
// floats, without signs; integers and bools have one class. Steps from -64 to 63 are counted in a table, all others in
// a list of distinct steps.
class EntropyCounter {
 public:
  // `count` elements of one type. Element i differs if bit i % 32 of changed[i / 32] is set.
  void add(DType dtype, const std::byte* prev, const std::byte* cur, std::uint32_t count, const std::uint32_t* changed);
  // Adds all counts of `other`.
  void merge(EntropyCounter&& other);
  // The bound from all counts; the order of add() and merge() does not matter.
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
