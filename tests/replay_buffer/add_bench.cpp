// Measures the buffer's cost over SQLite itself: add() in group commits of 64 against bare inserts of the same bytes.
// Also measures a lease's cost, by the number of workers.
#include <sqlite3.h>

#include <algorithm>
#include <chrono>
#include <functional>

#include "tests/replay_buffer/fixtures.hpp"

namespace echoline::replay_buffer {
namespace {

constexpr std::uint32_t kGroupSize = 8, kCommitSize = 64;  // kCommitSize: trajectories
constexpr std::uint64_t kTrajectories = 4096;

double timed_s(const std::function<void()>& work) {
  const auto began_at = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - began_at).count();
}

// Groups of eight trajectories with the given number of response tokens each.
std::vector<std::vector<Trajectory>> make_commits(std::uint64_t trajectories = kTrajectories,
                                                  std::uint32_t tokens = 512) {
  std::vector<std::vector<Trajectory>> commits;
  for (std::uint64_t i = 0; i < trajectories; ++i) {
    Trajectory trajectory =
        data_plane::sound_trajectory(i / kGroupSize, static_cast<std::uint32_t>(i % kGroupSize), 0, i / kGroupSize);
    for (std::uint32_t token = 3; token < tokens; ++token) {
      trajectory.add_response_tokens(token * 37 % 50'000);
      trajectory.add_logprobs(-0.01f * static_cast<float>(token));
    }
    trajectory.mutable_spans(0)->set_end(tokens);
    if (i % kCommitSize == 0) commits.emplace_back();
    commits.back().push_back(std::move(trajectory));
  }
  return commits;
}

double add_s(const std::vector<std::vector<Trajectory>>& commits) {
  const TemporaryFolder folder;
  auto buffer = must(ReplayBuffer::open(folder.file(), options_for(kGroupSize, 1)));
  return timed_s([&] {
    for (const auto& commit : commits) must(buffer->add(commit));
  });
}

double raw_s(const std::vector<std::vector<Trajectory>>& commits) {
  const TemporaryFolder folder;
  std::vector<std::vector<std::string>> bodies;
  for (const auto& commit : commits) {
    bodies.emplace_back();
    for (const Trajectory& t : commit) bodies.back().push_back(t.SerializeAsString());
  }
  sqlite3* db = nullptr;
  const auto check = [&](int rc) {
    if (rc != SQLITE_OK && rc != SQLITE_DONE) throw std::runtime_error(sqlite3_errmsg(db));
  };
  check(sqlite3_open(folder.file().c_str(), &db));
  for (const char* sql : {"PRAGMA locking_mode=EXCLUSIVE", "PRAGMA journal_mode=WAL", "PRAGMA synchronous=FULL",
                          "CREATE TABLE blobs(body BLOB)"})
    check(sqlite3_exec(db, sql, nullptr, nullptr, nullptr));
  sqlite3_stmt* insert = nullptr;
  check(sqlite3_prepare_v2(db, "INSERT INTO blobs VALUES(?1)", -1, &insert, nullptr));
  const double elapsed_s = timed_s([&] {
    for (const auto& commit : bodies) {
      check(sqlite3_exec(db, "BEGIN", nullptr, nullptr, nullptr));
      for (const std::string& body : commit) {
        sqlite3_bind_blob64(insert, 1, body.data(), body.size(), SQLITE_STATIC);
        check(sqlite3_step(insert));
        sqlite3_reset(insert);
      }
      check(sqlite3_exec(db, "COMMIT", nullptr, nullptr, nullptr));
    }
  });
  sqlite3_finalize(insert);
  sqlite3_close(db);
  return elapsed_s;
}

TEST(AddBench, TakesLittleMoreThanTheTrajectories) {
  for (const std::uint32_t tokens : {8u, 64u, 512u, 4096u}) {
    const std::uint64_t count = 1024;
    const auto commits = make_commits(count, tokens);
    const TemporaryFolder folder;
    double elapsed_s = 0;
    {
      auto buffer = must(ReplayBuffer::open(folder.file(), options_for(kGroupSize, 1)));
      elapsed_s = timed_s([&] {
        for (const auto& commit : commits) must(buffer->add(commit));
      });
    }
    const double file_bytes_each =
        static_cast<double>(std::filesystem::file_size(folder.file())) / static_cast<double>(count);
    const auto body_bytes = static_cast<double>(commits[0][0].ByteSizeLong());
    fmt::print(
        "{} response tokens: {:.0f} bytes a trajectory, {:.0f} in the file; {:.0f} trajectories/s in commits of {}\n",
        tokens, body_bytes, file_bytes_each, static_cast<double>(count) / elapsed_s, kCommitSize);
    EXPECT_LT(file_bytes_each, 1.6 * body_bytes + 400);
  }
}

TEST(AddBench, CostsLittleOverRawSqlite) {
  const auto commits = make_commits();
  // The best of three of each, in turns, so that a busy disk harms neither alone.
  double add_best_s = 1e9, raw_best_s = 1e9;
  for (int i = 0; i < 3; ++i) {
    add_best_s = std::min(add_best_s, add_s(commits));
    raw_best_s = std::min(raw_best_s, raw_s(commits));
  }
  const double trajectories = static_cast<double>(kTrajectories);
  fmt::print(
      "add(): {:.0f} trajectories/s in commits of {} ({} bytes each); bare SQLite inserts: {:.0f}/s; ratio {:.2f}\n",
      trajectories / add_best_s, kCommitSize, commits[0][0].ByteSizeLong(), trajectories / raw_best_s,
      raw_best_s / add_best_s);
  EXPECT_GT(raw_best_s / add_best_s, 0.1) << "add() costs more than ten times the bare inserts";
}

// Every worker asks for one group and submits it, in turns of 256 workers, and the learner takes its steps. Returns
// seconds per grant.
double grant_s(std::uint64_t workers, bool durable) {
  constexpr std::uint64_t kTurn = 256;
  constexpr std::uint64_t kRounds = 3;
  const TemporaryFolder folder;
  auto buffer = must(ReplayBuffer::open(folder.file(), options_for(kGroupSize, 3)));
  LedgerOptions options;
  options.pacing = {.staleness = {.budget = 3, .publish_every = 1, .lookahead = 3},
                    .trajectories_per_step = static_cast<std::uint32_t>(workers * kGroupSize)};
  options.pacing.group_size = kGroupSize;
  options.leases_live_max = 1u << 20;
  auto ledger = must(JobLedger::open(*buffer, options));
  WaitingGroups waiting(kGroupSize);
  LeaseCore core(options, waiting);
  double elapsed_s = 0, now_s = 1000;
  for (std::uint64_t round = 0; round < kRounds; ++round) {
    std::vector<LeaseRecord> leases;
    for (std::uint64_t first = 1; first <= workers; first += kTurn) {
      now_s += 0.01;
      const auto ask = [&](auto&& grant) {
        for (std::uint64_t worker = first; worker < first + kTurn && worker <= workers; ++worker)
          grant(GrantRequest{.worker = WorkerId{worker},
                             .version = Version{round},
                             .policy_digest = "digest",
                             .groups_max = 1,
                             .step_seconds = 10.0});
      };
      elapsed_s += timed_s([&] {
        if (durable)
          must(ledger->run_in_transaction([&] {
            ask([&](const GrantRequest& request) {
              leases.push_back(must(ledger->grant(request, round, now_s)).at(0));
            });
          }));
        else
          ask([&](const GrantRequest& request) { leases.push_back(core.grant(request, round, now_s).at(0).record); });
      });
    }
    // The submissions, at different speeds, are not measured.
    for (std::size_t i = 0; i < leases.size(); ++i) {
      now_s += 0.0001 * static_cast<double>(i % 7);
      if (durable) continue;
      core.settle(leases[i].id, {.version = leases[i].version, .tokens_longest = 100 + i % 50, .scored = true}, now_s);
      waiting.remove(leases[i].group);
    }
    if (durable)
      must(ledger->run_in_transaction([&] {
        for (const LeaseRecord& lease : leases) must(ledger->return_leases(lease.worker, {&lease.id, 1}));
      }));
  }
  return elapsed_s / static_cast<double>(kRounds * workers);
}

TEST(AddBench, AGrantCostsTheSameInALargeFleet) {
  for (const std::uint64_t workers : {100, 1000, 10'000})
    fmt::print("{:>6} workers: {:>7.0f} durable grants/s in turns of 256; the decision alone {:.2f} us\n", workers,
               1 / grant_s(workers, true), 1e6 * grant_s(workers, false));
}

}  // namespace
}  // namespace echoline::replay_buffer
