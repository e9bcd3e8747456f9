// The parts of the driver: each alone, with its invariants and its changes of state.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "overlay/uv/address.hpp"
#include "overlay/uv/connections.hpp"
#include "overlay/uv/dialler.hpp"
#include "overlay/uv/downloads.hpp"
#include "overlay/uv/listener.hpp"
#include "overlay/uv/loop_thread.hpp"
#include "overlay/uv/sessions.hpp"
#include "tests/overlay/made.hpp"

namespace echoline::overlay {
namespace {

using std::chrono::milliseconds;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using Stage = Connection::Stage;

const TimePoint kNow = TimePoint(std::chrono::seconds(100));
constexpr double kUnix = 1.7e9;

TEST(DriverParts, PostedWorkIsTakenInOrderAndTheQueueClosesOnlyEmpty) {
  PostedWork posted;
  int woken = 0, sum = 0;
  const auto add = [&](int n) { return posted.add([&, n](TimePoint) { sum = 10 * sum + n; }, [&] { ++woken; }); };
  EXPECT_FALSE(add(1)) << "the loop does not run";
  posted.open([&](TimePoint) { sum = 1; });
  EXPECT_TRUE(add(2) && add(3));
  EXPECT_FALSE(posted.close()) << "work waits";
  for (const auto& work : posted.take()) work(TimePoint{});
  EXPECT_EQ(sum, 123);
  EXPECT_EQ(woken, 2);
  EXPECT_TRUE(posted.close());
  EXPECT_FALSE(add(4));
}

TEST(DriverParts, TheOldestConnectionOfTheFullestNetworkIsClosedFirst) {
  UnprovenConnections unproven;
  EXPECT_FALSE(unproven.oldest_of_largest_network());
  unproven.add(ConnId{2}, "a");
  unproven.add(ConnId{4}, "b");
  EXPECT_EQ(unproven.oldest_of_largest_network(), ConnId{2}) << "among equal deadlines, the oldest comes first";
  unproven.add(ConnId{6}, "b");
  EXPECT_EQ(unproven.oldest_of_largest_network(), ConnId{4});
  unproven.remove(ConnId{4}, "b");
  unproven.remove(ConnId{4}, "b");
  unproven.remove(ConnId{2}, "none");
  EXPECT_EQ(unproven.size(), 2u);
}

TEST(DriverParts, ADeadlineMovesWithItsConnection) {
  Deadlines deadlines;
  TimePoint a = kNever, b = kNever;
  deadlines.set(ConnId{1}, a, TimePoint(std::chrono::seconds(3)));
  deadlines.set(ConnId{2}, b, TimePoint(std::chrono::seconds(2)));
  EXPECT_EQ(deadlines.first(), b);
  deadlines.set(ConnId{2}, b, kNever);
  EXPECT_EQ(deadlines.first(), a);
  deadlines.set(ConnId{1}, a, kNever);
  EXPECT_EQ(deadlines.first(), kNever);
}

TEST(DriverParts, APauseIsReportedOnceAndOnlyForALateTimer) {
  PauseDetector pauses;
  EXPECT_FALSE(pauses.take(kNow)) << "it was never armed";
  pauses.arm(kNow, kNow);
  EXPECT_FALSE(pauses.take(kNow + PauseDetector::kPauseMin));
  const TimePoint late = kNow + PauseDetector::kPauseMin + milliseconds(1);
  EXPECT_EQ(pauses.take(late), late - kNow);
  EXPECT_FALSE(pauses.take(late)) << "messages were read in between";
  pauses.arm(kNow, late);  // overdue, so it fires at once
  EXPECT_FALSE(pauses.take(late + milliseconds(1)));
}

// The loop runs posted work in order, tells its owner after each piece, and ends only when no work waits.
TEST(LoopThread, RunsWorkAndItsTimerUntilItIsClosed) {
  std::string log;
  LoopThread* raw = nullptr;
  bool ending = false;
  LoopThread thread({[&](TimePoint) {
                       log += 't';
                       ending = true;
                       EXPECT_TRUE(raw->post([&](TimePoint) { log += 'l'; }));
                       EXPECT_FALSE(raw->close()) << "work waits";
                     },
                     [&](Duration) { FAIL() << "no pause is expected"; }, [&] { log += '.'; },
                     [&] { EXPECT_EQ(ending && raw->close(), ending); }});
  raw = &thread;
  EXPECT_FALSE(thread.post([](TimePoint) {})) << "it does not run";
  thread.start([&](TimePoint) { log += 's'; });
  EXPECT_TRUE(thread.is_running());
  EXPECT_TRUE(thread.post([&](TimePoint) { EXPECT_TRUE(thread.post_and_wait([&](TimePoint) { log += 'n'; })); }));
  EXPECT_TRUE(thread.post_and_wait([&](TimePoint now) {
    log += 'w';
    thread.arm(now);
  }));
  thread.join();
  EXPECT_EQ(log, "s.n.w.tl.");
  EXPECT_FALSE(thread.post([](TimePoint) {})) << "it has ended";
}

TEST(Sessions, ANodeWithoutACertificateOnlyEnrols) {
  const trust::SigningKey key = made_key("worker 1");
  const trust::Authority authority = made_authority();
  auto sessions = *Sessions::create(key, authority.certificate(), "run", false);
  EXPECT_FALSE(sessions.has_certificate());
  EXPECT_TRUE(sessions.client(act::Service::kEnrol, kLearnerId, kUnix));
  EXPECT_EQ(sessions.client(act::Service::kData, WorkerId{2}, kUnix).error().code, Code::kUnavailable);
  const auto kind = trust::PeerIdentity::Kind::kWorker;
  const act::UseCertificate use{
      *authority.issue({key.public_key(), kind, WorkerId{1}, 1, kUnix, trust::kWorkerLifetimeMax}),
      authority.certificate()};
  ASSERT_TRUE(sessions.use_certificate(use));
  EXPECT_TRUE(sessions.client(act::Service::kData, WorkerId{2}, kUnix));
  EXPECT_TRUE(sessions.server(kUnix));
  EXPECT_FALSE(sessions.use_certificate({{}, authority.certificate()}));
  EXPECT_TRUE(sessions.has_certificate()) << "the last valid certificate is kept";
}

TEST(AddressTurns, AnAddressIsKeptUntilItFails) {
  AddressTurns turns;
  EXPECT_EQ(turns.turn_of("a"), 0u);
  turns.on_failed("a", 0);
  turns.on_failed("a", 0);  // another dial to the same address
  EXPECT_EQ(turns.turn_of("a"), 1u);
  turns.on_failed("10.0.0.1", 0);
  EXPECT_EQ(turns.turn_of("10.0.0.1"), 0u);
  for (std::size_t i = 0; i <= AddressTurns::kNamesMax; ++i) turns.turn_of(std::to_string(i)), turns.check();
}

const auto kAuthority = std::make_shared<const trust::Authority>(made_authority());

// Downloads of a file of two and a half blocks.
struct Bundle {
  static constexpr std::size_t kSize = Downloads::kBlockBytes * 5 / 2;
  explicit Bundle(std::optional<BitRate> up = std::nullopt)
      : downloads(BundleGate(kAuthority, Bytes{kSize}, up), Bytes{kSize}) {}
  bool begin(ConnId conn) {
    trust::Nonce nonce{};
    nonce[0] = static_cast<std::byte>(conn.value);
    const auto token = trust::issue_token(*kAuthority, "o1", nonce, kUnix);
    const bool is_admitted =
        downloads
            .begin(conn, fmt::format("GET /bundle HTTP/1.1\r\nAuthorization: Bearer {}\r\n\r\n", token->reveal()),
                   kUnix)
            .is_admitted;
    downloads.check();
    return is_admitted;
  }
  Downloads::Step::Kind next(ConnId conn, TimePoint now = kNow) {
    step = downloads.next(conn, now);
    downloads.check();
    return step.kind;
  }
  Downloads downloads;
  Downloads::Step step;
};
using Kind = Downloads::Step::Kind;

TEST(Downloads, OneBlockAfterAnotherUntilTheEnd) {
  Bundle bundle;
  const ConnId conn{2};
  EXPECT_FALSE(bundle.downloads.begin(conn, "GET / HTTP/1.1\r\n\r\n", kUnix).is_admitted);
  EXPECT_FALSE(bundle.downloads.remove(conn)) << "refused";
  ASSERT_TRUE(bundle.begin(conn));
  EXPECT_EQ(bundle.next(conn), Kind::kNone) << "its turn has not come";
  EXPECT_THAT(bundle.downloads.take_turns(), ElementsAre(conn));
  for (std::size_t at = 0; at < Bundle::kSize; at += bundle.step.bytes) {
    ASSERT_EQ(bundle.next(conn), Kind::kRead);
    EXPECT_EQ(bundle.step.offset, at);
    const Downloads::Step reading = bundle.step;
    EXPECT_EQ(bundle.next(conn), Kind::kNone) << "a block is being read";
    bundle.step = reading;
    bundle.downloads.on_read(conn, reading.bytes, kNow);
    bundle.downloads.check();
  }
  EXPECT_EQ(bundle.next(conn), Kind::kDone);
  EXPECT_DEATH(bundle.downloads.on_read(conn, 1, kNow), "a download that is ready cannot become ready");
}

TEST(Downloads, TheNextDownloadBeginsWhenAnotherIsGone) {
  Bundle bundle;
  for (std::uint64_t i = 0; i <= BundleGate::kServedMax; ++i) ASSERT_TRUE(bundle.begin(ConnId{2 + 2 * i}));
  EXPECT_EQ(bundle.downloads.take_turns().size(), BundleGate::kServedMax);
  EXPECT_TRUE(bundle.downloads.remove(ConnId{4}));
  EXPECT_FALSE(bundle.downloads.remove(ConnId{4}));
  EXPECT_THAT(bundle.downloads.take_turns(), ElementsAre(ConnId{2 + 2 * BundleGate::kServedMax}));
  bundle.downloads.check();
}

TEST(Downloads, WaitForTheirShareOfTheUplink) {
  Bundle bundle(BitRate::from_mbit_per_s(8));
  for (const ConnId conn : {ConnId{2}, ConnId{4}}) ASSERT_TRUE(bundle.begin(conn));
  (void)bundle.downloads.take_turns();
  for (const ConnId conn : {ConnId{2}, ConnId{4}}) {
    ASSERT_EQ(bundle.next(conn), Kind::kRead);
    bundle.downloads.on_read(conn, bundle.step.bytes, kNow);
    EXPECT_EQ(bundle.next(conn), Kind::kNone);
  }
  const TimePoint first = bundle.downloads.next_due_at();
  ASSERT_LT(kNow, first);
  EXPECT_THAT(bundle.downloads.take_due(first - milliseconds(1)), IsEmpty());
  EXPECT_THAT(bundle.downloads.take_due(first), ElementsAre(ConnId{2}));
  EXPECT_LT(first, bundle.downloads.next_due_at());
  EXPECT_EQ(bundle.next(ConnId{2}, first), Kind::kRead);
  EXPECT_TRUE(bundle.downloads.remove(ConnId{4}));
  bundle.downloads.check();
  EXPECT_EQ(bundle.downloads.next_due_at(), kNever);
}

// A loop of the test's own, and sockets on it.
class OnALoop : public testing::Test, protected SocketEvents {
 protected:
  void SetUp() override { ASSERT_EQ(uv_loop_init(&loop), 0); }
  void TearDown() override {
    while (Connection* c = connections.any()) destroy(*c);
    uv_run(&loop, UV_RUN_DEFAULT);
    EXPECT_EQ(uv_loop_close(&loop), 0);
  }
  void destroy(Connection& c) {
    ASSERT_TRUE(connections.release(c));
    c.move_to(Stage::kLeaving);
    c.socket.close();
    connections.check();
  }
  Connection& add() { return connections.add_accepted(loop, *this); }
  // To the table, this is a connection after its handshake.
  Connection& add_unproven(const std::string& network, Duration until) {
    Connection& c = add();
    connections.set_unproven(c, network);
    connections.set_deadline(c, kNow + until);
    connections.check();
    return c;
  }
  void on_connected(Connection& c, int status) override {
    EXPECT_EQ(status, 0);
    connected = &c;
  }
  uv_buf_t read_buffer() override { return uv_buf_init(buffer.data(), static_cast<unsigned>(buffer.size())); }
  void on_read(Connection&, ssize_t n, const char*) override {
    if (n < 0)
      ended = true;
    else
      bytes_read += static_cast<std::size_t>(n);
  }
  void on_written(Connection&, std::size_t frame_bytes) override { written += frame_bytes; }
  template <class Condition>
  void run_until(Condition condition) {
    while (!condition()) uv_run(&loop, UV_RUN_ONCE);
  }

  uv_loop_t loop{};
  Connections connections{ConnectionLimits{.files = 8, .total = 3, .unproven = 2}};
  std::vector<char> buffer = std::vector<char>(1 << 16);
  Connection* connected = nullptr;
  std::size_t bytes_read = 0, written = 0;
  bool ended = false;
};

TEST_F(OnALoop, TheTableKnowsTheLeastValuableConnection) {
  EXPECT_EQ(connections.first_to_close(), nullptr);
  Connection &a = add_unproven("a", milliseconds(1)), &b = add_unproven("b", milliseconds(2));
  EXPECT_FALSE(connections.has_too_many_unproven() || connections.is_full());
  Connection& c = add_unproven("b", milliseconds(3));
  EXPECT_TRUE(connections.has_too_many_unproven() && connections.is_full());
  EXPECT_EQ(connections.first_to_close(), &b) << "the oldest of the network with the most";
  connections.set_proven(b);
  connections.check();
  EXPECT_EQ(connections.first_to_close(), &a);
  c.move_to(Stage::kLeaving);
  EXPECT_DEATH(connections.check(), "counts as unproven");
  connections.set_proven(c);
  connections.check();
  EXPECT_EQ(connections.first_to_close(), &c) << "it is closing already";
  EXPECT_TRUE(connections.any_is_leaving());
  EXPECT_EQ(connections.find(c.id), nullptr);
  destroy(c);
  EXPECT_FALSE(connections.any_is_leaving());
}

TEST_F(OnALoop, TheTableKeepsDeadlinesAndTurns) {
  Connection &a = add_unproven("a", milliseconds(2)), &b = add_unproven("b", milliseconds(1)), &c = add();
  EXPECT_EQ(&connections.with_first_deadline(), &b);
  connections.postpone_deadlines(milliseconds(5));
  connections.check();
  EXPECT_EQ(connections.first_deadline(), kNow + milliseconds(6));
  std::vector<ConnId> order, flushed;
  const auto note = [&](Connection& x) { order.push_back(x.id); };
  connections.set_last_read(b);
  connections.for_each_in_turn(note);
  EXPECT_THAT(order, ElementsAre(c.id, a.id, b.id));
  for (Connection* dirty : {&b, &a, &b}) connections.mark_for_flush(*dirty), connections.check();
  destroy(a);
  const auto flush = [&](Connection& x) { flushed.push_back(x.id); };
  connections.flush_marked(flush);
  connections.flush_marked(flush);
  EXPECT_THAT(flushed, ElementsAre(b.id));
  EXPECT_EQ(connections.first_deadline(), kNow + milliseconds(6));
}

TEST_F(OnALoop, AConnectionsStateOnlyAdvances) {
  Connection& c = add();
  EXPECT_DEATH(c.move_to(Stage::kFetching), "a connection that is opening cannot become fetching");
  c.move_to(Stage::kOpen);
  EXPECT_DEATH(c.check(), "open without a handshake");
  EXPECT_DEATH(c.move_to(Stage::kOpening), "cannot become opening");
  c.move_to(Stage::kFetching);
  c.check();
  EXPECT_DEATH(c.move_to(Stage::kOpen), "cannot become open");
  c.move_to(Stage::kLeaving);
}

TEST_F(OnALoop, AListenerPausesAndListensAgain) {
  int waiting = 0;
  {
    Listener listener(loop, [&](int status) { waiting += status == 0; });
    listener.check();
    ASSERT_TRUE(listener.open({"127.0.0.1", 0}, 0));
    listener.check();
    Listener second(loop, [](int) {});
    EXPECT_THAT(second.open(listener.endpoint(), 0).error().message(), HasSubstr("is in use"));
    second.check();
    Listener third(loop, [](int) {});
    ASSERT_TRUE(third.open({"127.0.0.1", 0}, listener.endpoint().port));
    EXPECT_NE(third.endpoint().port, listener.endpoint().port) << "the preferred port is not free";
    third.stop();

    listener.pause(kNow);
    listener.check();
    Connection& c = connections.add(loop, *this, ConnId{1});
    Dialler dialler(loop);
    dialler.find_address(listener.endpoint(),
                         [&](const FoundAddress& found) { EXPECT_EQ(c.socket.connect(found.address, false), 0); });
    run_until([&] { return connected == &c; });
    EXPECT_EQ(waiting, 0) << "the connection waits in the backlog";
    listener.resume(kNow + Listener::kPause - milliseconds(1));
    EXPECT_EQ(listener.resumes_at(), kNow + Listener::kPause);
    listener.resume(kNow + Listener::kPause);
    listener.check();
    EXPECT_EQ(listener.resumes_at(), kNever);
    run_until([&] { return waiting == 1; });
    listener.stop();
    listener.check();
    EXPECT_DEATH(listener.pause(kNow), "a listener that is stopped cannot become paused");
  }
}

TEST_F(OnALoop, ADialledNameKeepsItsTurn) {
  Dialler dialler(loop);
  const auto find = [&](const std::string& host) {
    FoundAddress found;
    bool done = false;
    dialler.find_address({host, 7}, [&](const FoundAddress& f) { found = f, done = true; });
    run_until([&] { return done; });
    dialler.check();
    return found;
  };
  const FoundAddress first = find("localhost");
  ASSERT_EQ(first.failure, "");
  EXPECT_EQ(to_endpoint(first.address).port, 7);
  dialler.turns().on_failed("localhost", first.turn);
  EXPECT_EQ(find("localhost").turn, first.turn + 1);
  EXPECT_EQ(to_endpoint(find("10.0.0.1").address).host, "10.0.0.1");
  EXPECT_THAT(find(std::string(300, 'x')).failure, HasSubstr("xxx: "));
}

TEST_F(OnALoop, ASocketKeepsBytesThatTheSystemDoesNotTake) {
  Connection &from = connections.add(loop, *this, ConnId{1}), &to = add();
  Listener listener(loop, [&](int status) {
    ASSERT_EQ(status, 0);
    sockaddr_storage peer{};
    ASSERT_EQ(to.socket.accept(listener.stream(), peer), 0);
    listener.stop();
  });
  ASSERT_TRUE(listener.open({"127.0.0.1", 0}, 0));
  EXPECT_FALSE(from.socket.shut_down()) << "it is not connected";
  Dialler(loop).find_address(
      listener.endpoint(), [&](const FoundAddress& found) { EXPECT_EQ(from.socket.connect(found.address, true), 0); });
  run_until([&] { return connected == &from && to.socket.is_connected(); });
  from.socket.tune(true);
  const auto send = [&](std::size_t bytes) {
    from.socket.block().resize(bytes);
    from.socket.count_frame_bytes(bytes);
    from.socket.check();
    return from.socket.flush();
  };
  std::size_t sent = 100;
  const Socket::Flushed small = send(sent);
  EXPECT_TRUE(small.all && small.frame_bytes == sent);
  EXPECT_FALSE(from.socket.flush().all) << "an empty block";
  std::size_t waits = 0;
  for (; waits <= Socket::kUnreadBytesMax / 2; waits += 1 << 20) EXPECT_EQ(send(1 << 20).failure, "");
  EXPECT_TRUE(from.socket.is_writing());
  EXPECT_EQ(written, 0u);
  from.socket.check();
  EXPECT_THAT(send(Socket::kUnreadBytesMax).failure, HasSubstr("the peer does not read"));
  to.socket.start_reading();
  run_until([&] { return !from.socket.is_writing(); });
  from.socket.check();
  EXPECT_TRUE(from.socket.shut_down());
  run_until([&] { return ended; });
  EXPECT_EQ(bytes_read, sent + waits);
  EXPECT_LE(written, waits);
  EXPECT_FALSE(to.socket.is_connected());
}

}  // namespace
}  // namespace echoline::overlay
