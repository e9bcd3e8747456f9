// The parts of the service, each alone, with a run folder of their own and a clock that needs no waiting.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>

#include "learner/run_fleet.hpp"
#include "learner/run_overlay.hpp"
#include "learner/run_workers.hpp"
#include "tests/learner/rows.hpp"
#include "tests/overlay/folder.hpp"

namespace echoline::learner {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

// Two seconds pass between two calls of now().
class LeapingClock final : public Clock {
 public:
  TimePoint now() const override { return TimePoint(std::chrono::seconds(seconds_ += 2)); }
  double unix_seconds() const override { return 1.7e9; }

 private:
  mutable std::atomic<int> seconds_ = 0;
};

class RunPartsTest : public testing::Test {
 protected:
  RunPartsTest() {
    config_.run.name = "parts";
    config_.run.folder = folder_.path();
    auto journal = RunJournal::open(run_, {.is_pointless = [this] { return waiting_is_pointless_; },
                                           .keep_alive = [this](const std::string& reason) -> Status {
                                             wait_reasons_.push_back(reason);
                                             return ok();
                                           }});
    EXPECT_TRUE(journal) << journal.error().message();
    journal_ = std::move(*journal);
  }
  std::vector<std::string> events() const {
    std::vector<std::string> kinds;
    for (const auto& row : *read_json_lines(journal_->record().folder() / "events.jsonl"))
      kinds.push_back(row.at("event"));
    return kinds;
  }

  const overlay::TemporaryFolder folder_;
  RunConfig config_;
  const ServiceOptions options_;
  std::atomic<bool> stop_ = false;
  LeapingClock clock_;
  const RunHost run_{.config = config_, .options = options_, .stop = stop_, .clock = clock_};
  bool waiting_is_pointless_ = false;
  std::vector<std::string> wait_reasons_;
  const provisioner::Plan plan_;
  std::unique_ptr<RunJournal> journal_;
};

TEST_F(RunPartsTest, TheJournalWaitsForADiskThatRefuses) {
  journal_->set_step(3);
  int attempts = 0;
  const auto work = [&]() -> Status {
    if (++attempts < 3) return fail(Code::kExhausted, "write", "the disk is full");
    return ok();
  };
  EXPECT_TRUE(journal_->persist("checkpoints", work));
  EXPECT_EQ(attempts, 3);
  EXPECT_EQ(journal_->take_disk_wait(), std::chrono::seconds(2));
  EXPECT_EQ(journal_->take_disk_wait(), Duration{});
  EXPECT_THAT(wait_reasons_, ElementsAre(HasSubstr("the disk is full"), HasSubstr("the disk is full")));
  EXPECT_THAT(events(), ElementsAre("alarm", "disk_recovered"));
}

TEST_F(RunPartsTest, TheJournalDoesNotWaitInVain) {
  const auto failing = [](Code code) { return [code]() -> Status { return fail(code, "write", "x"); }; };
  EXPECT_EQ(journal_->persist("report", failing(Code::kInvalid)).error().code, Code::kInvalid);
  EXPECT_EQ(journal_->persist("report", failing(Code::kCorrupt)).error().code, Code::kCorrupt);
  EXPECT_EQ(journal_->persist("report", failing(Code::kIo)).error().code, Code::kIo) << "after a minute";
  EXPECT_FALSE(wait_reasons_.empty());
  waiting_is_pointless_ = true;
  EXPECT_EQ(journal_->persist("report", failing(Code::kExhausted)).error().code, Code::kExhausted);
  waiting_is_pointless_ = false;
  stop_ = true;
  EXPECT_EQ(journal_->persist("report", failing(Code::kExhausted)).error().code, Code::kExhausted);
}

TEST_F(RunPartsTest, WorkersAreEnteredAndRecordedOnce) {
  RunWorkers workers(run_, plan_, *journal_);
  overlay::MemberInfo ada;
  ada.id = WorkerId{1};
  ada.name = "ada\n";
  workers.on_joined(ada);
  workers.on_away(ada.id, "silent");
  workers.on_joined(ada);
  workers.on_trouble(ada.id, "a bad chunk");
  workers.on_lost(ada.id, "gone");
  workers.on_lost(ada.id, "gone");
  EXPECT_THAT(events(), ElementsAre("joined", "away", "back", "trouble", "left"));
  ASSERT_EQ(workers.roster().entries().size(), 1u);
  EXPECT_EQ(workers.roster().entries()[0].offer, "ada\\n") << "a name from another machine is made printable";
  EXPECT_EQ(workers.roster().entries()[0].presence, Presence::kLost);
  workers.roster().check();
  workers.attendance().check();
}

TEST_F(RunPartsTest, WithoutAFleetOneWorkerIsWaitedFor) {
  const RunFleet fleet(run_, plan_, *journal_);
  EXPECT_EQ(fleet.driver(), nullptr);
  EXPECT_TRUE(fleet.check_budget());
  Attendance attendance;
  std::string phase;
  const auto write_phase = [&](const std::string& new_phase) { phase = new_phase; };
  config_.fleet.join_timeout = std::chrono::seconds(1);
  const Status nobody_came = fleet.wait_for_workers(attendance, write_phase);
  EXPECT_EQ(nobody_came.error().code, Code::kUnavailable);
  EXPECT_THAT(nobody_came.error().detail, HasSubstr("no worker joined within"));
  attendance.on_joined(WorkerId{1}, "ada", 0);
  EXPECT_TRUE(fleet.wait_for_workers(attendance, write_phase));
  EXPECT_EQ(phase, "1 workers joined, waiting for 0");
}

}  // namespace
}  // namespace echoline::learner
