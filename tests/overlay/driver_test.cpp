// The driver with cores that only do what a test needs.
#include "overlay/uv/driver.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <future>

#include "base/log.hpp"
#include "tests/overlay/made.hpp"

namespace echoline::overlay {
namespace {

using testing::HasSubstr;

// Sends `message` again and again on the connection that it dials, or accepts one and never reads.
class OneSided final : public Core {
 public:
  OneSided(const trust::Authority& authority, WorkerId self, trust::SigningKey key, Slice message)
      : Core({}), message_(std::move(message)) {
    const auto kind = self == kLearnerId ? trust::PeerIdentity::Kind::kLearner : trust::PeerIdentity::Kind::kWorker;
    actions_.push_back(act::UseCertificate{
        *authority.issue({key.public_key(), kind, self, 1, SystemClock().unix_seconds(), trust::kWorkerLifetimeMax}),
        authority.certificate()});
  }
  void call(const Endpoint& to, WorkerId whom) { conn_ = dial(to, act::Service::kData, whom); }

  void on_accepted(ConnId conn, const PeerInfo&, TimePoint) override {
    actions_.push_back(act::SetReading{conn, false});
  }
  void on_connected(ConnId, TimePoint now) override { on_timer(now); }
  void on_closed(ConnId, const std::string& reason, TimePoint) override {
    conn_.reset();
    closed_.set_value(reason);
  }
  void on_frame(ConnId, Frame, TimePoint) override {}
  void on_sent(ConnId, std::size_t, TimePoint) override {}
  void on_timer(TimePoint now) override {
    if (!conn_) return;
    actions_.push_back(act::Send{*conn_, message_, {}});
    sent_ += message_.size();
    again_ = now;
  }
  TimePoint next_deadline() const override { return conn_ ? again_ : kNever; }

  std::future<std::string> closed() { return closed_.get_future(); }
  std::size_t sent() const { return sent_; }

 private:
  Slice message_;
  std::optional<ConnId> conn_;
  TimePoint again_ = kNever;
  std::size_t sent_ = 0;
  std::promise<std::string> closed_;
};

TEST(Driver, EndsWithAPeerThatNeverReads) {
  log::configure(log::Level::kError, "test");
  const trust::Authority authority = made_authority();
  const auto driver_of = [&](std::string_view name, std::optional<Endpoint> bind) {
    DriverOptions options{std::move(bind), made_key(name), authority.certificate(), "run", false, nullptr, 0};
    return Driver::open(std::move(options));
  };
  auto deaf = driver_of("worker 1", Endpoint{"127.0.0.1", 0}), speaker = driver_of("worker 2", std::nullopt);
  ASSERT_TRUE(deaf && speaker);
  OneSided listening(authority, WorkerId{1}, made_key("worker 1"), {});
  OneSided speaking(authority, WorkerId{2}, made_key("worker 2"), Slice(std::vector<std::byte>(1 << 20)));
  auto closed = speaking.closed();
  (*deaf)->run(
      listening, [](const Action&) {}, [](TimePoint) {});
  const Endpoint to = (*deaf)->endpoint();
  (*speaker)->run(
      speaking, [](const Action&) {}, [&](TimePoint) { speaking.call(to, WorkerId{1}); });
  EXPECT_THAT(closed.get(), HasSubstr("the peer does not read"));
  (*speaker)->stop([](TimePoint) {});
  (*deaf)->stop([](TimePoint) {});
  EXPECT_GE(speaking.sent(), Driver::kUnreadBytesMax);
}

}  // namespace
}  // namespace echoline::overlay
