// Hosts that are there, reached by the system's ssh.
#pragma once
#include <filesystem>
#include <memory>

#include "provisioner/provider.hpp"

namespace echoline::provisioner {

// Reads the hosts from YAML (configs/providers/README.md); an offer's `host` names one. start() brings the program,
// argv[0], to the host unless it is there, and runs it in a session of its own, which outlives the connection; the
// command, its environment and so the join token travel by stdin. What runs is noted in a file per instance on the
// host, from which list() and the watch read; a listing is complete when every host has answered. An instance that its
// host says has ended is told; a host that does not answer tells nothing.
class SshProvider final : public Provider {
 public:
  // kInvalid with every problem of the file.
  static Result<std::unique_ptr<Provider>> make(const std::filesystem::path& file);
  ~SshProvider() override;
  void start(Ticket ticket, const LaunchSpec& spec) override;
  void stop(Ticket ticket, const InstanceId& instance, Duration grace) override;
  void list(Ticket ticket, const std::string& label_prefix) override;
  std::vector<ProviderEvent> poll(TimePoint now) override;

 private:
  struct Impl;
  explicit SshProvider(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace echoline::provisioner
