// Fuzz target: answers of a resources server, and rows of its data sets.
#include <nlohmann/json.hpp>

#include "data_plane/adapters/nemo_gym/messages.hpp"

using namespace echoline;
using namespace echoline::data_plane;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  if (const auto score = nemo_gym::read_verdict(text, 1))
    ECHO_CHECK(score->reward - score->reward == 0, "{}", score->reward);
  Problem problem;
  problem.set_reference(std::string(text));
  if (const auto body = nemo_gym::verify_body(problem, text)) ECHO_CHECK(nlohmann::json::accept(*body));
  if (const auto row = maths::read_row(text, nemo_gym::read_row)) ECHO_CHECK(!row->prompt.text.empty());
  return 0;
}
