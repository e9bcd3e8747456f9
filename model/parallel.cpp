#include "model/parallel.hpp"

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <exception>

#ifdef _OPENMP
#include <omp.h>
#endif

namespace echoline::model {

void parallel_for(std::int64_t count, std::int64_t grain, const std::function<void(std::int64_t, std::int64_t)>& work) {
  if (count <= 0) return;
#ifdef _OPENMP
  const std::int64_t parts_max = (count + grain - 1) / grain;
  const int threads = at::get_num_threads();  // also sets this thread's limit, which OpenMP keeps for each thread
  if (parts_max > 1 && threads > 1 && omp_in_parallel() == 0) {
    std::exception_ptr error;
    std::atomic_flag failed = ATOMIC_FLAG_INIT;
    // Orders what the threads wrote before and in the loop. libgomp does it too, but the thread sanitizer cannot see
    // that.
    std::atomic<int> order{0};
    order.store(1, std::memory_order_release);
    // The team always has all threads, also where fewer get a part: libgomp ends and starts threads when its size
    // changes.
#pragma omp parallel num_threads(threads)
    {
      order.load(std::memory_order_acquire);
      const std::int64_t parts = std::min<std::int64_t>(parts_max, omp_get_num_threads());
      const std::int64_t size = (count + parts - 1) / parts, begin = omp_get_thread_num() * size;
      if (begin < count) {
        try {
          work(begin, std::min(count, begin + size));
        } catch (...) {
          if (!failed.test_and_set()) error = std::current_exception();
        }
      }
      order.fetch_add(1, std::memory_order_release);
    }
    order.load(std::memory_order_acquire);
    if (error) std::rethrow_exception(error);
    return;
  }
#endif
  work(0, count);
}

}  // namespace echoline::model
