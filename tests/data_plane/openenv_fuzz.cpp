// Fuzz target: messages of an environment's server, URLs and actions.
#include "base/result.hpp"
#include "data_plane/adapters/openenv/messages.hpp"

using namespace echoline;
using namespace echoline::data_plane;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  for (const char* key : {"", "a", "a.b"})
    if (const auto observed = openenv::read_message(text, key))
      ECHO_CHECK(observed->reward - observed->reward == 0, "{}", observed->reward);
  if (const auto to = openenv::parse_endpoint(text))
    ECHO_CHECK(to->target.ends_with("/ws") && !to->host.empty(), "{}", to->url());
  (void)openenv::step_message("", text);
  (void)openenv::reset_message(text, 1);
  return 0;
}
