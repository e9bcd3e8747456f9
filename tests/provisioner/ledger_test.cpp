// The ledger: states, cost, totals, orphans, and a writer that is killed.
#include "provisioner/ledger.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sqlite3.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>

namespace echoline::provisioner {
namespace {

using testing::HasSubstr;

class LedgerTest : public testing::Test {
 protected:
  void SetUp() override {
    folder = std::filesystem::temp_directory_path() / fmt::format("echoline-ledger-{}", getpid());
    std::filesystem::remove_all(folder);
    path = folder / "ledger.sqlite";
  }
  void TearDown() override { std::filesystem::remove_all(folder); }
  Ledger open(const std::string& run = "run-a") {
    auto ledger = Ledger::open(path, run);
    EXPECT_TRUE(ledger) << ledger.error().message();
    return std::move(ledger).value();
  }
  static Offer offer(const std::string& id = "o1") {
    Offer o;
    o.id = id;
    o.provider = "local";
    o.host = "host-" + id;
    o.rollouts_per_s = 2;
    o.gpu_usd_per_hour = 0.5;
    o.storage_usd_per_hour = 0.1;
    o.upload_usd_per_gb = 0.02;
    return o;
  }
  std::filesystem::path folder, path;
};

TEST_F(LedgerTest, ARowGoesFromIntendedToRunningToEnded) {
  Ledger ledger = open();
  const auto row = ledger.record_intent(offer(), 1000);
  ASSERT_TRUE(row) << row.error().message();
  EXPECT_THAT(row->label, testing::MatchesRegex("run-a\\.[0-9a-f]{8}/1"));
  EXPECT_EQ(row->label, ledger.label_prefix() + "1");
  EXPECT_EQ(row->state, InstanceState::kIntended);
  EXPECT_DOUBLE_EQ(row->usd_per_hour, 0.6);
  EXPECT_FALSE(row->download_usd_per_gb);
  ASSERT_TRUE(ledger.record_start(row->id, "local:12:34", 1010));
  const std::vector<LedgerSignOfLife> signs{{row->id, {500'000'000}, {5'000'000'000}}};
  ASSERT_TRUE(ledger.record_signs_of_life(signs, 1500));
  ASSERT_TRUE(ledger.record_signs_of_life(std::vector<LedgerSignOfLife>{{row->id, {1'500'000'000}, {0}}}, 2000));
  ASSERT_TRUE(ledger.record_end(row->id, "stopped", 4600));
  const auto rows = ledger.rows();
  ASSERT_TRUE(rows);
  ASSERT_EQ(rows->size(), 1u);
  const LedgerRow& r = rows->front();
  EXPECT_EQ(r.instance, "local:12:34");
  EXPECT_EQ(r.state, InstanceState::kEnded);
  EXPECT_EQ(r.running_unix_s, 1010);
  EXPECT_EQ(r.alive_unix_s, 2000);
  EXPECT_EQ(r.downloaded, Bytes{5'000'000'000});
  EXPECT_FALSE(r.price_known);
  EXPECT_FALSE(ledger.totals(99999)->prices_known);
  EXPECT_EQ(r.ended_unix_s, 4600);
  EXPECT_EQ(r.note, "stopped");
  EXPECT_DOUBLE_EQ(r.usd(99999), 0.6 + 2 * 0.02);  // one hour, two GB up, the download price is not stated
}

TEST_F(LedgerTest, CostAccruesFromTheIntentionByTheSecond) {
  Ledger ledger = open();
  const auto a = ledger.record_intent(offer("a"), 1000);
  const auto b = ledger.record_intent(offer("b"), 1000);
  const auto c = ledger.record_intent(offer("c"), 1000);
  ASSERT_TRUE(a && b && c);
  ASSERT_TRUE(ledger.record_start(a->id, "x", 1001));
  ASSERT_TRUE(ledger.record_failure(b->id, "no such offer", 1900));
  auto totals = ledger.totals(2800);
  ASSERT_TRUE(totals);
  EXPECT_DOUBLE_EQ(totals->usd, 0.3 + 0.3);  // a and c half an hour each; b never ran
  EXPECT_DOUBLE_EQ(totals->usd_per_hour, 1.2);
  EXPECT_EQ(totals->intended, 1u);
  EXPECT_EQ(totals->running, 1u);
  EXPECT_EQ(totals->failed, 1u);
  ASSERT_TRUE(ledger.record_failure(a->id, "crashed", 2800));
  totals = ledger.totals(1e9);
  EXPECT_EQ(totals->failed, 2u);
  EXPECT_DOUBLE_EQ((*ledger.rows())[0].usd(1e9), 0.3);  // it ran, so it is paid for
  EXPECT_DOUBLE_EQ((*ledger.rows())[0].usd(0), 0.3);
}

TEST_F(LedgerTest, ImpossibleStepsAreRefused) {
  Ledger ledger = open();
  const auto row = ledger.record_intent(offer(), 1);
  ASSERT_TRUE(row);
  EXPECT_EQ(ledger.record_start(99, "x", 2).error().code, Code::kNotFound);
  const std::vector<LedgerSignOfLife> signs{{row->id, {1}, {1}}, {99, {1}, {1}}};
  EXPECT_EQ(ledger.record_signs_of_life(signs, 2).error().code, Code::kNotFound);
  EXPECT_EQ((*ledger.rows())[0].uploaded, Bytes{});  // all or none
  ASSERT_TRUE(ledger.record_start(row->id, "x", 2));
  EXPECT_EQ(ledger.record_start(row->id, "y", 3).error().code, Code::kInvalid);
  ASSERT_TRUE(ledger.record_end(row->id, "", 4));
  const Status again = ledger.record_end(row->id, "", 5);
  ASSERT_FALSE(again);
  EXPECT_THAT(again.error().detail, HasSubstr("is ended and cannot become ended"));
  EXPECT_EQ(ledger.record_failure(row->id, "", 5).error().code, Code::kInvalid);
  EXPECT_EQ(ledger.record_start(row->id, "z", 5).error().code, Code::kInvalid);
  EXPECT_EQ((*ledger.rows())[0].instance, "x");
}

TEST_F(LedgerTest, MachinesOfAKilledProcessCountUntilLastSeen) {
  {
    Ledger ledger = open();
    const auto seen = ledger.record_intent(offer("o1"), 1000), started = ledger.record_intent(offer("o2"), 1000),
               asked = ledger.record_intent(offer("o3"), 1000);
    ASSERT_TRUE(ledger.record_start(seen->id, "x", 1010));
    ASSERT_TRUE(ledger.record_start(started->id, "y", 1020));
    ASSERT_TRUE(ledger.record_signs_of_life(std::vector<LedgerSignOfLife>{{seen->id, {}, {}}}, 4600));
    ASSERT_TRUE(asked);
  }
  Ledger ledger = open();
  for (const LedgerRow& orphan : ledger.orphans())
    ASSERT_TRUE(ledger.record_end(orphan.id, "left behind", orphan.last_known_unix_s()));
  const auto rows = ledger.rows();
  ASSERT_EQ(rows->size(), 3u);
  EXPECT_DOUBLE_EQ((*rows)[0].usd(1e9), 0.6);
  EXPECT_DOUBLE_EQ((*rows)[1].usd(1e9), 0.6 * 20 / 3600);
  EXPECT_DOUBLE_EQ((*rows)[2].usd(1e9), 0);
}

TEST_F(LedgerTest, AFileOfVersionOneIsUpgraded) {
  std::filesystem::create_directories(folder);
  sqlite3* db = nullptr;
  ASSERT_EQ(sqlite3_open(path.c_str(), &db), SQLITE_OK);
  ASSERT_EQ(
      sqlite3_exec(db,
                   "CREATE TABLE instances (id INTEGER PRIMARY KEY AUTOINCREMENT, run TEXT NOT NULL, offer TEXT NOT "
                   "NULL, provider TEXT NOT NULL, instance TEXT NOT NULL DEFAULT '', state TEXT NOT NULL, "
                   "usd_per_hour REAL NOT NULL, upload_usd_per_gb REAL, download_usd_per_gb REAL, uploaded_bytes "
                   "INTEGER NOT NULL DEFAULT 0, downloaded_bytes INTEGER NOT NULL DEFAULT 0, intended_unix_s REAL "
                   "NOT NULL, running_unix_s REAL, ended_unix_s REAL, note TEXT NOT NULL DEFAULT '');"
                   "INSERT INTO instances (run, offer, provider, state, usd_per_hour, intended_unix_s, "
                   "running_unix_s) VALUES ('run-a', 'o1', 'local', 'running', 0.6, 1000, 1010);"
                   "PRAGMA application_id = 1164142668; PRAGMA user_version = 1",
                   nullptr, nullptr, nullptr),
      SQLITE_OK);
  sqlite3_close(db);
  Ledger ledger = open();
  ASSERT_EQ(ledger.orphans().size(), 1u);
  EXPECT_EQ(ledger.orphans()[0].last_known_unix_s(), 1010);
  ASSERT_TRUE(ledger.record_signs_of_life(std::vector<LedgerSignOfLife>{{ledger.orphans()[0].id, {1}, {2}}}, 2000));
  const LedgerRow row = (*ledger.rows())[0];
  EXPECT_EQ(row.alive_unix_s, 2000);
  EXPECT_EQ(row.label, "run-a/1");              // what its provider was told
  EXPECT_DOUBLE_EQ(row.usd(1000 + 3600), 0.6);  // its price has become an interval
  ASSERT_EQ(ledger.states()->size(), 2u);       // and its dates a history
  EXPECT_EQ((*ledger.states())[1].unix_s, 1010);
  EXPECT_TRUE(ledger.record_price(row.id, 1.2, 1000 + 3600));
  EXPECT_DOUBLE_EQ((*ledger.rows())[0].usd(1000 + 7200), 1.8);
}

TEST_F(LedgerTest, CostIsTheSumOfIntervalsTimesTheirPrices) {
  Ledger ledger = open();
  const auto a = ledger.record_intent(offer("a"), 0, 0.33);  // a bid, and 0.10 for the disk
  ASSERT_TRUE(ledger.record_start(a->id, "vast:1", 60));
  ASSERT_TRUE(ledger.record_price(a->id, 0.61, 1234));
  ASSERT_TRUE(ledger.record_price(a->id, 0.47, 5000));
  EXPECT_DOUBLE_EQ(ledger.totals(5000)->usd_per_hour, 0.47);
  ASSERT_TRUE(ledger.record_end(a->id, "outbid", 9000));
  EXPECT_FALSE(ledger.record_price(a->id, 9.99, 9001));  // it is over
  const double usd = 1234 / 3600. * 0.43 + (5000 - 1234) / 3600. * 0.61 + 4000 / 3600. * 0.47;
  EXPECT_NEAR((*ledger.rows())[0].usd(1e9), usd, 1e-12);
  // The wall clock goes back: no interval has a negative cost, and no price is forgotten.
  const auto b = ledger.record_intent(offer("b"), 10'000);
  ASSERT_TRUE(ledger.record_price(b->id, 1, 9000));
  EXPECT_DOUBLE_EQ((*ledger.rows())[1].usd(9000 + 3600), 1);
  EXPECT_GE((*ledger.rows())[1].usd(0), 0);
  // A price after the end does not count.
  const auto c = ledger.record_intent(offer("c"), 0);
  ASSERT_TRUE(ledger.record_price(c->id, 100, 7200));
  ASSERT_TRUE(ledger.record_end(c->id, "", 3600));
  EXPECT_DOUBLE_EQ((*ledger.rows())[2].usd(1e9), 0.6);
}

TEST_F(LedgerTest, TheHistoryAndTheReasonsCanBeRead) {
  Ledger ledger = open();
  ASSERT_TRUE(ledger.record_decision({100, "book", "12.3 of 14.0 rollouts/s for 30 s", R"({"required":14})"}));
  const auto a = ledger.record_intent(offer("a"), 100);
  ASSERT_TRUE(ledger.record_start(a->id, "x", 101));
  EXPECT_FALSE(ledger.record_start(a->id, "x", 102));
  ASSERT_TRUE(ledger.record_failure(a->id, "killed by signal 9", 103));
  const auto states = *ledger.states();
  ASSERT_EQ(states.size(), 3u);  // what was refused left no trace
  EXPECT_EQ(states[0].state, InstanceState::kIntended);
  EXPECT_EQ(states[1].unix_s, 101);
  EXPECT_EQ(states[2].state, InstanceState::kFailed);
  EXPECT_EQ(states[2].note, "killed by signal 9");
  const auto decisions = *ledger.decisions();
  ASSERT_EQ(decisions.size(), 1u);
  EXPECT_EQ(decisions[0].what, "book");
  EXPECT_EQ(decisions[0].numbers, R"({"required":14})");
  EXPECT_TRUE(open("run-b").decisions()->empty());
}

TEST_F(LedgerTest, LaterRunsKnowAMachinesMeasurements) {
  {
    auto ledger = Ledger::open(folder / "first" / "ledger.sqlite", "first");
    const auto a = ledger->record_intent(offer("a"), 100);
    ASSERT_TRUE(ledger->record_measurement(a->id, {1.2, BitRate{5e6}, std::nullopt}, 200));
    ASSERT_TRUE(ledger->record_measurement(a->id, {std::nullopt, std::nullopt, BitRate{9e6}}, 300));
    EXPECT_EQ(ledger->record_measurement(99, {}, 300).error().code, Code::kNotFound);
    EXPECT_EQ((*ledger->rows())[0].measured_rollouts_per_s, 1.2);
    const auto b = ledger->record_intent(offer("b"), 150);
    ASSERT_TRUE(ledger->record_failure(b->id, "never started", 160));
  }
  {  // It ran for two hours, and then was no more.
    auto ledger = Ledger::open(folder / "second" / "ledger.sqlite", "second");
    for (const char* id : {"a", "b"}) {
      Offer rented = offer(id);
      if (id[0] == 'a') rented.engine = "vllm";
      const auto row = ledger->record_intent(rented, 0);
      ASSERT_TRUE(ledger->record_start(row->id, id, 100));
      const LedgerDecision lost{7200, "lost", "outbid", fmt::format(R"({{"row":{},"joined":true}})", row->id)};
      EXPECT_TRUE(id[0] == 'a' || ledger->record_decision(lost));
      ASSERT_TRUE(ledger->record_end(row->id, "", 7300));
    }
    const auto hosts = *ledger->hosts();  // the newest first
    ASSERT_EQ(hosts.size(), 2u);
    EXPECT_EQ(hosts[0].hours, 2);
    EXPECT_TRUE(hosts[0].lost);
    EXPECT_FALSE(hosts[1].lost);
    EXPECT_EQ(hosts[0].engine, "");
    EXPECT_EQ(hosts[1].engine, "vllm") << "only its runs' measurements correct predictions of that engine";
    // A machine whose worker never joined says nothing about how long hosts last.
    const auto c = ledger->record_intent(offer("c"), 0);
    ASSERT_TRUE(ledger->record_start(c->id, "c", 100));
    ASSERT_TRUE(ledger->record_decision({300, "lost", "late", fmt::format(R"({{"row":{},"joined":false}})", c->id)}));
    const auto d = ledger->record_intent(offer("d"), 0);  // as earlier versions recorded it
    ASSERT_TRUE(ledger->record_start(d->id, "d", 100));
    ASSERT_TRUE(ledger->record_decision(
        {300, "lost", "its worker has not joined within 1 min", fmt::format(R"({{"row":{}}})", d->id)}));
    for (const LedgerHost& host : *ledger->hosts()) EXPECT_EQ(host.lost, host.host == "host-b") << host.host;
  }
  std::filesystem::remove_all(folder / "second");
  std::filesystem::create_directories(folder / "broken");
  std::ofstream(folder / "broken" / "ledger.sqlite")
      << "this is not a database, and it is long enough to be looked at as one";
  const auto hosts = known_hosts(folder);
  ASSERT_EQ(hosts.size(), 2u);
  EXPECT_EQ(hosts[0].host, "host-a");
  EXPECT_EQ(hosts[0].run, "first");
  EXPECT_EQ(hosts[0].promised_rollouts_per_s, 2);
  EXPECT_EQ(hosts[0].measured_rollouts_per_s, 1.2);
  EXPECT_EQ(hosts[0].up, BitRate{5e6});
  EXPECT_EQ(hosts[0].down, BitRate{9e6});
  EXPECT_FALSE(hosts[0].lost);
  EXPECT_FALSE(hosts[1].lost);  // it was never rented
  EXPECT_TRUE(known_hosts(folder / "nowhere").empty());
}

TEST_F(LedgerTest, ChargesOfADayReplaceEarlierOnes) {
  Ledger ledger = open();
  const auto a = ledger.record_intent(offer("a"), 100), b = ledger.record_intent(offer("b"), 100);
  const std::vector<LedgerCharge> first{{a->id, 0, 1.5, 1, 0.5}, {a->id, 86400, 0.25, 0.25, 0}, {b->id, 0, 2, 2, 0}};
  ASSERT_TRUE(ledger.record_charges(first, LedgerCredit{"vast", 30, 200}, 200));
  const std::vector<LedgerCharge> later{{a->id, 86400, 0.75, 0.5, 0.25}};
  ASSERT_TRUE(ledger.record_charges(later, LedgerCredit{"vast", 29, 300}, 300));
  const std::vector<LedgerCharge> strange{{b->id, 86400, 9, 9, 0}, {999, 0, 1, 1, 0}};
  EXPECT_EQ(ledger.record_charges(strange, std::nullopt, 400).error().code, Code::kNotFound);  // none of them
  const auto charges = *ledger.charges();
  ASSERT_EQ(charges.size(), 3u);
  EXPECT_EQ(charges[0].usd, 1.5);
  EXPECT_EQ(charges[1].usd, 0.75);
  EXPECT_EQ(charges[1].usd_traffic, 0.25);
  EXPECT_EQ(charges[2].row, b->id);
  ASSERT_EQ(ledger.credits()->size(), 1u);
  EXPECT_EQ(ledger.credits()->front().usd, 29);
}

TEST_F(LedgerTest, AnInstanceThatNoRowKnowsGetsOne) {
  Ledger ledger = open();
  const auto asked = ledger.record_intent(offer("a"), 100);
  // The answer to the request was lost, and the ledger finds the instance by its label.
  const auto same = ledger.record_found_instance("vast", "vast:1", asked->label, 0.7, 200);
  ASSERT_TRUE(same);
  EXPECT_EQ(same->id, asked->id);
  EXPECT_EQ(same->state, InstanceState::kRunning);
  EXPECT_EQ(same->usd_per_hour, 0.7);
  EXPECT_EQ(ledger.record_found_instance("vast", "vast:1", asked->label, 0.7, 210)->id, asked->id);
  // A second instance under the same label has cost at most as long as the first.
  const auto second = ledger.record_found_instance("vast", "vast:2", asked->label, 0.9, 300);
  ASSERT_TRUE(second);
  EXPECT_NE(second->id, asked->id);
  EXPECT_EQ(second->label, asked->label);
  EXPECT_EQ(second->intended_unix_s, 100);
  EXPECT_EQ(ledger.totals(300)->running, 2u);
}

TEST_F(LedgerTest, RunsOfOneNameInTwoPlacesHaveLabelsOfTheirOwn) {
  Ledger here = open("same");
  auto there = Ledger::open(folder / "other.sqlite", "same");
  EXPECT_NE(here.label_prefix(), there->label_prefix());
  EXPECT_EQ(open("same").label_prefix(), here.label_prefix());
}

TEST_F(LedgerTest, OrphansOfEveryRunAreListedAtOpenAndCanBeSettled) {
  std::int64_t intended = 0, running = 0;
  {
    Ledger ledger = open("run-a");
    EXPECT_TRUE(ledger.orphans().empty());
    intended = ledger.record_intent(offer("a"), 1)->id;
    running = ledger.record_intent(offer("b"), 2)->id;
    const auto ended = ledger.record_intent(offer("c"), 3)->id;
    ASSERT_TRUE(ledger.record_start(running, "local:9:9", 4));
    ASSERT_TRUE(ledger.record_end(ended, "", 5));
    EXPECT_TRUE(ledger.orphans().empty());
  }
  Ledger next = open("run-b");
  ASSERT_EQ(next.orphans().size(), 2u);
  EXPECT_EQ(next.orphans()[0].id, intended);
  EXPECT_EQ(next.orphans()[1].instance, "local:9:9");
  EXPECT_EQ(next.orphans()[1].run, "run-a");
  EXPECT_TRUE(next.record_end(running, "found at start, stopped", 10));
  EXPECT_TRUE(next.record_failure(intended, "never started", 10));
  EXPECT_TRUE(next.rows()->empty());  // the rows of this run only
  EXPECT_EQ(next.totals(10)->usd, 0);
  EXPECT_TRUE(open("run-c").orphans().empty());
}

TEST_F(LedgerTest, IntendedRentalsSurviveTheKillOfTheWriter) {
  int ready[2];
  ASSERT_EQ(pipe(ready), 0);
  const pid_t child = fork();
  if (child == 0) {
    auto ledger = Ledger::open(path, "killed");
    if (!ledger) _exit(1);
    const auto first = ledger->record_intent(offer("asked"), 100);
    const auto second = ledger->record_intent(offer("started"), 101);
    if (!first || !second || !ledger->record_start(second->id, "local:5:5", 102)) _exit(2);
    if (write(ready[1], "x", 1) != 1) _exit(3);
    while (true) pause();
  }
  char byte = 0;
  close(ready[1]);
  ASSERT_EQ(read(ready[0], &byte, 1), 1);
  close(ready[0]);
  ASSERT_EQ(kill(child, SIGKILL), 0);
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSIGNALED(status));
  Ledger ledger = open("next");
  ASSERT_EQ(ledger.orphans().size(), 2u);
  EXPECT_EQ(ledger.orphans()[0].offer, "asked");
  EXPECT_EQ(ledger.orphans()[0].state, InstanceState::kIntended);
  EXPECT_THAT(ledger.orphans()[0].label, testing::MatchesRegex("killed\\.[0-9a-f]{8}/1"));
  EXPECT_EQ(ledger.orphans()[1].state, InstanceState::kRunning);
  EXPECT_EQ(ledger.orphans()[1].instance, "local:5:5");
}

TEST_F(LedgerTest, ForeignFilesAreRefusedAndLeftAlone) {
  std::filesystem::create_directories(folder);
  std::ofstream(path) << "this is not a database, and it is long enough to be looked at as one";
  auto text = Ledger::open(path, "r");
  ASSERT_FALSE(text);
  EXPECT_EQ(text.error().code, Code::kCorrupt) << text.error().message();
  EXPECT_THAT(text.error().detail, HasSubstr(path.string()));

  const auto other = folder / "other.sqlite";
  sqlite3* db = nullptr;
  ASSERT_EQ(sqlite3_open(other.c_str(), &db), SQLITE_OK);
  ASSERT_EQ(sqlite3_exec(db, "CREATE TABLE t (x)", nullptr, nullptr, nullptr), SQLITE_OK);
  sqlite3_close(db);
  EXPECT_THAT(Ledger::open(other, "r").error().detail, HasSubstr("not a ledger"));

  const auto later = folder / "later.sqlite";
  ASSERT_TRUE(Ledger::open(later, "r"));
  ASSERT_EQ(sqlite3_open(later.c_str(), &db), SQLITE_OK);
  ASSERT_EQ(sqlite3_exec(db, "PRAGMA user_version = 6", nullptr, nullptr, nullptr), SQLITE_OK);
  sqlite3_close(db);
  EXPECT_THAT(Ledger::open(later, "r").error().detail, HasSubstr("version 6"));

  EXPECT_EQ(Ledger::open("/proc/nowhere/ledger.sqlite", "r").error().code, Code::kNotFound);
  EXPECT_EQ(Ledger::open(path, "").error().code, Code::kInvalid);
}

TEST_F(LedgerTest, IsWrittenAheadAndSynchronously) {
  Ledger ledger = open();
  ASSERT_TRUE(ledger.record_intent(offer(), 1));
  EXPECT_TRUE(std::filesystem::exists(path.string() + "-wal"));
}

}  // namespace
}  // namespace echoline::provisioner
