#include "provisioner/providers/make.hpp"

#include "provisioner/providers/local.hpp"

namespace echoline::provisioner {

Result<std::unique_ptr<Provider>> make_provider(const std::string& name, const ProviderOptions& options) {
  if (name == "local") return std::unique_ptr<Provider>(std::make_unique<LocalProvider>(options.log_folder));
  return fail(Code::kInvalid, "make provider", "expected local, found '{}'", name);
}

}  // namespace echoline::provisioner
