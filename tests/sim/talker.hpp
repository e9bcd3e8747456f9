// A scripted core for tests of the simulated world: it dials and sends when the test says so, and records its events.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "sim/world.hpp"

namespace echoline::sim {

class Talker final : public overlay::Core {
 public:
  Talker() : Core(overlay::CoreOptions{}) {}
  double run_unix_s(TimePoint now) const override {
    return WorldOptions{}.unix_origin_s + seconds(now.time_since_epoch());
  }

  struct Received {
    ConnId conn;
    overlay::Frame frame;
    TimePoint at;
  };
  struct Event {
    ConnId conn;
    std::string what;
    TimePoint at;
  };
  std::vector<Received> received;
  std::vector<Event> events;                     // "accepted worker 3", "connected", or why a connection closed
  std::map<ConnId, std::size_t> reported_bytes;  // of sent frames that the sockets took
  std::vector<Status> saved, spooled;
  std::vector<Result<overlay::Slice>> chunk_read;

  ConnId dial_endpoint(const overlay::Endpoint& to, WorkerId expected = {},
                       overlay::act::Service service = overlay::act::Service::kControl) {
    return dial(to, service, expected);
  }
  void perform(overlay::Action action) { actions_.push_back(std::move(action)); }
  void send_frame(ConnId conn, std::size_t bytes) {
    const std::vector<std::byte> body(bytes, std::byte{7});
    perform(overlay::act::Send{conn, overlay::Slice(overlay::encode_frame(overlay::FrameType::kControl, body)), {}});
  }
  void close_connection(ConnId conn) { close(conn); }
  std::string last_event() const { return events.empty() ? "nothing" : events.back().what; }

  void on_accepted(ConnId conn, const overlay::PeerInfo& peer, TimePoint now) override {
    events.push_back({conn, "accepted " + overlay::trust::to_text(peer.identity), now});
    perform(overlay::act::Admit{conn});
  }
  void on_connected(ConnId conn, TimePoint now) override {
    events.push_back({conn, "connected", now});
    perform(overlay::act::Admit{conn});
  }
  void on_closed(ConnId conn, const std::string& reason, TimePoint now) override {
    events.push_back({conn, reason, now});
  }
  void on_frame(ConnId conn, overlay::Frame frame, TimePoint now) override {
    received.push_back({conn, std::move(frame), now});
  }
  void on_sent(ConnId conn, std::size_t bytes, TimePoint) override { reported_bytes[conn] += bytes; }
  void on_saved(const Status& status, TimePoint) override { saved.push_back(status); }
  void on_spooled(const overlay::PublicationId&, std::uint32_t, const Status& status, TimePoint) override {
    spooled.push_back(status);
  }
  void on_chunk_read(const overlay::PublicationId&, std::uint32_t, Result<overlay::Slice> data, TimePoint) override {
    chunk_read.push_back(std::move(data));
  }
  void on_timer(TimePoint) override {}
  TimePoint next_deadline() const override { return kNever; }
};

class TalkerProcess final : public Process {
 public:
  Talker& core() override { return talker_; }
  void on_action(overlay::Action&&, TimePoint) override {}

 private:
  Talker talker_;
};

// Starts a talker on a host and returns it; it lives as long as its process.
inline Talker& start_talker(World& world, HostId host) {
  auto process = std::make_unique<TalkerProcess>();
  Talker& talker = process->core();
  world.start(host, std::move(process));
  return talker;
}

}  // namespace echoline::sim
