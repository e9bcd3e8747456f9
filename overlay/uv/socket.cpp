// A TCP socket: reading in turns, writing in blocks, congestion control. Called by the driver.
#include "overlay/uv/socket.hpp"

#include <netinet/tcp.h>
#include <unistd.h>

#include <cerrno>

#include "overlay/narrow_paths.hpp"
#include "overlay/uv/address.hpp"
#include "overlay/uv/connection.hpp"

namespace echoline::overlay {
namespace {

uv_stream_t* stream(uv_tcp_t& tcp) { return reinterpret_cast<uv_stream_t*>(&tcp); }
Connection& connection_of(void* data) { return *static_cast<Connection*>(data); }

// Most bytes that the system buffers for a connection beyond those in flight. Small, so that a chunk does not wait on
// one stream while another has room, nor a message behind chunks.
constexpr int kUnsentBytes = 128 * 1024;

bool use_congestion_control(int fd, std::string_view name) {
  return ::setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name.data(), static_cast<socklen_t>(name.size())) == 0;
}

// Round-trip time from which a path counts as long. On long paths, BBR is best for bulk data, if the system allows it.
// On short paths, BBR permits too few bytes in flight (twice the rate times the delay): a traffic shaper's queue alone
// holds more.
constexpr std::uint32_t kLongPathMicroseconds = 1000;

}  // namespace

void disable_pacing(int fd) { (void)(use_congestion_control(fd, "cubic") || use_congestion_control(fd, "reno")); }

// Encrypted bytes that the system did not take at once; held until it has.
struct Socket::Write {
  uv_write_t request{};
  std::vector<std::byte> block;
  std::size_t frame_bytes = 0;
};

Socket::Socket(uv_loop_t& loop, SocketEvents& events, Connection& connection) : events_(events) {
  uv_tcp_init(&loop, &tcp_);
  tcp_.data = connect_.data = &connection;
}

void Socket::move_to(Stage to) {
  constexpr StateRow kNext[] = {
      {"unconnected", states(Stage::kConnected)}, {"connected", states(Stage::kEnded)}, {"ended", 0}};
  change_state(stage_, to, kNext, "a socket");
}

int Socket::accept(uv_stream_t* listener, sockaddr_storage& peer) {
  int length = sizeof peer;
  int error = uv_accept(listener, stream(tcp_));
  if (error == 0) error = uv_tcp_getpeername(&tcp_, reinterpret_cast<sockaddr*>(&peer), &length);
  if (error == 0) move_to(Stage::kConnected);
  return error;
}

int Socket::connect(const sockaddr_storage& address, bool small_segments) {
  const int fd = ::socket(address.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd < 0) return uv_translate_sys_error(errno);
  if (const int error = uv_tcp_open(&tcp_, fd); error != 0) {
    ::close(fd);
    return error;
  }
  disable_pacing(fd);
  constexpr int kSegment = NarrowPaths::kSegmentBytes;
  if (small_segments) (void)::setsockopt(fd, IPPROTO_TCP, TCP_MAXSEG, &kSegment, sizeof kSegment);
  return uv_tcp_connect(&connect_, &tcp_, reinterpret_cast<const sockaddr*>(&address),
                        [](uv_connect_t* request, int status) {
                          Connection& connection = connection_of(request->data);
                          if (status == UV_ECANCELED) return;  // being closed
                          if (status == 0) connection.socket.move_to(Stage::kConnected);
                          connection.socket.events_.on_connected(connection, status);
                        });
}

void tune(uv_tcp_t& tcp, bool bulk) {
  uv_tcp_nodelay(&tcp, 1);
  uv_os_fd_t descriptor = -1;
  if (uv_fileno(reinterpret_cast<const uv_handle_t*>(&tcp), &descriptor) != 0) return;
  tcp_info info{};
  socklen_t size = sizeof info;
  const bool has_info = ::getsockopt(descriptor, IPPROTO_TCP, TCP_INFO, &info, &size) == 0;
  if (bulk && has_info && info.tcpi_rtt >= kLongPathMicroseconds) (void)use_congestion_control(descriptor, "bbr");
  (void)::setsockopt(descriptor, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &kUnsentBytes, sizeof kUnsentBytes);
}

int Socket::fd() const {
  uv_os_fd_t fd = -1;
  return uv_fileno(reinterpret_cast<const uv_handle_t*>(&tcp_), &fd) == 0 ? fd : -1;
}

void Socket::stop_reading() {
  if (is_connected()) uv_read_stop(stream(tcp_));
}

// libuv fills one buffer after another while more data waits. The socket takes one per turn, so that received data does
// not delay outgoing data.
void Socket::start_reading() {
  if (!is_connected()) return;
  uv_read_start(  // idempotent
      stream(tcp_),
      [](uv_handle_t* handle, std::size_t, uv_buf_t* buffer) {
        Socket& socket = connection_of(handle->data).socket;
        *buffer =
            std::exchange(socket.filled_last_buffer_, false) ? uv_buf_init(nullptr, 0) : socket.events_.read_buffer();
      },
      [](uv_stream_t* handle, ssize_t result, const uv_buf_t* buffer) {
        if (result == 0 || result == UV_ENOBUFS) return;  // no data, or another connection's turn
        Connection& connection = connection_of(handle->data);
        if (result < 0) connection.socket.move_to(Stage::kEnded);
        connection.socket.filled_last_buffer_ = result > 0 && static_cast<std::size_t>(result) == buffer->len;
        connection.socket.events_.on_read(connection, result, buffer->base);
      });
}

Socket::Flushed Socket::flush() {
  if (block_.empty()) return {};
  std::size_t bytes_written = 0;
  uv_buf_t buffer = uv_buf_init(reinterpret_cast<char*>(block_.data()), static_cast<unsigned>(block_.size()));
  if (writes_in_flight_ == 0)  // otherwise these bytes would overtake those of an earlier write
    if (const int result = uv_try_write(stream(tcp_), &buffer, 1); result > 0)
      bytes_written = static_cast<std::size_t>(result);
  const std::size_t frame_bytes = std::exchange(block_frame_bytes_, 0);
  if (bytes_written == block_.size()) {
    block_.clear();
    return {.all = true, .frame_bytes = frame_bytes, .failure = {}};
  }
  if (const std::size_t unread_bytes = tcp_.write_queue_size + block_.size() - bytes_written;
      unread_bytes > kUnreadBytesMax) {
    block_ = {};
    return {.all = false,
            .frame_bytes = 0,
            .failure = fmt::format("the peer does not read: {} bytes wait for it", unread_bytes)};
  }
  auto write = std::make_unique<Write>();
  write->frame_bytes = frame_bytes;
  write->block = std::exchange(block_, {});
  write->request.data = write.get();
  buffer = uv_buf_init(reinterpret_cast<char*>(write->block.data() + bytes_written),
                       static_cast<unsigned>(write->block.size() - bytes_written));
  const int error = uv_write(&write->request, stream(tcp_), &buffer, 1, [](uv_write_t* request, int status) {
    const std::unique_ptr<Write> done(static_cast<Write*>(request->data));
    Connection& connection = connection_of(request->handle->data);
    Socket& socket = connection.socket;
    --socket.writes_in_flight_;
    if (socket.block_.capacity() == 0) {  // its memory is used again
      done->block.clear();
      socket.block_ = std::move(done->block);
    }
    if (status == 0)
      socket.events_.on_written(connection, done->frame_bytes);  // otherwise, the read side reports the loss
  });
  if (error != 0) return {.all = false, .frame_bytes = 0, .failure = uv_strerror(error)};
  ++writes_in_flight_;
  (void)write.release();
  return {};
}

bool Socket::shut_down() {
  return is_connected() && uv_shutdown(&shutdown_, stream(tcp_), [](uv_shutdown_t*, int) {}) == 0;
}

void Socket::close() {
  uv_close(reinterpret_cast<uv_handle_t*>(&tcp_), [](uv_handle_t* handle) { delete &connection_of(handle->data); });
}

void Socket::check() const {
  ECHO_CHECK(block_frame_bytes_ <= block_.size(), "{} bytes of frames in a block of {}", block_frame_bytes_,
             block_.size());
  ECHO_CHECK(tcp_.write_queue_size == 0 || writes_in_flight_ > 0, "bytes wait for the peer without a request");
  ECHO_CHECK(tcp_.write_queue_size <= kUnreadBytesMax, "{} bytes wait for the peer", tcp_.write_queue_size);
  ECHO_CHECK(stage_ != Stage::kUnconnected || writes_in_flight_ == 0, "a write on no connection");
}

}  // namespace echoline::overlay
