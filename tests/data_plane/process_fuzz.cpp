// Fuzz target: answers of a task's program.
#include "base/result.hpp"
#include "data_plane/adapters/process/protocol.hpp"

using namespace echoline;
using namespace echoline::data_plane;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view line(reinterpret_cast<const char*>(data), size);
  const auto answer = process::read_answer(line, 7);
  if (!answer) return 0;
  (void)process::read_hello(*answer);
  for (const std::size_t count : {0u, 1u, 2u}) {
    const auto items = process::read_items(*answer, count);
    if (!items) continue;
    ECHO_CHECK(items->size() == count, "{} items", items->size());
    for (const auto& item : *items) {
      if (!item) continue;
      if (const auto step = process::read_step(*item))
        ECHO_CHECK(step->score.reward - step->score.reward == 0, "{}", step->score.reward);
      (void)process::read_cut(*item);
      (void)process::read_problem(*item, "p");
    }
  }
  return 0;
}
