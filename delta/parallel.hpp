// Sharing work between threads; internal to this folder.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <exception>
#include <thread>
#include <vector>

namespace echoline::delta {

// Calls work(thread's own index, item) for every item below `count`, on up to `threads` threads.
// An exception in any of them is thrown again here.
template <class F>
void for_each_parallel(std::size_t count, unsigned threads, F&& work) {
  threads = static_cast<unsigned>(std::clamp<std::size_t>(threads, 1, std::max<std::size_t>(count, 1)));
  std::atomic<std::size_t> next{0};
  std::vector<std::exception_ptr> failures(threads);
  const auto loop = [&](unsigned self) {
    try {
      for (std::size_t i; (i = next.fetch_add(1)) < count;) work(self, i);
    } catch (...) {
      failures[self] = std::current_exception();
      next = count;
    }
  };
  {
    std::vector<std::jthread> helpers;
    for (unsigned t = 1; t < threads; ++t) helpers.emplace_back(loop, t);
    loop(0);
  }
  for (const std::exception_ptr& failure : failures)
    if (failure) std::rethrow_exception(failure);
}

}  // namespace echoline::delta
