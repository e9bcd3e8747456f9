// A node's connections, as its core and the parts of that core use them: dial, send control messages, close. No I/O and
// no clock.
#pragma once
#include "overlay/action.hpp"
#include "overlay/pacer.hpp"
#include "overlay/uplink.hpp"
#include "overlay/wire/control.hpp"

namespace echoline::overlay {

class Transport {
 public:
  // All three must outlive the transport.
  Transport(Pacer& pacer, Uplink& uplink, std::vector<Action>& actions)
      : pacer_(pacer), uplink_(uplink), actions_(actions) {}

  // `expected`: the only node that may answer.
  ConnId dial(const Endpoint& to, act::Service service, WorkerId expected) {
    const ConnId conn{next_conn_};
    next_conn_ += 2;  // odd numbers; the driver gives accepted connections even ones
    actions_.push_back(act::Dial{conn, to, service, expected});
    return conn;
  }
  // Sends at once, without waiting for the rate limit. The message counts towards the limit, so later chunks wait.
  void send(ConnId conn, const ControlMessage& message, TimePoint now) {
    Slice frame(encode_control(message));
    bytes_sent_ += frame.size();
    pacer_.occupy({frame.size()}, now, /*busy=*/false);
    uplink_.send_now(conn, std::move(frame));
  }
  // The peer is known: frames of every type are accepted from now on.
  void admit(ConnId conn) { actions_.push_back(act::Admit{conn}); }
  void set_reading(ConnId conn, bool on) { actions_.push_back(act::SetReading{conn, on}); }
  void close(ConnId conn) { actions_.push_back(act::Close{conn}); }
  std::uint64_t bytes_sent() const { return bytes_sent_; }  // control messages

 private:
  Pacer& pacer_;
  Uplink& uplink_;
  std::vector<Action>& actions_;
  std::uint64_t bytes_sent_ = 0, next_conn_ = 1;
};

}  // namespace echoline::overlay
