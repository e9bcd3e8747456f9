// A learner's control connection to its relay: registers the run, keeps the connection up, and passes on the relay's
// tickets. Loop thread only. Internal to overlay/.
#pragma once
#include <sys/socket.h>
#include <uv.h>

#include <array>
#include <functional>
#include <optional>
#include <string>

#include "overlay/relay/protocol.hpp"
#include "overlay/uv/dialler.hpp"

namespace echoline::overlay::relay {

// A client waits at the relay. A connection to `relay` whose first bytes are `greeting` is then joined to the client's.
struct Invitation {
  sockaddr_storage relay{};
  std::string greeting;
  std::string client_host;  // as the relay states it
};

// After a loss, it connects again after 0.5 s, then after twice as long each time, at most 15 s. The run goes on
// meanwhile; connections that the relay has joined end with the relay.
class RelayLink {
 public:
  static constexpr Duration kRetryMin = std::chrono::milliseconds(500), kRetryMax = std::chrono::seconds(15);

  RelayLink(uv_loop_t& loop, LinkOptions options, std::function<void(const Invitation&)> on_invitation);
  ~RelayLink();  // call close() and run the loop before
  RelayLink(const RelayLink&) = delete;
  RelayLink& operator=(const RelayLink&) = delete;

  void start();
  void close();
  bool is_registered() const { return stage_ == Stage::kRegistered; }

 private:
  enum class Stage : std::uint8_t { kIdle, kConnecting, kGreeted, kAnswered, kRegistered, kClosed };
  struct Socket;
  void connect();
  void on_address(const FoundAddress& found);
  void on_connected(int status);
  void on_read(ssize_t size);
  Status handle(ControlFrame frame);
  void on_timer();
  void arm(Duration after);
  void write(std::string bytes);
  void on_lost(const std::string& why);
  void drop_socket();

  uv_loop_t& loop_;
  LinkOptions options_;
  std::function<void(const Invitation&)> on_invitation_;
  Dialler dialler_;
  uv_timer_t* timer_;         // freed by its close callback
  Socket* socket_ = nullptr;  // the same
  Stage stage_ = Stage::kIdle;
  FoundAddress address_;
  Nonce nonce_{};
  std::string relay_nonce_;  // as much of it as has arrived
  std::optional<ControlFrames> frames_;
  Duration retry_after_ = kRetryMin;
  int silent_pings_ = 0;      // sent since the relay's last frame
  std::string last_trouble_;  // logged already
  std::array<char, 4096> buffer_{};
};

}  // namespace echoline::overlay::relay
