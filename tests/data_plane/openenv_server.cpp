// The server of the tests: one thread accepts connections, and each connection has a thread of its own.
#include "tests/data_plane/openenv_server.hpp"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <sys/socket.h>
#include <unistd.h>

#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/beast/core.hpp>
#include <boost/beast/websocket.hpp>
#include <nlohmann/json.hpp>

namespace echoline {

using nlohmann::json;
namespace beast = boost::beast;

constexpr int kGuesses = 3;  // in one episode

OpenEnvServer::OpenEnvServer() {
  listener_ = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  if (::bind(listener_, reinterpret_cast<sockaddr*>(&address), size) != 0 || ::listen(listener_, 64) != 0 ||
      ::getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &size) != 0)
    std::abort();
  port_ = ntohs(address.sin_port);
  acceptor_ = std::thread([this] {
    for (;;) {
      const int fd = ::accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
      if (fd < 0) return;
      {
        const std::lock_guard lock(mutex_);
        if (stopping_) {
          ::close(fd);
          return;
        }
        open_sockets_.push_back(fd);
      }
      threads_.emplace_back([this, fd] { serve(fd); });
    }
  });
}

OpenEnvServer::~OpenEnvServer() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    for (const int fd : open_sockets_) ::shutdown(fd, SHUT_RDWR);
  }
  ::shutdown(listener_, SHUT_RDWR);
  acceptor_.join();
  for (std::thread& thread : threads_) thread.join();
  ::close(listener_);
}

std::string OpenEnvServer::url() const { return fmt::format("http://127.0.0.1:{}", port_); }

void OpenEnvServer::misbehave(std::string fault, std::string type, int times) {
  const std::lock_guard lock(mutex_);
  fault_ = std::move(fault), faulty_type_ = std::move(type), faults_left_ = times;
}

std::string OpenEnvServer::take_fault(const std::string& type) {
  const std::lock_guard lock(mutex_);
  if (faults_left_ == 0 || type != faulty_type_) return "";
  --faults_left_;
  return fault_;
}

void OpenEnvServer::serve(int fd) {
  const int open_sessions = ++sessions;
  // A failed exchange stores the present maximum in `maximum`.
  for (int maximum = sessions_at_once_max;
       open_sessions > maximum && !sessions_at_once_max.compare_exchange_weak(maximum, open_sessions);) {
  }
  bool is_counted = true;
  try {
    boost::asio::io_context io;
    beast::websocket::stream<boost::asio::ip::tcp::socket> stream(io);
    stream.next_layer().assign(boost::asio::ip::tcp::v4(), ::dup(fd));
    stream.accept();
    int number_to_guess = 0, guesses_left = 0;
    for (;;) {
      beast::flat_buffer buffer;
      stream.read(buffer);
      const json message = json::parse(beast::buffers_to_string(buffer.data()));
      const std::string type = message.at("type");
      if (type == "close") {
        ++close_messages;
        --sessions, is_counted = false;  // before the connection ends, as OpenEnv does
        break;
      }
      const std::string fault = take_fault(type);
      json observation, reward;
      bool done = false;
      if (type == "reset") {
        ++resets;
        const auto seed = message.at("data").at("seed").get<std::uint64_t>();
        number_to_guess = number(seed), guesses_left = kGuesses;
        observation = {{"prompt", fmt::format("Guess {}, level {}", seed + (fault == "other start" ? 1000 : 0),
                                              message["data"].value("level", 0))},
                       {"hint", nullptr}};
      } else {
        const int guess = std::atoi(message.at("data").at("message").get<std::string>().c_str());
        done = guess == number_to_guess || --guesses_left == 0;
        reward = guess == number_to_guess ? json(1.0) : json(nullptr);
        observation = {{"prompt", guess < number_to_guess ? "higher" : "lower"}, {"hint", guess}};
      }
      std::string answer =
          json{{"type", "observation"}, {"data", {{"observation", observation}, {"reward", reward}, {"done", done}}}}
              .dump();
      if (fault == "garbage") answer = "\x01{[";
      if (fault == "huge") answer = std::string(2u << 20, ' ');
      if (fault == "error") answer = R"({"type":"error","data":{"message":"it broke","code":"EXECUTION_ERROR"}})";
      if (fault == "full") answer = R"({"type":"error","data":{"message":"no room","code":"CAPACITY_REACHED"}})";
      if (fault == "untyped") answer = "{}";
      if (fault == "no reward")
        answer = R"({"type":"observation","data":{"observation":{"prompt":"x"},"reward":"much"}})";
      if (fault == "nan") answer = R"({"type":"observation","data":{"observation":{"prompt":"x"},"reward":NaN}})";
      if (fault == "close") break;
      if (fault == "slow") {
        buffer.clear();
        stream.read(buffer);  // until the other side gives up
      }
      stream.binary(fault == "binary");
      stream.write(boost::asio::buffer(answer));
    }
  } catch (const std::exception&) {
    // The client has left, or does not use WebSocket.
  }
  if (is_counted) --sessions;
  const std::lock_guard lock(mutex_);
  open_sockets_.remove(fd);
  ::close(fd);
}

}  // namespace echoline
