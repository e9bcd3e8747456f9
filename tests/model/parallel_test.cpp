// Work spread over threads: all of them take part, and their number changes no result.
#include "model/parallel.hpp"

#include <gtest/gtest.h>

#include <map>
#include <mutex>
#include <set>
#include <stdexcept>
#include <thread>

#include "helpers.hpp"
#include "model/generate.hpp"

namespace echoline::model {
namespace {

class Parallel : public testing::Test {
 protected:
  ~Parallel() override { use_threads(threads_before_); }

  // The threads, their ranges of indices, and how often each index was computed.
  struct Parts {
    std::set<std::thread::id> threads;
    std::vector<std::pair<std::int64_t, std::int64_t>> ranges;
    std::vector<int> times;
  };
  static Parts run(std::int64_t count, std::int64_t grain) {
    Parts parts;
    parts.times.resize(std::size_t(count));
    std::mutex mutex;
    parallel_for(count, grain, [&](std::int64_t begin, std::int64_t end) {
      const std::scoped_lock lock(mutex);
      parts.threads.insert(std::this_thread::get_id());
      parts.ranges.emplace_back(begin, end);
      for (std::int64_t i = begin; i < end; ++i) ++parts.times[std::size_t(i)];
    });
    return parts;
  }

 private:
  const int threads_before_ = at::get_num_threads();
};

TEST_F(Parallel, EveryThreadGetsAPart) {
  for (const int threads : {3, 2, 1}) {
    use_threads(threads);
    for (const std::int64_t count : {3, 10, 1000}) {
      const Parts parts = run(count, 1);
      EXPECT_EQ(parts.threads.size(), std::size_t(threads));
      EXPECT_EQ(parts.ranges.size(), std::size_t(threads));
      EXPECT_EQ(parts.times, std::vector<int>(std::size_t(count), 1));
    }
  }
}

TEST_F(Parallel, PartsAreNotSmallerThanTheGrain) {
  use_threads(3);
  EXPECT_EQ(run(0, 8).ranges.size(), 0u);
  EXPECT_EQ(run(8, 8).ranges.size(), 1u);
  const Parts halves = run(20, 10);
  EXPECT_EQ(std::set(halves.ranges.begin(), halves.ranges.end()),
            (std::set<std::pair<std::int64_t, std::int64_t>>{{0, 10}, {10, 20}}));
  EXPECT_EQ(halves.times, std::vector<int>(20, 1));
}

TEST_F(Parallel, AnotherThreadThanTheOneThatChoseTheNumberUsesAllToo) {
  use_threads(3);
  std::size_t threads = 0;
  std::thread([&] { threads = run(30, 1).threads.size(); }).join();
  EXPECT_EQ(threads, 3u);
}

TEST_F(Parallel, ExceptionsComeBack) {
  use_threads(3);
  EXPECT_THROW(parallel_for(30, 1,
                            [](std::int64_t begin, std::int64_t) {
                              if (begin > 0) throw std::runtime_error("a part");
                            }),
               std::runtime_error);
  EXPECT_EQ(run(30, 1).threads.size(), 3u);
}

// Holds while prompts of more than 256 tokens together are read, and while tokens are drawn.
TEST_F(Parallel, TheNumberOfThreadsChangesNoLogProbability) {
  ModelConfig config = preset("tiny-64").value();
  const auto model = init(config, 3, torch::kCPU, torch::kBFloat16).value();
  std::vector<std::vector<Token>> prompts;
  for (Token p = 0; p < 40; ++p) prompts.push_back(std::vector<Token>(std::size_t(1 + p % 30), Token(5 + p)));
  std::vector<Generation> want;
  for (const int threads : {1, 2, 3, 7}) {
    use_threads(threads);
    const auto got = generate(*model, prompts, {.tokens_max = 20, .seed = 1}).value();
    if (want.empty()) want = got;
    ASSERT_EQ(got.size(), want.size());
    for (std::size_t i = 0; i < got.size(); ++i) {
      EXPECT_EQ(got[i].tokens, want[i].tokens) << threads;
      EXPECT_EQ(got[i].logprobs, want[i].logprobs) << threads;
    }
  }
}

}  // namespace
}  // namespace echoline::model
