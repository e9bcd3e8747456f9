// The driver, run with small cores written for each test.
#include "overlay/uv/driver.hpp"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <future>
#include <thread>

#include "base/files.hpp"
#include "base/log.hpp"
#include "overlay/uv/timer.hpp"
#include "tests/overlay/made.hpp"

namespace echoline::overlay {
namespace {

using testing::HasSubstr;

// A timer that counts whole milliseconds would fire at least 0.7 ms late.
TEST(Timer, IsPreciseToMicrosecondsAndNeverEarly) {
  uv_loop_t loop;
  ASSERT_EQ(uv_loop_init(&loop), 0);
  const SystemClock clock;
  Duration smallest_delay = std::chrono::hours(1);
  {
    Timer timer;
    TimePoint due;
    int fired = 0;
    timer.open(loop, [&] {
      EXPECT_GE(clock.now(), due);
      smallest_delay = std::min<Duration>(smallest_delay, clock.now() - due);
      if (++fired == 100) return timer.close();
      due = clock.now() + std::chrono::microseconds(300);
      if (fired == 99) {  // only the last call of arm() counts
        timer.arm(due + std::chrono::hours(1));
        timer.arm(kNever);
      }
      timer.arm(due);
    });
    due = clock.now() - std::chrono::seconds(1);  // already past, so it fires at once
    timer.arm(due);
    uv_run(&loop, UV_RUN_DEFAULT);
    EXPECT_EQ(fired, 100);
    timer.arm(due);  // without effect, since the timer is closed
    uv_run(&loop, UV_RUN_DEFAULT);
    EXPECT_EQ(fired, 100);
  }
  EXPECT_LT(smallest_delay, std::chrono::microseconds(500));
  EXPECT_EQ(uv_loop_close(&loop), 0);
}

// A core with a certificate and at most one dialled connection. A test overrides the callbacks that it needs.
class Idle : public Core {
 public:
  Idle(const trust::Authority& authority, WorkerId self, const trust::SigningKey& key) : Core({}) {
    const auto kind = self == kLearnerId ? trust::PeerIdentity::Kind::kLearner : trust::PeerIdentity::Kind::kWorker;
    actions_.push_back(act::UseCertificate{
        *authority.issue({key.public_key(), kind, self, 1, SystemClock().unix_seconds(), trust::kWorkerLifetimeMax}),
        authority.certificate()});
  }
  void call(const Endpoint& to, WorkerId peer) { conn_ = dial(to, act::Service::kData, peer); }

  void on_accepted(ConnId, const PeerInfo&, TimePoint) override {}
  void on_connected(ConnId, TimePoint) override {}
  void on_closed(ConnId, const std::string&, TimePoint) override {}
  void on_frame(ConnId, Frame, TimePoint) override {}
  void on_sent(ConnId, std::size_t, TimePoint) override {}
  void on_timer(TimePoint) override {}
  TimePoint next_deadline() const override { return kNever; }
  double run_unix_s(TimePoint) const override { return SystemClock().unix_seconds(); }

 protected:
  std::optional<ConnId> conn_;
};

class NeverReads final : public Idle {
 public:
  using Idle::Idle;
  void on_accepted(ConnId conn, const PeerInfo&, TimePoint) override {
    actions_.push_back(act::Admit{conn});  // data that arrives with the end of the handshake is read nevertheless
    actions_.push_back(act::SetReading{conn, false});
  }
};

// Sends the same message again and again, whether or not the peer reads.
class NeverStops final : public Idle {
 public:
  using Idle::Idle;
  void on_connected(ConnId, TimePoint now) override { on_timer(now); }
  void on_closed(ConnId, const std::string& reason, TimePoint) override {
    conn_.reset();
    closed_.set_value(reason);
  }
  void on_timer(TimePoint now) override {
    if (!conn_) return;
    actions_.push_back(act::Send{*conn_, message_, {}});
    sent_ += message_.size();
    next_send_at_ = now;
  }
  TimePoint next_deadline() const override { return conn_ ? next_send_at_ : kNever; }

  std::future<std::string> closed() { return closed_.get_future(); }
  std::size_t sent() const { return sent_; }

 private:
  static std::vector<std::byte> frames() {
    const std::vector<std::byte> one = encode_frame(FrameType::kApplication, std::vector<std::byte>(64 * 1024));
    std::vector<std::byte> all;
    for (int i = 0; i < 16; ++i) all.insert(all.end(), one.begin(), one.end());
    return all;
  }

  const Slice message_{frames()};
  TimePoint next_send_at_ = kNever;
  std::size_t sent_ = 0;
  std::promise<std::string> closed_;
};

// Keeps as much data in flight as the peer can read.
class Streams final : public Idle {
 public:
  using Idle::Idle;
  void on_connected(ConnId, TimePoint) override {
    for (int i = 0; i < 128; ++i) send_one();
  }
  void on_sent(ConnId, std::size_t bytes, TimePoint) override {
    for (bytes_taken_ += bytes; bytes_taken_ >= message_.size(); bytes_taken_ -= message_.size()) send_one();
  }

 private:
  void send_one() { actions_.push_back(act::Send{*conn_, message_, {}}); }

  const Slice message_{encode_frame(FrameType::kApplication, std::vector<std::byte>(64 * 1024))};
  std::size_t bytes_taken_ = 0;
};

// Posts work to the loop all the time, and measures the bytes that are read before each piece of work runs.
class MeasuresTurns final : public Idle {
 public:
  static constexpr std::size_t kBytesEnough = 256 << 20;

  using Idle::Idle;
  void on_accepted(ConnId conn, const PeerInfo&, TimePoint) override { actions_.push_back(act::Admit{conn}); }
  void on_frame(ConnId, Frame frame, TimePoint) override {
    bytes_ += frame.body.size();
    if (!is_posted_) {
      is_posted_ = true;
      bytes_when_posted_ = bytes_;
      driver->post([this](TimePoint) {
        is_posted_ = false;
        most_bytes_between_ = std::max(most_bytes_between_, bytes_ - bytes_when_posted_);
      });
    }
    if (bytes_ >= kBytesEnough && bytes_ - frame.body.size() < kBytesEnough) done_.set_value();
  }

  Driver* driver = nullptr;
  std::future<void> done() { return done_.get_future(); }
  std::size_t most_bytes_between() const { return most_bytes_between_; }

 private:
  bool is_posted_ = false;
  std::size_t bytes_ = 0, bytes_when_posted_ = 0, most_bytes_between_ = 0;
  std::promise<void> done_;
};

constexpr WorkerId kListener{1}, kSpeaker{2};

// Two nodes; the speaker dials the listener.
struct Pair {
  Pair() {
    log::configure(log::Level::kError, "test");
    listener = open(kListener, Endpoint{"127.0.0.1", 0});
    speaker = open(kSpeaker, std::nullopt);
  }
  std::unique_ptr<Driver> open(WorkerId id, std::optional<Endpoint> bind) const {
    return *Driver::open({std::move(bind), key_of(id), authority.certificate(), "run", false, nullptr, 0});
  }
  static trust::SigningKey key_of(WorkerId id) { return made_key(fmt::format("worker {}", id)); }
  void run(Idle& listening, Idle& speaking) {
    const auto ignore = [](const Action&) {};
    listener->run(listening, ignore, [](TimePoint) {});
    speaker->run(speaking, ignore, [&, to = listener->endpoint()](TimePoint) { speaking.call(to, kListener); });
  }
  void stop() {
    for (Driver* driver : {speaker.get(), listener.get()})
      EXPECT_TRUE(driver->post_and_wait([driver](TimePoint) { driver->check(); }));
    speaker->stop([](TimePoint) {});
    listener->stop([](TimePoint) {});
  }

  const trust::Authority authority = made_authority();
  std::unique_ptr<Driver> listener, speaker;
};

TEST(Driver, EndsWithAPeerThatNeverReads) {
  Pair pair;
  NeverReads listening(pair.authority, kListener, Pair::key_of(kListener));
  NeverStops speaking(pair.authority, kSpeaker, Pair::key_of(kSpeaker));
  auto closed = speaking.closed();
  pair.run(listening, speaking);
  EXPECT_THAT(closed.get(), HasSubstr("the peer does not read"));
  pair.stop();
  EXPECT_GE(speaking.sent(), Socket::kUnreadBytesMax);
}

// Incoming data without a pause must not delay outgoing data.
TEST(Driver, ReadsInTurnWithOtherWork) {
  Pair pair;
  MeasuresTurns listening(pair.authority, kListener, Pair::key_of(kListener));
  Streams speaking(pair.authority, kSpeaker, Pair::key_of(kSpeaker));
  listening.driver = pair.listener.get();
  auto done = listening.done();
  pair.run(listening, speaking);
  done.get();
  pair.stop();
  EXPECT_GT(listening.most_bytes_between(), 0u);
  EXPECT_LE(listening.most_bytes_between(), 2 * Driver::kReadBytes);
}

// Signals the first accepted connection.
class SignalsFirstAccept final : public Idle {
 public:
  using Idle::Idle;
  void on_accepted(ConnId, const PeerInfo&, TimePoint) override {
    if (!std::exchange(done_, true)) accepted_.set_value();
  }
  std::future<void> accepted() { return accepted_.get_future(); }

 private:
  std::promise<void> accepted_;
  bool done_ = false;
};

// While other parts of the process use up all file descriptors, the loop goes on. Afterwards it accepts the waiting
// connections.
TEST(Driver, NeitherSpinsNorEndsWithoutFileDescriptors) {
  Pair pair;
  SignalsFirstAccept listening(pair.authority, kListener, Pair::key_of(kListener));
  Idle speaking(pair.authority, kSpeaker, Pair::key_of(kSpeaker));
  auto accepted = listening.accepted();
  const auto ignore = [](const Action&) {};
  pair.listener->run(listening, ignore, [](TimePoint) {});
  ASSERT_TRUE(pair.listener->post_and_wait([](TimePoint) {}));
  std::vector<std::unique_ptr<Descriptor>> sockets, held_files;
  for (int i = 0; i < 200; ++i)
    sockets.push_back(std::make_unique<Descriptor>(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)));
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit small{std::min<rlim_t>(before.rlim_max, 600), before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &small), 0);
  // Also takes the descriptor that libuv reserves for such cases.
  std::jthread greedy([&](const std::stop_token& stop) {
    while (!stop.stop_requested())
      if (auto file = std::make_unique<Descriptor>(::open("/dev/null", O_RDONLY | O_CLOEXEC)); file->get() >= 0)
        held_files.push_back(std::move(file));
  });
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_port = htons(pair.listener->endpoint().port);
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  for (const auto& socket : sockets)
    ASSERT_EQ(::connect(socket->get(), reinterpret_cast<const sockaddr*>(&to), sizeof to), 0);
  for (int i = 0; i < 3; ++i) {
    std::promise<void> turn;
    auto its_turn = turn.get_future();
    ASSERT_TRUE(pair.listener->post([&](TimePoint) { turn.set_value(); }));
    ASSERT_EQ(its_turn.wait_for(std::chrono::seconds(60)), std::future_status::ready) << "the loop spins";
  }
  greedy.request_stop();
  greedy.join();
  held_files.clear();
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
  pair.speaker->run(speaking, ignore,
                    [&, endpoint = pair.listener->endpoint()](TimePoint) { speaking.call(endpoint, kListener); });
  EXPECT_EQ(accepted.wait_for(std::chrono::seconds(60)), std::future_status::ready);
  pair.stop();
}

}  // namespace
}  // namespace echoline::overlay
