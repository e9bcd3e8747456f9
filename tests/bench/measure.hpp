// Clock and memory readings of the benchmark.
#pragma once
#include <time.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "delta/tensor.hpp"

namespace echoline::bench {

template <class F>
double seconds_of(F&& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// CPU seconds of this process's threads. Other programs affect them only through caches and memory bandwidth.
template <class F>
double cpu_seconds_of(F&& work) {
  const auto now = [] {
    timespec t{};
    ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
  };
  const double begin = now();
  work();
  return now() - begin;
}

// 0 for none.
double median(std::vector<double> values);

// Peak rise of this process's resident memory while `work` runs, in a forked child that starts with all memory resident
// now. Counts the pages that `work` touches, in any allocator, but no reserved pages. Empty without /proc, and under a
// sanitizer, whose own memory would be counted.
std::optional<std::uint64_t> peak_bytes_beyond_now(const std::function<void()>& work);

// Copies the tensors of `from` over those of `to`, which has the same, on `threads` threads.
void copy_dense(const delta::StateView& from, const std::vector<std::span<std::byte>>& to, unsigned threads);

}  // namespace echoline::bench
