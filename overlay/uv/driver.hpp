// Runs one protocol core over libuv: one loop, one thread, TLS over TCP, a folder on disk. The driver itself only
// carries events to the core and performs the core's actions; its parts hold the state. Internal to overlay/uv.
#pragma once
#include <functional>
#include <memory>

#include "overlay/core.hpp"
#include "overlay/relay/relay_link.hpp"
#include "overlay/uv/bundle.hpp"
#include "overlay/uv/connections.hpp"
#include "overlay/uv/dialler.hpp"
#include "overlay/uv/disk.hpp"
#include "overlay/uv/downloads.hpp"
#include "overlay/uv/listener.hpp"
#include "overlay/uv/loop_thread.hpp"
#include "overlay/uv/sessions.hpp"

namespace echoline::overlay {

struct DriverOptions {
  std::optional<Endpoint> bind;  // absent: this node only dials
  trust::SigningKey key;
  Sessions::Authority authority;
  std::string run_id;                // empty: any run of the authority
  bool admit_anonymous = false;      // accept machines that enrol
  std::unique_ptr<Disk> disk;        // null: none
  std::uint16_t preferred_port = 0;  // used instead of port 0 while it is free
  ConnectionLimits limits = ConnectionLimits::of(/*files=*/1024);
  // The bundle for new machines, and the gate that admits them; both or neither.
  std::optional<BundleFile> bundle{};
  std::optional<BundleGate> gate{};
  std::optional<relay::LinkOptions> relay{};  // through which peers reach this node as well
};

class Driver final : private SocketEvents {
 public:
  // Bytes read from one connection before the next connection's turn.
  static constexpr std::size_t kReadBytes = 256 * 1024;

  // Binds and listens; nothing runs yet. kInvalid if the port is in use or the host has no address.
  static Result<std::unique_ptr<Driver>> open(DriverOptions options);
  ~Driver() override;  // after run(), call stop() first
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;

  Endpoint endpoint() const { return listener_.endpoint(); }
  // Wall-clock seconds at TimePoint zero, for CoreOptions.
  double unix_origin_s() const { return loop_.unix_origin_s(); }
  // Starts the loop thread and runs `start` on it first. `core` must exist until stop() has returned. `to_application`
  // gets every action that concerns neither connections nor the disk.
  void run(Core& core, std::function<void(const Action&)> to_application, std::function<void(TimePoint)> start);
  // Runs `work` on the loop thread, in order. False if the loop is not running.
  bool post(std::function<void(TimePoint)> work) { return loop_.post(std::move(work)); }
  // Like post(), and waits for the end of `work`. On the loop thread, it runs at once.
  bool post_and_wait(const std::function<void(TimePoint)>& work) { return loop_.post_and_wait(work); }
  // Runs `leave`, flushes sent bytes (for at most kFlushMax) and joins the thread. Not from the loop thread.
  void stop(std::function<void(TimePoint)> leave);
  // Loop thread, while no action is performed.
  void check() const;

 private:
  using Stage = Connection::Stage;
  static constexpr Duration kFlushMax = std::chrono::seconds(2);

  Driver(DriverOptions options, Sessions sessions);
  TimePoint now() const { return loop_.now(); }

  void on_timer(TimePoint fired_at);
  void accept(int status);
  void accept_relayed(const relay::Invitation& invitation);
  bool begin_accepted(Connection& connection);
  void on_connected(Connection& connection, int status) override;
  uv_buf_t read_buffer() override;
  void on_read(Connection& connection, ssize_t result, const char* bytes) override;
  void on_written(Connection& connection, std::size_t frame_bytes) override;
  bool read_plaintext(Connection& connection);
  void on_handshake_done(Connection& connection);
  void end_if_stopped();

  void perform_actions();  // all that the core has requested
  void perform(Action&& action);
  void send(const act::Send& send);
  void dial(const act::Dial& dial);
  void connect(Connection& connection, const Endpoint& to, const FoundAddress& found);
  void set_reading(const act::SetReading& reading);
  void apply_reading(Connection& connection);

  void flush(Connection& connection);
  void close_after_flush(Connection& connection);
  void close_at_once(Connection& connection);
  void on_lost(Connection& connection, const std::string& reason, bool corrupt = false);
  void report_lost_later(ConnId id, std::string reason);
  bool make_room();
  void arm_timer();

  // Serving the bundle (driver_bundle.cpp).
  struct BundleRead;
  void begin_request(Connection& connection, std::string request);
  bool write(Connection& connection, std::span<const std::byte> plain);
  void take_bundle_turns();
  void read_bundle(Connection& connection);
  void send_bundle(Connection& connection, std::span<const std::byte> block, std::int64_t result);

  LoopThread loop_;  // outlives the handles of the others
  std::unique_ptr<Disk> disk_;
  std::optional<BundleFile> bundle_;

  // Loop thread only.
  Core* core_ = nullptr;
  std::function<void(const Action&)> to_application_;
  Sessions sessions_;
  Listener listener_;
  Dialler dialler_;
  Connections connections_;
  std::optional<Downloads> downloads_;
  std::optional<relay::RelayLink> relay_;
  std::vector<char> read_buffer_;
  // Events found while actions were being performed. They run afterwards, because the core cannot take them meanwhile.
  std::vector<std::function<void()>> deferred_events_;
  bool is_performing_ = false;
  bool is_reading_ = true;      // the core reads from its connections
  TimePoint stop_at_ = kNever;  // not kNever: the driver is stopping
};

}  // namespace echoline::overlay
