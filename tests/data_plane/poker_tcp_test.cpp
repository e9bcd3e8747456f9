// Matches over loopback: the dealer, remote players, and players that break the protocol.
#include <gtest/gtest.h>

#include <thread>

#include "data_plane/adapters/poker/acpc_tcp.hpp"

namespace echoline::data_plane::poker {
namespace {

using namespace std::chrono_literals;

const SystemClock kClock{};
constexpr Duration kPatience = 20s;

TEST(PokerTcp, AMatchAcrossSocketsIsTheOneWithoutThem) {
  const auto play = [](bool over_sockets) {
    auto dealer = *AcpcDealer::make({.hands = 200, .seed = 3});
    const auto tight = *make_player("tight"), random = *make_player("random");
    if (!over_sockets) {
      const auto one = make_seat(*random, {}, 11), two = make_seat(*tight, {}, 12);
      EXPECT_TRUE(run_match(dealer, {one.get(), two.get()}, kPatience));
      return dealer.score_line();
    }
    const auto listener = *Listener::open("127.0.0.1", 0);
    AcpcClient client(*random, {}, 11);
    std::thread remote_player([&] {
      const auto socket = LineSocket::connect(fmt::format("localhost:{}", listener->port()), kPatience);
      ASSERT_TRUE(socket) << socket.error().message();
      const auto status = play_against(**socket, client, kPatience);
      EXPECT_TRUE(status) << status.error().message();
    });
    {
      const auto one = make_seat(*listener->accept(kClock.now() + kPatience)), two = make_seat(*tight, {}, 12);
      const auto status = run_match(dealer, {one.get(), two.get()}, kPatience);
      EXPECT_TRUE(status) << status.error().message();
    }
    remote_player.join();
    EXPECT_EQ(client.hands(), 200u);
    EXPECT_EQ(client.won(), dealer.won()[0]);
    return dealer.score_line();
  };
  EXPECT_EQ(play(true), play(false));
}

// The dealer's error if `guest` plays in seat 0.
template <class Guest>
Error error_with_guest(Guest guest, Duration patience) {
  auto dealer = *AcpcDealer::make({.hands = 2});
  const auto caller = *make_player("caller");
  const auto listener = *Listener::open("127.0.0.1", 0);
  std::thread guest_thread(
      [&] { guest(**LineSocket::connect(fmt::format("127.0.0.1:{}", listener->port()), kPatience)); });
  Status status;
  {
    const auto one = make_seat(*listener->accept(kClock.now() + kPatience)), two = make_seat(*caller, {}, 1);
    status = run_match(dealer, {one.get(), two.get()}, patience);
  }
  guest_thread.join();
  EXPECT_FALSE(status);
  return status ? Error{} : status.error();
}

// Reads until the dealer has closed or an error occurs.
void read_to_end(LineSocket& socket) {
  for (auto line = socket.receive(kClock.now() + kPatience); line && *line;)
    line = socket.receive(kClock.now() + kPatience);
}

TEST(PokerTcp, APlayerThatDoesNotPlayEndsTheMatchByName) {
  const Error silent = error_with_guest([](LineSocket& socket) { read_to_end(socket); }, 200ms);
  EXPECT_EQ(silent.code, Code::kUnavailable);
  EXPECT_NE(silent.detail.find("seat 0"), std::string::npos) << silent.detail;

  const Error gone = error_with_guest(
      [](LineSocket& socket) { (void)socket.send("VERSION:2.0.0\r\n", kClock.now() + 1s); }, kPatience);
  EXPECT_NE(gone.detail.find("has left"), std::string::npos) << gone.detail;

  const Error talks = error_with_guest(
      [](LineSocket& socket) {
        while (socket.send("# a comment, and another one\r\n", kClock.now() + kPatience)) {
        }
      },
      200ms);
  EXPECT_NE(talks.detail.find("within the deadline"), std::string::npos) << talks.detail;

  const Error endless = error_with_guest(
      [](LineSocket& socket) {
        while (socket.send(std::string(1000, 'x'), kClock.now() + kPatience)) {
        }
      },
      kPatience);
  EXPECT_EQ(endless.code, Code::kExhausted) << endless.message();

  const Error other = error_with_guest(
      [](LineSocket& socket) {
        (void)socket.send("GET / HTTP/1.1\r\n", kClock.now() + kPatience);
        read_to_end(socket);
      },
      kPatience);
  EXPECT_NE(other.detail.find("expected 'VERSION:2.0.0' first, found 'GET"), std::string::npos) << other.detail;
}

TEST(PokerTcp, AMissingDealerIsAnError) {
  for (const char* wrong : {"localhost", "localhost:", ":1", "localhost:0", "localhost:65536", "localhost:1x"})
    EXPECT_EQ(LineSocket::connect(wrong, 1s).error().code, Code::kInvalid) << wrong;
  std::uint16_t port = 0;
  {
    const auto listener = *Listener::open("127.0.0.1", 0);
    port = listener->port();
    EXPECT_FALSE(Listener::open("127.0.0.1", port));
    EXPECT_NE(listener->accept(kClock.now() + 50ms).error().detail.find("no player connected"), std::string::npos);
  }
  EXPECT_EQ(LineSocket::connect(fmt::format("127.0.0.1:{}", port), 1s).error().code, Code::kUnavailable);
  EXPECT_FALSE(Listener::open("not an address", 0));
}

}  // namespace
}  // namespace echoline::data_plane::poker
