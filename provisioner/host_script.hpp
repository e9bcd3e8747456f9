// Turns an empty rented machine into a worker: a shell script that fetches the bundle from the learner.
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
  std::string sha256;     // of the bundle, hexadecimal
  std::string key_pin;    // of the learner's key, in the form of `curl --pinnedpubkey`
  std::string authority;  // the run's certificate (DER) in base64
  std::string name{};     // if `learner` is a relay: the name by which the relay knows the run
};

// The worker's port on hosts whose ports are mapped.
inline constexpr std::uint16_t kMappedPort = 7070;

// Sets the command and ports with which an instance of `provider` becomes a worker with these arguments. Without a
// script, the instance's image holds the program.
void set_worker_command(LaunchSpec& spec, std::string_view provider, const std::optional<HostScript>& script,
                        std::vector<std::string> arguments);

// A command that fetches the bundle, unless this user's earlier copy is there, and executes its program with
// `arguments`. It uses curl, wget or python3, and otherwise tries to install curl; its other tools are essential
// packages of Debian and Ubuntu. It unpacks no bundle with another digest. It sends the token (from the environment)
// only to the holder of the learner's key. If the command fails, it ends the instance by
// ProviderKind::end_own_instance.
std::vector<std::string> host_command(const HostScript& script, std::string_view provider,
                                      const std::vector<std::string>& arguments);

}  // namespace echoline::provisioner
