// One connection of the driver: its socket, its TLS session, and its stage. Internal to overlay/uv.
#pragma once
#include "overlay/action.hpp"
#include "overlay/uv/socket.hpp"
#include "overlay/uv/tls.hpp"
#include "overlay/wire/frame.hpp"

namespace echoline::overlay {

struct Connection {
  enum class Stage : std::uint8_t {
    kOpening,   // its handshake is not done; the core knows it only if the core has dialled it
    kOpen,      // the core knows it
    kFetching,  // its peer downloads the bundle; for the core, it is closed
    kLeaving,   // the core is done with it: it is flushed, then closed
  };
  // The properties of a connection that this node dials.
  struct Dialled {
    act::Service service = act::Service::kControl;
    WorkerId expected;
    std::size_t address_turn = 0;  // which of the name's addresses it dials (AddressTurns)
    std::string address;           // set when the connection attempt begins
    bool small_segments = false;
  };

  Connection(uv_loop_t& loop, SocketEvents& events, ConnId conn_id) : id(conn_id), socket(loop, events, *this) {}
  bool is(Stage stage) const { return stage_ == stage; }
  bool is_leaving() const { return is(Stage::kLeaving); }
  void move_to(Stage next) {
    constexpr StateRow kNext[] = {
        {"opening", states(Stage::kOpen, Stage::kLeaving)},
        {"open", states(Stage::kFetching, Stage::kLeaving)},
        {"fetching", states(Stage::kLeaving)},
        {"leaving", states(Stage::kLeaving)},  // closed at once, because its flush takes too long
    };
    change_state(stage_, next, kNext, "a connection");
  }
  void check() const {
    socket.check();
    ECHO_CHECK(!is(Stage::kOpen) || (tls && tls->established()), "connection {} is open without a handshake", id);
    ECHO_CHECK(!is(Stage::kFetching) || !dialled, "connection {} was dialled, and fetches the bundle", id);
    ECHO_CHECK(unproven_network.empty() || is(Stage::kOpening), "connection {} counts as unproven", id);
  }

  const ConnId id;
  std::string host;
  std::optional<Dialled> dialled;  // absent: it was accepted
  std::string relay_greeting;      // not empty: the peer reaches this node through a relay, which expects these bytes
  Socket socket;
  std::optional<TlsSession> tls;
  FrameDecoder decoder;
  bool has_received = false;    // bytes have come from the peer
  bool reading_paused = false;  // the core has stopped reading from it
  // Only the table of connections changes these.
  std::string unproven_network;  // the network for which it counts until its handshake is done
  TimePoint deadline = kNever;   // of the handshake or the flush
  bool needs_flush = false;      // listed for a flush

 private:
  Stage stage_ = Stage::kOpening;
};

}  // namespace echoline::overlay
