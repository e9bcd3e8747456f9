#include "cli/rented_host.hpp"

#include <cstdlib>

#include "base/log.hpp"
#include "provisioner/providers/vast.hpp"

namespace echoline::cli {
namespace {

std::string variable(const std::string& name) {
  const char* value = std::getenv(name.c_str());
  return value ? value : "";
}

}  // namespace

RentedHost::RentedHost() : id_(variable("CONTAINER_ID")), key_(variable("CONTAINER_API_KEY")) {
  ::unsetenv("CONTAINER_API_KEY");
}

void RentedHost::end() const {
  if (id_.empty() || key_.empty()) return;
  const Status ended = provisioner::end_own_vast_instance(variable("ECHOLINE_VAST_URL"), key_, id_);
  if (ended)
    log::info("this instance ({}) is ended, so that it costs nothing more", id_);
  else
    log::warn("this instance may go on to cost money: {}", ended.error().message());
}

}  // namespace echoline::cli
