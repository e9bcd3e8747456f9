// Measures the buffer's cost over SQLite itself: add() in group commits of 64 against bare inserts of the same bytes.
// Also measures a lease's cost, by the number of workers.
#include <sqlite3.h>

#include <algorithm>
#include <chrono>
#include <functional>

#include "tests/replay_buffer/fixtures.hpp"

namespace echoline::replay_buffer {
namespace {

constexpr std::uint32_t kGroup = 8, kCommit = 64;
constexpr std::uint64_t kTrajectories = 4096;

double timed_s(const std::function<void()>& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Groups of eight trajectories with the given number of response tokens each.
std::vector<std::vector<Trajectory>> commits(std::uint64_t trajectories = kTrajectories, std::uint32_t tokens = 512) {
  std::vector<std::vector<Trajectory>> commits;
  for (std::uint64_t i = 0; i < trajectories; ++i) {
    Trajectory t = data_plane::sound_trajectory(i / kGroup, static_cast<std::uint32_t>(i % kGroup), 0, i / kGroup);
    for (std::uint32_t token = 3; token < tokens; ++token) {
      t.add_response_tokens(token * 37 % 50'000);
      t.add_logprobs(-0.01f * static_cast<float>(token));
    }
    t.mutable_spans(0)->set_end(tokens);
    if (i % kCommit == 0) commits.emplace_back();
    commits.back().push_back(std::move(t));
  }
  return commits;
}

double add_s(const std::vector<std::vector<Trajectory>>& all) {
  const TemporaryFolder folder;
  auto buffer = must(ReplayBuffer::open(folder.file(), options_for(kGroup, 1)));
  return timed_s([&] {
    for (const auto& commit : all) must(buffer->add(commit));
  });
}

double raw_s(const std::vector<std::vector<Trajectory>>& all) {
  const TemporaryFolder folder;
  std::vector<std::vector<std::string>> bodies;
  for (const auto& commit : all) {
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
  const double took = timed_s([&] {
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
  return took;
}

TEST(AddBench, TakesLittleMoreThanTheTrajectories) {
  for (const std::uint32_t tokens : {8u, 64u, 512u, 4096u}) {
    const std::uint64_t count = 1024;
    const auto all = commits(count, tokens);
    const TemporaryFolder folder;
    double took = 0;
    {
      auto buffer = must(ReplayBuffer::open(folder.file(), options_for(kGroup, 1)));
      took = timed_s([&] {
        for (const auto& commit : all) must(buffer->add(commit));
      });
    }
    const double each = static_cast<double>(std::filesystem::file_size(folder.file())) / static_cast<double>(count);
    const auto body = static_cast<double>(all[0][0].ByteSizeLong());
    fmt::print(
        "{} response tokens: {:.0f} bytes a trajectory, {:.0f} in the file; {:.0f} trajectories/s in commits of {}\n",
        tokens, body, each, static_cast<double>(count) / took, kCommit);
    EXPECT_LT(each, 1.6 * body + 400);
  }
}

TEST(AddBench, CostsLittleOverRawSqlite) {
  const auto all = commits();
  double ours = 1e9, raw = 1e9;  // the best of three of each, in turns, so that a busy disk harms neither alone
  for (int i = 0; i < 3; ++i) {
    ours = std::min(ours, add_s(all));
    raw = std::min(raw, raw_s(all));
  }
  const double n = static_cast<double>(kTrajectories);
  fmt::print(
      "add(): {:.0f} trajectories/s in commits of {} ({} bytes each); bare SQLite inserts: {:.0f}/s; ratio {:.2f}\n",
      n / ours, kCommit, all[0][0].ByteSizeLong(), n / raw, raw / ours);
  EXPECT_GT(raw / ours, 0.1) << "add() costs more than ten times the bare inserts";
}

// Every worker asks for one group and submits it, in turns of 256 workers, and the learner takes its steps. Returns
// seconds per grant.
double grant_s(std::uint64_t workers, bool durable) {
  constexpr std::uint64_t kTurn = 256;
  constexpr std::uint64_t kRounds = 3;
  const TemporaryFolder folder;
  auto buffer = must(ReplayBuffer::open(folder.file(), options_for(kGroup, 3)));
  LedgerOptions options;
  options.pacing = {{3, 1, 3}, static_cast<std::uint32_t>(workers * kGroup)};
  options.pacing.group_size = kGroup;
  options.leases_live_max = 1u << 20;
  auto ledger = must(JobLedger::open(*buffer, options));
  WaitingGroups waiting(kGroup);
  LeaseCore core(options, waiting);
  double took = 0, now = 1000;
  for (std::uint64_t round = 0; round < kRounds; ++round) {
    std::vector<LeaseRecord> leases;
    for (std::uint64_t first = 1; first <= workers; first += kTurn) {
      now += 0.01;
      const auto ask = [&](auto&& grant) {
        for (std::uint64_t w = first; w < first + kTurn && w <= workers; ++w)
          grant(GrantRequest{WorkerId{w}, Version{round}, "digest", 1, 10.0});
      };
      took += timed_s([&] {
        if (durable)
          must(ledger->run_in_transaction([&] {
            ask([&](const GrantRequest& r) { leases.push_back(must(ledger->grant(r, round, now)).at(0)); });
          }));
        else
          ask([&](const GrantRequest& r) { leases.push_back(core.grant(r, round, now).at(0).record); });
      });
    }
    // The submissions, at different speeds, are not measured.
    for (std::size_t i = 0; i < leases.size(); ++i) {
      now += 0.0001 * static_cast<double>(i % 7);
      if (durable) continue;
      core.settle(leases[i].id, {leases[i].version, 100 + i % 50, true}, now);
      waiting.remove(leases[i].group);
    }
    if (durable)
      must(ledger->run_in_transaction([&] {
        for (const LeaseRecord& lease : leases) must(ledger->return_leases(lease.worker, {&lease.id, 1}));
      }));
  }
  return took / static_cast<double>(kRounds * workers);
}

TEST(AddBench, AGrantCostsTheSameInALargeFleet) {
  for (const std::uint64_t workers : {100, 1000, 10'000})
    fmt::print("{:>6} workers: {:>7.0f} durable grants/s in turns of 256; the decision alone {:.2f} us\n", workers,
               1 / grant_s(workers, true), 1e6 * grant_s(workers, false));
}

}  // namespace
}  // namespace echoline::replay_buffer
