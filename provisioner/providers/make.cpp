#include "provisioner/providers/make.hpp"

#include "provisioner/providers/exec.hpp"
#include "provisioner/providers/local.hpp"
#include "provisioner/providers/ssh.hpp"
#include "provisioner/providers/vast.hpp"

namespace echoline::provisioner {

Result<std::unique_ptr<Provider>> make_provider(const std::string& name, const ProviderOptions& options) {
  if (name == "local") return std::unique_ptr<Provider>(std::make_unique<LocalProvider>(options.log_folder));
  if (name == "vast") {
    VastOptions vast;
    if (!options.vast_url.empty()) vast.url = options.vast_url;
    vast.bid_raise_max = options.vast_bid_raise_max;
    ECHO_ASSIGN(vast.key, read_vast_key(options.vast_key_file));
    return std::unique_ptr<Provider>(std::make_unique<VastProvider>(std::move(vast)));
  }
  if (name == "exec" || name == "ssh") {
    if (options.file.empty())
      return fail(Code::kInvalid, "make provider", "'{}' needs a file: set fleet.provider_file", name);
    return name == "exec" ? ExecProvider::make(options.file) : SshProvider::make(options.file);
  }
  return fail(Code::kInvalid, "make provider", "expected local, vast, ssh or exec, found '{}'", name);
}

}  // namespace echoline::provisioner
