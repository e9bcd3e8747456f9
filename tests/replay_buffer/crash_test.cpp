// kill -9 at any moment: groups acknowledged over a pipe are stored afterwards, once and whole.
#include <signal.h>
#include <sys/wait.h>

#include <fstream>
#include <map>

#include "base/random.hpp"
#include "tests/replay_buffer/fixtures.hpp"

namespace echoline::replay_buffer {
namespace {

constexpr std::uint32_t kGroupSize = 4, kBudget = 1;
const WorkerId kWorker{1};

LedgerOptions ledger_options() {
  LedgerOptions options;
  options.pacing = {.staleness = {.budget = 1, .publish_every = 1, .lookahead = 1}, .trajectories_per_step = 1u << 20};
  return options;
}

struct Acknowledged {
  std::uint64_t lease, group;
};

// The child takes leases, submits, and acknowledges each over the pipe after submit() has returned. Never returns.
[[noreturn]] void serve(const std::filesystem::path& file, int pipe) {
  auto buffer = must(ReplayBuffer::open(file, options_for(kGroupSize, kBudget)));
  auto ledger = must(JobLedger::open(*buffer, ledger_options()));
  for (;;) {
    const auto leases = must(
        ledger->grant({.worker = kWorker, .version = Version{0}, .policy_digest = "digest", .groups_max = 3}, 0, 1000));
    std::vector<schema::Submission> submissions;
    for (const LeaseRecord& lease : leases) submissions.push_back(submission_for(lease));
    std::vector<Delivery> deliveries;
    for (const auto& submission : submissions) deliveries.push_back({.worker = kWorker, .submission = &submission});
    const auto verdicts = must(ledger->submit(deliveries, 0, 1001));
    for (std::size_t i = 0; i < verdicts.size(); ++i) {
      if (!verdicts[i].accepted) ::_exit(3);
      const Acknowledged ack{.lease = leases[i].id.value, .group = leases[i].group.value};
      if (::write(pipe, &ack, sizeof ack) != sizeof ack) ::_exit(4);
    }
  }
}

TEST(Crash, AcknowledgedTrajectoriesSurviveKill9) {
  const TemporaryFolder folder;
  Random random(11);
  std::map<std::uint64_t, std::uint64_t> acknowledged;  // group -> lease
  for (int round = 0; round < 12; ++round) {
    int pipe[2];
    ASSERT_EQ(::pipe(pipe), 0);
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      ::close(pipe[0]);
      try {
        serve(folder.file(), pipe[1]);
      } catch (const std::exception& e) {
        fmt::print(stderr, "child: {}\n", e.what());
        ::_exit(2);
      }
    }
    ::close(pipe[1]);
    const std::uint64_t acks_before_kill = 1 + random.below(40);
    Acknowledged ack{};
    std::uint64_t received = 0;
    while (::read(pipe[0], &ack, sizeof ack) == sizeof ack) {
      EXPECT_TRUE(acknowledged.emplace(ack.group, ack.lease).second) << "group " << ack.group << " was leased twice";
      if (++received == acks_before_kill) ::kill(child, SIGKILL);
    }
    ::close(pipe[0]);
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << "the child ended by itself: " << status;

    auto buffer = must(ReplayBuffer::open(folder.file(), options_for(kGroupSize, kBudget)));
    auto ledger = must(JobLedger::open(*buffer, ledger_options()));
    const Counts counts = must(buffer->counts(0));
    EXPECT_GE(counts.stored, acknowledged.size() * kGroupSize);
    EXPECT_EQ(counts.incomplete_groups, 0u);
    EXPECT_EQ(counts.stored, must(ledger->counts()).settled * kGroupSize);
    const auto batch = must(buffer->sample(0, static_cast<std::uint32_t>(counts.admissible_groups)));
    ASSERT_TRUE(batch);
    std::map<std::uint64_t, std::uint64_t> stored;
    for (const Group& group : batch->groups) stored[group.id.value] = group.trajectories[0].lease();
    for (const auto& [group, lease] : acknowledged) {
      ASSERT_TRUE(stored.contains(group)) << "acknowledged group " << group << " is lost";
      EXPECT_EQ(stored[group], lease);
    }
    // A stored submission without an acknowledgement is acknowledged when it comes again, and not stored twice.
    for (const Group& group : batch->groups) {
      schema::Submission again;
      again.set_lease(group.trajectories[0].lease());
      for (const Trajectory& trajectory : group.trajectories) *again.add_trajectories() = trajectory;
      const Delivery delivery{.worker = kWorker, .submission = &again};
      EXPECT_TRUE(must(ledger->submit({&delivery, 1}, 0, 1002))[0].duplicate);
      acknowledged.emplace(group.id.value, again.lease());
    }
    EXPECT_EQ(must(buffer->counts(0)).stored, counts.stored);
    // Leases of the killed process return to the pool and are granted again. None is lost.
    must(ledger->release_worker(kWorker, 1000));
  }
  auto buffer = must(ReplayBuffer::open(folder.file(), options_for(kGroupSize, kBudget)));
  auto ledger = must(JobLedger::open(*buffer, ledger_options()));
  const auto pooled = must(ledger->counts()).pooled;
  const GrantRequest pooled_and_one{.worker = kWorker,
                                    .version = Version{0},
                                    .policy_digest = "digest",
                                    .groups_max = static_cast<std::uint32_t>(pooled + 1)};
  const auto leases = must(ledger->grant(pooled_and_one, 0, 1000));
  std::uint64_t next_group = 0;  // stored, pooled and one new group together are 0, 1, 2, ... without a gap
  for (const LeaseRecord& lease : leases) EXPECT_TRUE(acknowledged.emplace(lease.group.value, 0).second);
  for (const auto& [group, lease] : acknowledged) EXPECT_EQ(group, next_group++);
  EXPECT_GT(next_group, 100u);
}

// Power loss leaves a torn write-ahead log: every prefix of it opens and holds whole transactions only.
TEST(Crash, AnyPrefixOfTheLogHoldsWholeGroups) {
  const TemporaryFolder folder, copies;
  auto buffer = must(ReplayBuffer::open(folder.file(), options_for(kGroupSize, kBudget)));
  for (std::uint64_t group = 0; group < 30; ++group) must(buffer->add(group_of(group, 0, kGroupSize)));
  const std::string log_path = folder.file().string() + "-wal";
  const auto read = [](const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(file), {});
  };
  const std::string main_bytes = read(folder.file()), log_bytes = read(log_path);
  ASSERT_GT(log_bytes.size(), 50'000u);
  Random random(4);
  std::set<std::uint64_t> group_counts;
  for (int i = 0; i < 40; ++i) {
    std::string torn = log_bytes.substr(0, random.below(log_bytes.size() + 1));
    if (i % 2 == 0 && !torn.empty())
      torn[torn.size() - 1 - random.below(std::min<std::size_t>(torn.size(), 3000))] ^= 0x40;
    std::ofstream(copies.file(), std::ios::binary | std::ios::trunc) << main_bytes;
    std::ofstream(copies.file().string() + "-wal", std::ios::binary | std::ios::trunc) << torn;
    auto copy = must(ReplayBuffer::open(copies.file(), options_for(kGroupSize, kBudget)));
    const Counts counts = must(copy->counts(0));
    EXPECT_EQ(counts.incomplete_groups, 0u);
    EXPECT_EQ(counts.stored, counts.admissible_groups * kGroupSize);
    if (counts.admissible_groups > 0) {
      const auto batch = must(copy->sample(0, static_cast<std::uint32_t>(counts.admissible_groups)));
      EXPECT_EQ(batch->groups.back().id, GroupId{counts.admissible_groups - 1});
    }
    group_counts.insert(counts.admissible_groups);
  }
  EXPECT_GT(group_counts.size(), 10u);
}

}  // namespace
}  // namespace echoline::replay_buffer
