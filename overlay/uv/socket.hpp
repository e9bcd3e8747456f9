// The TCP socket of one connection on libuv's loop. Internal to overlay/uv; loop thread only.
#pragma once
#include <sys/socket.h>
#include <uv.h>

#include <string>
#include <vector>

#include "base/state_table.hpp"

namespace echoline::overlay {

struct Connection;

// The events of a socket, for the owner of its connection.
class SocketEvents {
 public:
  virtual ~SocketEvents() = default;
  virtual void on_connected(Connection& connection, int status) = 0;
  // Memory for the next bytes. One buffer serves all sockets: on_read() uses it at once.
  virtual uv_buf_t read_buffer() = 0;
  // `result`: the number of bytes read, or libuv's error (below 0), which is the last event.
  virtual void on_read(Connection& connection, ssize_t result, const char* bytes) = 0;
  // Frame bytes that flush() did not report, because the system took them later.
  virtual void on_written(Connection& connection, std::size_t frame_bytes) = 0;
};

// Sets the options of a connected socket: no delay, few unsent bytes, congestion control. `bulk`: the connection
// carries much data, in either direction.
void tune(uv_tcp_t& tcp, bool bulk);

class Socket {
 public:
  // Limit on bytes that wait for the peer to read them.
  static constexpr std::size_t kUnreadBytesMax = 16 * 1024 * 1024;

  struct Flushed {
    bool all = false;             // the block was not empty, and the system took all of it
    std::size_t frame_bytes = 0;  // plaintext bytes of the block's frames, if `all`; else see on_written()
    std::string failure;          // not empty: the connection is lost
  };

  // `connection` holds this socket; close() deletes it.
  Socket(uv_loop_t& loop, SocketEvents& events, Connection& connection);
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;

  // Return libuv's error, or 0.
  int accept(uv_stream_t* listener, sockaddr_storage& peer);
  // `small_segments`: limits the TCP segments to a size that passes paths which drop large packets.
  int connect(const sockaddr_storage& address, bool small_segments);
  void tune(bool bulk) { overlay::tune(tcp_, bulk); }

  void start_reading();  // no effect unless connected
  void stop_reading();

  // The encrypted bytes that leave with the next flush. The caller appends to it, and counts the frames' bytes.
  std::vector<std::byte>& block() { return block_; }
  void count_frame_bytes(std::size_t frame_bytes) { block_frame_bytes_ += frame_bytes; }
  // Passes the block to the system. A write error that comes later is not reported, because reading then fails as well.
  Flushed flush();
  bool is_writing() const { return writes_in_flight_ > 0; }

  // Ends the output. False: there is no output to end.
  bool shut_down();
  // Closes the socket, and then deletes the connection.
  void close();

  bool is_connected() const { return stage_ == Stage::kConnected; }
  int fd() const;  // -1: none
  void check() const;

 private:
  enum class Stage : std::uint8_t { kUnconnected, kConnected, kEnded };  // kEnded: the peer has ended it
  struct Write;
  void move_to(Stage to);

  SocketEvents& events_;
  uv_tcp_t tcp_{};
  uv_connect_t connect_{};
  uv_shutdown_t shutdown_{};
  Stage stage_ = Stage::kUnconnected;
  bool filled_last_buffer_ = false;  // the last read filled its buffer, so other connections are read first
  std::vector<std::byte> block_;
  std::size_t block_frame_bytes_ = 0;  // bytes of frames (plaintext) in the block
  std::size_t writes_in_flight_ = 0;   // uv_write requests
};

// Disables pacing by the kernel, by choosing another congestion control than BBR. Call before connecting, or on a
// listener before accepting. If the system's default is BBR, a timer paces the connection for its whole life. On a
// short path, this costs more than copying the bytes.
void disable_pacing(int fd);

}  // namespace echoline::overlay
