// SIGKILL at every step of an application in place and of its recovery, and at random moments. recover() always leaves
// the base or the result.
#include <gtest/gtest.h>
#include <signal.h>
#include <time.h>

#include <chrono>

#include "tests/delta/in_place_util.hpp"

namespace echoline::delta {
namespace {

using namespace test;

constexpr int kKillsAtSteps = 500;
constexpr int kKillsAtRandom = 500;

// How a child ended.
struct Ending {
  bool killed = false;
  bool committed = false;  // reported before the end
};

// A pipe over which a child reports that it has committed.
class CommitPipe {
 public:
  CommitPipe() { EXPECT_EQ(::pipe(ends_), 0); }
  ~CommitPipe() {
    ::close(ends_[0]);
    ::close(ends_[1]);
  }
  void report_commit() { (void)!::write(ends_[1], "c", 1); }
  // Call once, in the parent process after the child's end.
  bool was_committed() {
    ::close(ends_[1]);
    char byte;
    const bool has_report = ::read(ends_[0], &byte, 1) == 1;
    ends_[1] = -1;
    return has_report;
  }

 private:
  int ends_[2] = {-1, -1};
};

// Has the kernel kill this process after a while.
void kill_me_after(std::chrono::nanoseconds delay) {
  sigevent event{};
  event.sigev_notify = SIGEV_SIGNAL;
  event.sigev_signo = SIGKILL;
  timer_t timer;
  if (::timer_create(CLOCK_MONOTONIC, &event, &timer) != 0) ::_exit(9);
  itimerspec when{};
  when.it_value.tv_sec = delay.count() / 1'000'000'000;
  when.it_value.tv_nsec = std::max<long>(delay.count() % 1'000'000'000, 1);
  if (::timer_settime(timer, 0, &when, nullptr) != 0) ::_exit(9);
}

class CrashTest : public ::testing::Test {
 protected:
  CrashTest()
      : base_(small_state(5)), next_(changed_state(base_, 6)), patch_(delta_between(base_, next_)), disk_(base_) {
    for (const fs::path& path : {disk_.file(), disk_.folder()}) {
      Target target{
          .path = path, .folder = path == disk_.file() ? disk_.root() : path, .before = content_of(path), .after = {}};
      ApplyOptions options;
      options.observer = [&](ApplyStage) { ++target.steps; };
      const auto applied = apply_in_place(path, patch_, options);
      EXPECT_TRUE(applied) << (applied ? "" : applied.error().message());
      EXPECT_EQ(digest_at(path), next_.digest());
      target.after = content_of(path);
      targets_.push_back(std::move(target));
    }
  }
  struct Target {
    fs::path path;
    fs::path folder;  // of its files
    Content before, after;
    int steps = 0;  // calls of the observer in one application
  };

  // Runs `work` in a child. `prepare` runs in it first.
  Ending run(const std::function<void()>& prepare, const std::function<void(const ApplyOptions&)>& work,
             const std::function<void(ApplyStage)>& step, unsigned threads = 1) {
    CommitPipe commit_pipe;
    const int status = in_child([&] {
      prepare();
      ApplyOptions options{.threads = threads};
      options.observer = [&](ApplyStage stage) {
        if (stage == ApplyStage::kCommitted) commit_pipe.report_commit();
        step(stage);
      };
      work(options);
    });
    const bool killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
    EXPECT_TRUE(killed || (WIFEXITED(status) && WEXITSTATUS(status) == 0)) << status;
    return {.killed = killed, .committed = commit_pipe.was_committed()};
  }
  void apply(const Target& target, const ApplyOptions& options) {
    if (!apply_in_place(target.path, patch_, options)) ::_exit(2);
  }
  static void recover_in_child(const Target& target, const ApplyOptions& options) {
    if (!recover(target.path, options)) ::_exit(3);
  }

  void expect_base_or_result(const Target& target, const Ending& ending, const std::string& what) {
    const auto recovered = recover(target.path);
    ASSERT_TRUE(recovered) << what << ": " << recovered.error().message();
    const Content content = content_of(target.path);  // all files of a folder, so that none may be left over
    const auto digest = digest_at(target.path);
    const bool is_base = digest == base_.digest() && content == target.before;
    const bool is_result = digest == next_.digest() && content == target.after;
    ASSERT_TRUE(is_base || is_result) << what;
    ASSERT_TRUE(is_result || (ending.killed && !ending.committed)) << what;
    ASSERT_TRUE(is_result ? *recovered != Recovery::kDiscarded : *recovered != Recovery::kCompleted) << what;
    ++(is_base ? bases_ : results_);
  }

  OwnedState base_, next_;
  Blob patch_;
  CheckpointsOnDisk disk_;
  std::vector<Target> targets_;
  int bases_ = 0, results_ = 0;
};

TEST_F(CrashTest, AtEveryStep) {
  int kills = 0, round = 0;
  for (; kills < kKillsAtSteps; ++round) {
    const Target& target = targets_[static_cast<std::size_t>(round) % targets_.size()];
    const int kill_step = round / 2 % target.steps;
    restore(target.folder, target.before);
    int step = 0;
    const Ending ending = run([] {}, [&](const ApplyOptions& options) { apply(target, options); },
                              [&](ApplyStage) {
                                if (step++ == kill_step) ::kill(::getpid(), SIGKILL);
                              });
    ASSERT_TRUE(ending.killed) << "step " << kill_step;
    ++kills;
    // Every other time, recovery itself is killed too, and once more.
    for (int again = 0; round / 2 % 2 == 1 && again < 2; ++again) {
      int steps_left = 1 + (round + again) % 7;
      kills += run([] {}, [&](const ApplyOptions& options) { recover_in_child(target, options); },
                   [&](ApplyStage) {
                     if (--steps_left == 0) ::kill(::getpid(), SIGKILL);
                   })
                   .killed;
    }
    expect_base_or_result(target, {.killed = true, .committed = ending.committed},
                          fmt::format("step {} of {}", kill_step, target.path.string()));
    if (HasFatalFailure()) return;
  }
  for (const Target& target : targets_) EXPECT_GT(round / 2, target.steps) << "not every step had its turn";
  EXPECT_GT(bases_, 20);
  EXPECT_GT(results_, 20);
}

TEST_F(CrashTest, AtAnyTime) {
  Random random(7);
  // Running mean of an application's time here. A kill comes at a uniformly random part of it.
  double seconds = 0.01;
  int kills = 0;
  for (int round = 0; kills < kKillsAtRandom && round < 100 * kKillsAtRandom; ++round) {
    const Target& target = targets_[static_cast<std::size_t>(round) % targets_.size()];
    restore(target.folder, target.before);
    const auto delay = std::chrono::nanoseconds(static_cast<std::int64_t>(random.uniform() * seconds * 1e9));
    const auto begin = std::chrono::steady_clock::now();
    const Ending ending =
        run([&] { kill_me_after(delay); }, [&](const ApplyOptions& options) { apply(target, options); },
            [](ApplyStage) {}, 1 + static_cast<unsigned>(random.below(2)));
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    if (ending.killed)
      ++kills, seconds *= 1.02;
    else
      seconds = 0.8 * seconds + 0.2 * took.count();
    expect_base_or_result(target, ending, fmt::format("after {} ns, {}", delay.count(), target.path.string()));
    if (HasFatalFailure()) return;
  }
  EXPECT_EQ(kills, kKillsAtRandom);
  EXPECT_GT(bases_, 20);
  EXPECT_GT(results_, 20);
}

}  // namespace
}  // namespace echoline::delta
