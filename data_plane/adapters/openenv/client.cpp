// Implements Client with Boost.Beast: one thread runs an io_context, and each Session is a WebSocket on it.
#include "data_plane/adapters/openenv/client.hpp"

#include <openssl/ssl.h>

#include <boost/asio/connect.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/ssl/context.hpp>
#include <boost/asio/ssl/host_name_verification.hpp>
#include <boost/asio/ssl/stream.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/beast/core/buffers_to_string.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/websocket.hpp>
#include <thread>

namespace echoline::data_plane::openenv {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace websocket = beast::websocket;
using boost::system::error_code;
using tcp = asio::ip::tcp;

// A WebSocket. Its methods are called on the client's thread only.
class Session : public std::enable_shared_from_this<Session> {
 public:
  virtual ~Session() = default;
  virtual void ask(std::string message, Client::AnswerHandler handler) = 0;
  virtual void end(std::function<void()> then) = 0;
};

namespace {

constexpr Duration kCloseTimeout = std::chrono::seconds(2);  // wait for a server to close a session

using IoHandler = std::function<void(error_code, std::size_t)>;  // error, number of bytes read or written

// The connection below a WebSocket, with or without TLS. A single stream type and handler type is used for both,
// because Boost.Beast instantiates its templates for each; that was a twentieth of the whole program's compile time.
class Stream {
 public:
  using executor_type = asio::io_context::executor_type;
  using Socket = asio::basic_stream_socket<tcp, executor_type>;

  // `tls`: null without TLS.
  Stream(asio::io_context& io, asio::ssl::context* tls) : socket_(io) {
    if (tls != nullptr) tls_.emplace(socket_, *tls);
  }

  executor_type get_executor() { return socket_.get_executor(); }
  Socket& socket() { return socket_; }
  asio::ssl::stream<Socket&>* tls() { return tls_ ? &*tls_ : nullptr; }

  // Reads into the first buffer that is not empty only, which the interface allows: Boost.Beast calls it again.
  template <class Buffers, class Handler>
  void async_read_some(const Buffers& buffers, Handler&& handler) {
    asio::mutable_buffer destination;
    for (auto it = asio::buffer_sequence_begin(buffers);
         it != asio::buffer_sequence_end(buffers) && destination.size() == 0; ++it)
      destination = *it;
    read(destination, copyable(std::forward<Handler>(handler)));
  }
  template <class Buffers, class Handler>
  void async_write_some(const Buffers& buffers, Handler&& handler) {
    write({asio::buffer_sequence_begin(buffers), asio::buffer_sequence_end(buffers)},
          copyable(std::forward<Handler>(handler)));
  }

 private:
  // std::function needs a handler that can be copied; Boost.Beast's can only be moved.
  template <class Handler>
  static IoHandler copyable(Handler&& handler) {
    return [shared_handler = std::make_shared<std::decay_t<Handler>>(std::forward<Handler>(handler))](
               error_code error, std::size_t bytes) { (*shared_handler)(error, bytes); };
  }
  void read(asio::mutable_buffer destination, IoHandler handler) {
    tls_ ? tls_->async_read_some(destination, std::move(handler))
         : socket_.async_read_some(destination, std::move(handler));
  }
  void write(const std::vector<asio::const_buffer>& buffers, IoHandler handler) {
    tls_ ? tls_->async_write_some(buffers, std::move(handler)) : socket_.async_write_some(buffers, std::move(handler));
  }

  Socket socket_;
  std::optional<asio::ssl::stream<Socket&>> tls_;
};

// Boost.Beast finds these three functions by name when it closes a WebSocket.
void beast_close_socket(Stream& stream) {
  error_code ignored;
  stream.socket().close(ignored);
}
void teardown(beast::role_type, Stream& stream, error_code& error) { stream.socket().close(error); }
// Closes at once but calls the handler later, because a handler of an asynchronous function must not run inside its
// call.
template <class Handler>
void async_teardown(beast::role_type role, Stream& stream, Handler&& handler) {
  error_code error;
  teardown(role, stream, error);
  asio::post(stream.get_executor(),
             [shared_handler = std::make_shared<std::decay_t<Handler>>(std::forward<Handler>(handler)), error] {
               (*shared_handler)(error);
             });
}

class WebSocketSession final : public Session {
 public:
  WebSocketSession(asio::io_context& io, const ClientOptions& options, asio::ssl::context* tls)
      : options_(options), resolver_(io), timer_(io), stream_(io, tls) {}

  void ask(std::string message, Client::AnswerHandler handler) override {
    message_ = std::move(message);
    handler_ = std::move(handler);
    timer_.expires_after(options_.deadline);
    timer_.async_wait([self = self()](error_code error) {
      if (!error)  // otherwise the timer was cancelled, because the request has its answer
        self->finish(fail(Code::kStale, "environment", "no answer within {} from {}", to_text(self->options_.deadline),
                          self->options_.endpoint.url()));
    });
    if (ended_) return finish(fail(Code::kUnavailable, "environment", "its session has ended"));
    request_pending_ = true;
    if (open_) return write();
    const Endpoint& endpoint = options_.endpoint;
    resolver_.async_resolve(endpoint.host, endpoint.port,
                            [self = self()](error_code error, const tcp::resolver::results_type& addresses) {
                              if (error) return self->fail_to("find the host", error);
                              asio::async_connect(self->stream_.next_layer().socket(), addresses,
                                                  [self](error_code refused, const tcp::endpoint&) {
                                                    if (refused) return self->fail_to("connect", refused);
                                                    self->start_tls();
                                                  });
                            });
  }

  void end(std::function<void()> then) override {
    handler_ = {};
    timer_.cancel();
    // Without a connection no close message can be sent. While a request is pending, its answer would be taken for the
    // server's close.
    if (!open_ || ended_ || request_pending_) {
      close();
      return then();
    }
    ended_ = true;
    on_end_ = std::move(then);
    message_ = close_message();
    timer_.expires_after(kCloseTimeout);
    timer_.async_wait([self = self()](error_code error) {
      if (!error) self->finish_end();
    });
    send([self = self()](error_code error, std::size_t) {
      if (error) return self->finish_end();
      // Waits for the server's close.
      self->stream_.async_read(self->buffer_, IoHandler([self](error_code, std::size_t) { self->finish_end(); }));
    });
  }

 private:
  std::shared_ptr<WebSocketSession> self() { return std::static_pointer_cast<WebSocketSession>(shared_from_this()); }

  void start_tls() {
    auto* const tls = stream_.next_layer().tls();
    if (tls == nullptr) return open_websocket();
    // Names the host in the first message, because a server with several hosts chooses its certificate by it.
    SSL_set_tlsext_host_name(tls->native_handle(), options_.endpoint.host.c_str());
    tls->set_verify_callback(asio::ssl::host_name_verification(options_.endpoint.host));
    tls->async_handshake(asio::ssl::stream_base::client, [self = self()](error_code error) {
      if (error) return self->fail_to("agree on TLS", error);
      self->open_websocket();
    });
  }

  void open_websocket() {
    const Endpoint& endpoint = options_.endpoint;
    stream_.set_option(websocket::stream_base::decorator(
        [](websocket::request_type& request) { request.set(beast::http::field::user_agent, "echoline"); }));
    stream_.read_message_max(options_.answer_bytes_max);
    const bool is_ipv6 = endpoint.host.find(':') != std::string::npos;
    const std::string host = (is_ipv6 ? "[" + endpoint.host + "]" : endpoint.host) + ":" + endpoint.port;
    stream_.async_handshake(handshake_response_, host, endpoint.target, [self = self()](error_code error) {
      if (error == websocket::error::upgrade_declined) {
        const int status = self->handshake_response_.result_int();
        const bool is_busy = status == 429 || status >= 500;
        return self->finish(fail(is_busy ? Code::kUnavailable : Code::kNotFound, "environment",
                                 "expected the sessions of an OpenEnv server at {}, found HTTP {}",
                                 self->options_.endpoint.url(), status));
      }
      if (error) return self->fail_to("open a WebSocket", error);
      self->open_ = true;
      self->write();
    });
  }

  void write() {
    stream_.text(true);
    send([self = self()](error_code error, std::size_t) {
      if (error) return self->fail_to("write", error);
      self->stream_.async_read(self->buffer_, IoHandler([self](error_code ended, std::size_t) {
                                 if (ended) return self->fail_to("read", ended);
                                 std::string answer = beast::buffers_to_string(self->buffer_.data());
                                 self->buffer_.consume(self->buffer_.size());
                                 self->finish(std::move(answer));
                               }));
    });
  }

  void send(IoHandler then) { stream_.async_write(asio::buffer(message_), std::move(then)); }

  // `action`: what could not be done, such as "connect".
  void fail_to(const char* action, error_code error) {
    if (error == websocket::error::message_too_big || error == websocket::error::buffer_overflow)
      return finish(
          fail(Code::kCorrupt, "environment", "its answer is longer than {} bytes", options_.answer_bytes_max));
    finish(
        fail(Code::kUnavailable, "environment", "{}: cannot {}: {}", options_.endpoint.url(), action, error.message()));
  }

  void finish(Result<std::string> answer) {
    timer_.cancel();
    request_pending_ = false;
    if (!answer) close();
    if (auto handler = std::exchange(handler_, {})) handler(std::move(answer));
  }

  void finish_end() {
    timer_.cancel();
    close();
    if (const auto then = std::exchange(on_end_, {})) then();
  }

  void close() {
    ended_ = true;
    resolver_.cancel();
    error_code ignored;
    stream_.next_layer().socket().close(ignored);
  }

  const ClientOptions& options_;
  tcp::resolver resolver_;
  asio::steady_timer timer_;
  websocket::stream<Stream, false> stream_;  // compression is never negotiated
  websocket::response_type handshake_response_;
  beast::flat_buffer buffer_;
  std::string message_;            // being sent, so it must stay until the write is over
  Client::AnswerHandler handler_;  // of the pending ask()
  std::function<void()> on_end_;
  bool open_ = false;             // the WebSocket was opened
  bool ended_ = false;            // by an error or by end(); no request is possible any more
  bool request_pending_ = false;  // an ask() has no answer yet
};

}  // namespace

struct Client::Impl {
  explicit Impl(ClientOptions client_options) : options(std::move(client_options)) {
    tls.set_default_verify_paths();
    tls.set_verify_mode(asio::ssl::verify_peer);
    thread = std::thread([this] { io.run(); });
  }
  ~Impl() {
    io.stop();
    thread.join();
  }

  const ClientOptions options;
  asio::io_context io{/*concurrency_hint=*/1};
  asio::executor_work_guard<asio::io_context::executor_type> work{io.get_executor()};  // keeps run() going
  asio::ssl::context tls{asio::ssl::context::tls_client};
  std::thread thread;
};

Client::Client(ClientOptions options) : impl_(std::make_unique<Impl>(std::move(options))) {}
Client::~Client() = default;

std::shared_ptr<Session> Client::session() {
  return std::make_shared<WebSocketSession>(impl_->io, impl_->options,
                                            impl_->options.endpoint.tls ? &impl_->tls : nullptr);
}

void Client::ask(const std::shared_ptr<Session>& session, std::string message, AnswerHandler handler) {
  asio::post(impl_->io, [session, message = std::move(message), handler = std::move(handler)]() mutable {
    session->ask(std::move(message), std::move(handler));
  });
}

void Client::end(const std::shared_ptr<Session>& session, std::function<void()> then) {
  asio::post(impl_->io, [session, then = std::move(then)]() mutable { session->end(std::move(then)); });
}

void Client::run_after(Duration delay, std::function<void()> function) {
  asio::post(impl_->io, [this, delay, function = std::move(function)]() mutable {
    auto timer = std::make_shared<asio::steady_timer>(impl_->io, delay);
    timer->async_wait([timer, function = std::move(function)](error_code error) {
      if (!error) function();
    });
  });
}

}  // namespace echoline::data_plane::openenv
