// Implements parallel_for() with OpenMP.
#include "model/parallel.hpp"

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <exception>

#ifdef _OPENMP
#include <omp.h>
#endif

namespace echoline::model {

#ifdef _OPENMP
namespace {

using Work = std::function<void(std::int64_t, std::int64_t)>;

// One call of parallel_for(): each thread of the team runs its part.
class Loop {
 public:
  Loop(std::int64_t count, std::int64_t parts_max, const Work& work)
      : count_(count), parts_max_(parts_max), work_(work) {
    ordering_.store(1, std::memory_order_release);  // only for the thread sanitizer; see `ordering_`
  }

  void run_part(int thread, int threads) {
    ordering_.load(std::memory_order_acquire);
    const std::int64_t parts = std::min<std::int64_t>(parts_max_, threads);
    const std::int64_t size = (count_ + parts - 1) / parts, begin = thread * size;
    if (begin < count_) {
      try {
        work_(begin, std::min(count_, begin + size));
      } catch (...) {
        if (!failed_.test_and_set()) error_ = std::current_exception();
      }
    }
    ordering_.fetch_add(1, std::memory_order_release);
  }

  void finish() {
    ordering_.load(std::memory_order_acquire);
    if (error_) std::rethrow_exception(error_);
  }

 private:
  const std::int64_t count_, parts_max_;
  const Work& work_;
  std::exception_ptr error_;
  std::atomic_flag failed_ = ATOMIC_FLAG_INIT;
  // Orders the threads' writes before, in and after the loop. libgomp's barriers do so too, but the thread sanitizer
  // does not see them.
  std::atomic<int> ordering_{0};
};

// Runs the loop on a team of `threads` threads. Always uses all threads, even for fewer parts, because libgomp ends and
// starts threads when the size of a team changes. Excluded from the thread sanitizer, which would report libgomp's
// transfer of the address of `loop` as a data race.
__attribute__((no_sanitize("thread"))) void run_on_threads(Loop& loop, int threads) {
#pragma omp parallel num_threads(threads)
  loop.run_part(omp_get_thread_num(), omp_get_num_threads());
}

}  // namespace
#endif

void parallel_for(std::int64_t count, std::int64_t grain, const std::function<void(std::int64_t, std::int64_t)>& work) {
  if (count <= 0) return;
#ifdef _OPENMP
  const std::int64_t parts_max = (count + grain - 1) / grain;
  const int threads = at::get_num_threads();  // also sets this thread's limit, which OpenMP stores per thread
  if (parts_max > 1 && threads > 1 && omp_in_parallel() == 0) {
    Loop loop(count, parts_max, work);
    run_on_threads(loop, threads);
    return loop.finish();
  }
#endif
  work(0, count);
}

}  // namespace echoline::model
