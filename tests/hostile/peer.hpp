// An attacker's connection to a node of a run: real TLS and real frames, with arbitrary bytes inside.
#pragma once
#include <deque>
#include <memory>
#include <optional>
#include <string>

#include "overlay/trust/token.hpp"
#include "overlay/types.hpp"
#include "overlay/uv/tls.hpp"
#include "overlay/wire/control.pb.h"
#include "overlay/wire/frame.hpp"

namespace echoline::hostile {

namespace wire = overlay::wire;

// An enrolled machine: its certificate, and its identity in the run.
struct Identity {
  overlay::Credentials credentials;
  WorkerId worker;
};
Result<Identity> enrol(const overlay::Endpoint& learner, const std::string& token, const std::string& name);

// One thread; blocking, with limits of a few seconds.
class Peer {
 public:
  // Without credentials, the other end treats this peer as a stranger.
  static Result<std::unique_ptr<Peer>> connect(const overlay::Endpoint& to, const overlay::Credentials& credentials,
                                               WorkerId expected);
  ~Peer();

  // False once the other end has closed.
  bool send(const wire::ControlMessage& message);
  bool send_bytes(std::span<const std::byte> bytes);
  // The next control message within `wait`; frames of other kinds are counted and skipped.
  std::optional<wire::ControlMessage> receive(Duration wait);
  // Reads all available frames, and remembers a goodbye.
  void drain(Duration wait = Duration(0));

  bool open() const { return open_; }
  const std::string& goodbye() const { return goodbye_; }
  std::uint64_t chunk_bytes() const { return chunk_bytes_; }

 private:
  Peer(int fd, overlay::TlsSession tls) : fd_(fd), tls_(std::move(tls)) { decoder_.admit(); }
  bool flush();
  bool write_all(std::span<const std::byte> bytes);
  bool read_some(Duration wait);

  int fd_;
  overlay::TlsSession tls_;
  overlay::FrameDecoder decoder_;
  std::deque<overlay::Frame> frames_;
  bool open_ = true;
  std::string goodbye_;
  std::uint64_t chunk_bytes_ = 0;
};

// A plain TCP connection for silent attackers; -1 if it fails.
int dial(const overlay::Endpoint& to);

}  // namespace echoline::hostile
