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

// Of this process's threads on their processors: other programs only count by what they do to caches and memory.
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

// By how much the resident memory of this process rises at most while `work` runs, in a forked child that starts with
// everything that is resident now: pages that the work touches, whoever allocates them, and not what it only reserves.
// Nothing where it cannot be told: no /proc, or a sanitizer whose own memory would be counted.
std::optional<std::uint64_t> peak_bytes_beyond_now(const std::function<void()>& work);

// Copies the tensors of `from` over those of `to`, which has the same, on `threads` threads.
void copy_dense(const delta::StateView& from, const std::vector<std::span<std::byte>>& to, unsigned threads);

}  // namespace echoline::bench
