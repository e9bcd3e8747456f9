// Loops spread over libtorch's threads. Private to model/.
//
// at::parallel_for is a template in a header; compiled without -fopenmp it runs on the calling thread. parallel.cpp is
// the only file compiled with that flag, so all loops of model/ use the function below.
#pragma once
#include <cstdint>
#include <functional>

namespace echoline::model {

// Calls work(begin, end) for consecutive parts of [0, count): at most one part per thread (see use_threads()), with at
// least `grain` indices in each part except the last. Returns when all calls have returned, and rethrows one exception
// of `work`. The parts depend on the number of threads, so an index's result must not depend on its part.
void parallel_for(std::int64_t count, std::int64_t grain, const std::function<void(std::int64_t, std::int64_t)>& work);

}  // namespace echoline::model
