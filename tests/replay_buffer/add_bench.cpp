// What the buffer costs over SQLite itself: add() in group commits of 64 against bare inserts of the same bytes.
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

// Eight trajectories of 512 response tokens each.
std::vector<std::vector<Trajectory>> commits() {
  std::vector<std::vector<Trajectory>> commits;
  for (std::uint64_t i = 0; i < kTrajectories; ++i) {
    Trajectory t = data_plane::sound_trajectory(i / kGroup, static_cast<std::uint32_t>(i % kGroup), 0, i / kGroup);
    for (std::uint32_t token = 3; token < 512; ++token) {
      t.add_response_tokens(token * 37 % 50'000);
      t.add_logprobs(-0.01f * static_cast<float>(token));
    }
    t.mutable_spans(0)->set_end(512);
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

}  // namespace
}  // namespace echoline::replay_buffer
