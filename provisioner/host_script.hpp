// How a rented machine that has nothing becomes a worker: a script for sh that fetches the bundle from the learner.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "provisioner/provider.hpp"

namespace echoline::provisioner {

struct HostScript {
  std::string learner;    // HOST:PORT
  std::string sha256;     // of the bundle, in hexadecimal
  std::string key_pin;    // of the learner's key, as `curl --pinnedpubkey` takes it
  std::string authority;  // the run's certificate (DER) in base64
};

// The port on which a worker listens whose host's ports are mapped.
inline constexpr std::uint16_t kMappedPort = 7070;

// Fills in command and ports that make an instance of `provider` a worker with these arguments. Without a script the
// instance has the program.
void become_worker(LaunchSpec& spec, std::string_view provider, const std::optional<HostScript>& script,
                   std::vector<std::string> arguments);

// The command that fetches the bundle, unless this user of the machine has it from before, and becomes the program in
// it with `arguments`. It takes curl, wget or python3, whichever is there, and otherwise installs curl where it may;
// beside those only what Debian and Ubuntu call essential. Nothing is unpacked that does not have the digest, and
// nobody is shown the token (in the environment) but who holds the learner's key. Where it gives up it ends the
// instance, by ProviderKind::end_own_instance.
std::vector<std::string> host_command(const HostScript& script, std::string_view provider,
                                      const std::vector<std::string>& arguments);

}  // namespace echoline::provisioner
