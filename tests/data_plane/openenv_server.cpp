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
  accepts_ = std::thread([this] {
    for (;;) {
      const int fd = ::accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
      if (fd < 0) return;
      {
        const std::lock_guard lock(mutex_);
        if (stopping_) {
          ::close(fd);
          return;
        }
        open_.push_back(fd);
      }
      threads_.emplace_back([this, fd] { serve(fd); });
    }
  });
}

OpenEnvServer::~OpenEnvServer() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    for (const int fd : open_) ::shutdown(fd, SHUT_RDWR);
  }
  ::shutdown(listener_, SHUT_RDWR);
  accepts_.join();
  for (std::thread& thread : threads_) thread.join();
  ::close(listener_);
}

std::string OpenEnvServer::url() const { return fmt::format("http://127.0.0.1:{}", port_); }

void OpenEnvServer::misbehave(std::string how, std::string on, int times) {
  const std::lock_guard lock(mutex_);
  how_ = std::move(how), on_ = std::move(on), times_ = times;
}

std::string OpenEnvServer::fault(const std::string& type) {
  const std::lock_guard lock(mutex_);
  if (times_ == 0 || type != on_) return "";
  --times_;
  return how_;
}

void OpenEnvServer::serve(int fd) {
  const int now = ++sessions;
  for (int most = most_sessions; now > most && !most_sessions.compare_exchange_weak(most, now);) {
  }
  bool counted = true;
  try {
    boost::asio::io_context io;
    beast::websocket::stream<boost::asio::ip::tcp::socket> stream(io);
    stream.next_layer().assign(boost::asio::ip::tcp::v4(), ::dup(fd));
    stream.accept();
    int wanted = 0, left = 0;
    for (;;) {
      beast::flat_buffer buffer;
      stream.read(buffer);
      const json message = json::parse(beast::buffers_to_string(buffer.data()));
      const std::string type = message.at("type");
      if (type == "close") {
        ++good_byes;
        --sessions, counted = false;  // before the connection ends, as OpenEnv does
        break;
      }
      const std::string how = fault(type);
      json observation, reward;
      bool done = false;
      if (type == "reset") {
        ++resets;
        const auto seed = message.at("data").at("seed").get<std::uint64_t>();
        wanted = number(seed), left = 3;
        observation = {{"prompt", fmt::format("Guess {}, level {}", seed + (how == "other start" ? 1000 : 0),
                                              message["data"].value("level", 0))},
                       {"hint", nullptr}};
      } else {
        const int guess = std::atoi(message.at("data").at("message").get<std::string>().c_str());
        done = guess == wanted || --left == 0;
        reward = guess == wanted ? json(1.0) : json(nullptr);
        observation = {{"prompt", guess < wanted ? "higher" : "lower"}, {"hint", guess}};
      }
      std::string answer =
          json{{"type", "observation"}, {"data", {{"observation", observation}, {"reward", reward}, {"done", done}}}}
              .dump();
      if (how == "garbage") answer = "\x01{[";
      if (how == "huge") answer = std::string(2u << 20, ' ');
      if (how == "error") answer = R"({"type":"error","data":{"message":"it broke","code":"EXECUTION_ERROR"}})";
      if (how == "full") answer = R"({"type":"error","data":{"message":"no room","code":"CAPACITY_REACHED"}})";
      if (how == "untyped") answer = "{}";
      if (how == "no reward")
        answer = R"({"type":"observation","data":{"observation":{"prompt":"x"},"reward":"much"}})";
      if (how == "nan") answer = R"({"type":"observation","data":{"observation":{"prompt":"x"},"reward":NaN}})";
      if (how == "close") break;
      if (how == "slow") {
        buffer.clear();
        stream.read(buffer);  // until the other side gives up
      }
      stream.binary(how == "binary");
      stream.write(boost::asio::buffer(answer));
    }
  } catch (const std::exception&) {
    // The client has left, or does not use WebSocket.
  }
  if (counted) --sessions;
  const std::lock_guard lock(mutex_);
  open_.remove(fd);
  ::close(fd);
}

}  // namespace echoline
