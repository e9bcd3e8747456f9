// Runs one protocol core over libuv: one loop, one thread, TLS over TCP, a folder on disk. Internal to overlay/uv.
#pragma once
#include <uv.h>

#include <atomic>
#include <functional>
#include <memory>
#include <thread>

#include "overlay/core.hpp"
#include "overlay/learner/bundle_gate.hpp"
#include "overlay/narrow_paths.hpp"
#include "overlay/uv/bundle.hpp"
#include "overlay/uv/disk.hpp"
#include "overlay/uv/driver_parts.hpp"
#include "overlay/uv/timer.hpp"
#include "overlay/uv/tls.hpp"

namespace echoline::overlay {

struct DriverOptions {
  std::optional<Endpoint> bind;  // absent: this node only dials
  trust::SigningKey key;
  std::variant<trust::Hash, std::vector<std::byte>> authority;  // its fingerprint, or its certificate
  std::string run_id;                                           // empty: any run of the authority
  bool admit_anonymous = false;                                 // accept machines that enrol
  std::unique_ptr<Disk> disk;                                   // null: none
  std::uint16_t preferred_port = 0;                             // used instead of port 0 while it is free
  ConnectionLimits limits = ConnectionLimits::of(1024);
  // The bundle for new machines, and the gate that admits them; both or neither.
  std::optional<BundleFile> bundle{};
  std::optional<BundleGate> gate{};
};

class Driver {
 public:
  // Limit on bytes that wait for one peer to read them. Above it, the connection ends.
  static constexpr std::size_t kUnreadBytesMax = 16 * 1024 * 1024;
  // Bytes read from one connection before the next connection's turn.
  static constexpr std::size_t kReadBytes = 256 * 1024;

  // Binds and listens; nothing runs yet. kInvalid if the port is in use or the host has no address.
  static Result<std::unique_ptr<Driver>> open(DriverOptions options);
  ~Driver();  // after run(), call stop() first
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;

  Endpoint endpoint() const { return endpoint_; }
  // Wall-clock seconds at TimePoint zero, for CoreOptions.
  double unix_origin_s() const;
  // Starts the loop thread and runs `start` on it first. `to_application` gets every action that concerns neither
  // connections nor the disk.
  void run(Core& core, std::function<void(const Action&)> to_application, std::function<void(TimePoint)> start);
  // Runs `work` on the loop thread, in order. False if the loop is not running.
  bool post(std::function<void(TimePoint)> work);
  // Like post(), and waits for the end of `work`. On the loop thread, it runs at once.
  bool post_and_wait(const std::function<void(TimePoint)>& work);
  // Runs `leave`, flushes sent bytes (for at most kFlushMax) and joins the thread. Not from the loop thread.
  void stop(std::function<void(TimePoint)> leave);

 private:
  static constexpr Duration kFlushMax = std::chrono::seconds(2);
  // A timer this late means that the process or machine was stopped.
  static constexpr Duration kLate = std::chrono::seconds(1);
  static constexpr Duration kNoFilesPause = std::chrono::seconds(1);  // without accepting, after running out of files
  static constexpr std::size_t kAddressesMax = 16;                    // addresses tried per host name
  static constexpr std::size_t kNamesMax = 1024;

  // State of a connection that fetches the bundle. The core does not know the connection.
  struct Download {
    std::uint64_t at = 0;
    bool turn = false, reading = false;
    TimePoint not_before{};
  };
  struct Connection {
    Driver* driver = nullptr;
    ConnId id;
    std::string host;
    bool dialled = false;
    act::Service service = act::Service::kControl;
    WorkerId expected;
    uv_tcp_t tcp{};
    uv_connect_t connect{};
    uv_shutdown_t shutdown{};
    std::optional<TlsSession> tls;
    FrameDecoder decoder;
    std::vector<std::byte> block;  // encrypted; written once the actions are done
    std::size_t block_plain = 0;   // bytes of frames in the block
    enum class Stage : std::uint8_t {
      kOpening,  // the core does not know it yet, or has only dialled it
      kOpen,     // the core knows it
      kLeaving,  // the core is done with it: flush, then close
    } stage = Stage::kOpening;
    std::string unproven_from;  // the network it counts for until its handshake is done
    bool heard = false;         // bytes have come from it
    std::optional<Download> download;
    bool readable = false;      // connected, and the peer has not ended it
    bool held = false;          // the core has stopped reading from it
    bool dirty = false;         // listed in dirty_
    bool had_its_turn = false;  // its last read filled the buffer
    std::string dialled_at;     // the address, once it is connected to
    bool small_segments = false;
    std::size_t turn = 0;         // index into the addresses of the dialled name
    std::size_t writing = 0;      // uv_write requests in flight
    TimePoint deadline = kNever;  // of the handshake or the flush
    bool leaving() const { return stage == Stage::kLeaving; }
    // Enters a later stage (checked).
    void move(Stage to) {
      ECHO_CHECK(to >= stage, "connection {}: from stage {} to {}", id, static_cast<int>(stage), static_cast<int>(to));
      stage = to;
    }
  };
  // The listening socket and libuv's handle on it. The socket stays open while no connection is accepted.
  struct Listener {
    int fd = -1;
    uv_tcp_t* handle = nullptr;
    TimePoint again_at = kNever;
  };
  struct Write;
  struct Lookup;
  struct BundleRead;

  explicit Driver(DriverOptions options) : options_(std::move(options)) {}
  TimePoint now() const { return clock_.now(); }
  Status listen();
  void use_certificate(const act::UseCertificate& use);
  void drain();
  void perform(Action&& action);
  void send(const act::Send& send);
  void flush(Connection& c);
  void dial(const act::Dial& dial);
  void looked_up(const act::Dial& dial, int status, const addrinfo* found);
  void connect(Connection& c, const Endpoint& to, const sockaddr_storage& address);
  Status start_listening();
  void stop_listening();
  void accept(int status);
  bool make_room();
  void proven(Connection& c);
  void opened(Connection& c);
  void leave(Connection& c);
  void destroy(Connection& c);
  void lost(Connection& c, const std::string& reason, bool corrupt = false);
  void lost_later(ConnId id, std::string reason);
  void set_reading(Connection& c);
  void set_deadline(Connection& c, TimePoint at);
  void on_read(Connection& c, ssize_t n, const uv_buf_t* buffer);
  bool on_plaintext(Connection& c);
  void begin_request(Connection& c, std::string first);
  bool write(Connection& c, std::span<const std::byte> plain);
  void take_bundle_turns();
  void read_bundle(Connection& c);
  void send_bundle(Connection& c, std::span<const std::byte> block, std::int64_t n);
  void resume_bundles(TimePoint t);
  void arm_timer();
  void on_timer();
  void on_async();
  void end_if_stopped();
  Connection* find(ConnId id);
  Connection& add(ConnId id);

  SystemClock clock_;
  DriverOptions options_;
  Endpoint endpoint_;
  uv_loop_t loop_{};
  Listener listener_;
  Timer timer_;
  uv_async_t async_{};
  std::thread thread_;
  std::atomic<std::thread::id> loop_thread_{};
  std::vector<char> read_buffer_;

  // Loop thread only.
  Core* core_ = nullptr;
  std::optional<TlsContext> tls_, anonymous_;
  std::function<void(const Action&)> to_application_;
  std::map<ConnId, std::unique_ptr<Connection>> connections_;
  Deadlines deadlines_;
  std::vector<ConnId> dirty_;                 // connections with a non-empty block
  std::vector<std::function<void()>> later_;  // events found while actions were being performed
  std::map<std::string, std::size_t> turns_;  // the next address to use, by dialled name
  NarrowPaths narrow_;
  UnprovenConnections unproven_;
  TimePoint armed_for_ = kNever;
  std::optional<BundleGate>& gate_ = options_.gate;
  TimePoint downloads_due_ = kNever;  // when the next waiting download may continue
  bool read_first_ = false;
  bool draining_ = false, reading_ = true;
  ConnId last_read_{};          // the connection read last
  TimePoint stop_at_ = kNever;  // not kNever: the driver is stopping
  std::uint64_t next_accepted_ = 2;

  PostedWork posted_;
};

}  // namespace echoline::overlay
