// Loops spread over libtorch's threads. Private to model/.
//
// at::parallel_for is a template in a header. A file that is compiled without -fopenmp gets a version that runs on the
// calling thread. parallel.cpp is the only file compiled with that flag, so every loop of model/ goes through the
// function below.
#pragma once
#include <cstdint>
#include <functional>

namespace echoline::model {

// Calls work(begin, end) for consecutive parts of [0, count), at most one part a thread (see use_threads()) and, where
// there are several, with at least `grain` in all but the last. Returns when all have returned; rethrows one exception
// of `work`. Which part an index falls into depends on the number of threads, so the result of an index must not depend
// on its part.
void parallel_for(std::int64_t count, std::int64_t grain, const std::function<void(std::int64_t, std::int64_t)>& work);

}  // namespace echoline::model
