// Instances through commands that the user names: schedulers and clouds that have a command line.
#pragma once
#include <filesystem>
#include <memory>

#include "provisioner/provider.hpp"

namespace echoline::provisioner {

inline constexpr const char* kExecName = "exec";

// Reads the commands from YAML (configs/providers/README.md). An instance's name is made of its label, in small
// letters, digits and '-', at most 63 of them; the listing has to show it. A start that fails is looked for by that
// name and stopped before it is reported; a stop that fails counts when a complete listing lacks the instance. An
// instance that two listings in a row lack, or whose state is among `ended`, has ended.
class ExecProvider final : public Provider {
 public:
  // kInvalid with every problem of the file.
  static Result<std::unique_ptr<Provider>> make(const std::filesystem::path& file);
  ~ExecProvider() override;
  void start(Ticket ticket, const LaunchSpec& spec) override;
  void stop(Ticket ticket, const InstanceId& instance, Duration grace) override;
  void list(Ticket ticket, const std::string& label_prefix) override;
  std::vector<ProviderEvent> poll(TimePoint now) override;

 private:
  struct Impl;
  explicit ExecProvider(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// A catalogue of SkyPilot (vms.csv), whose machines commands start.
bool is_skypilot_catalogue(std::string_view head);
Result<std::vector<Offer>> read_skypilot(std::string_view text, std::string_view name, const OfferReading& reading);

// The name under which commands know an instance, or what the names of a label prefix begin with.
std::string exec_name(std::string_view label);

}  // namespace echoline::provisioner
