// Messages between a trainer's node and the learner: any bytes leave both ends usable and within their memory.
#include <string_view>

#include "learner/external/node_calls.hpp"
#include "tests/fuzz/input.hpp"

// The input is a sequence of messages, each behind two bytes with its length.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace echoline;
  constexpr Bytes kBodyMax{4096};
  const SystemClock clock;
  std::size_t answers = 0;
  learner::NodeCalls calls([&](WorkerId, const std::string&) { ++answers; });
  calls.open([](const learner::TrainerCall&) { return learner::TrainerAnswer{}; }, kBodyMax);
  learner::LearnerCalls node(
      clock, [](const std::string&) {}, std::chrono::seconds(1));
  std::string_view rest(reinterpret_cast<const char*>(data), size);
  while (rest.size() >= 2) {
    const std::size_t length = static_cast<unsigned char>(rest[0]) * 256u + static_cast<unsigned char>(rest[1]);
    const std::string_view message = rest.substr(2, length);
    rest.remove_prefix(2 + message.size());
    calls.on_message(WorkerId{1}, message);
    node.on_message(message);
    ECHO_CHECK(calls.bytes_held() <= 2 * kBodyMax.count, "{} bytes of bodies", calls.bytes_held());
  }
  calls.on_lost(WorkerId{1});
  ECHO_CHECK(calls.bytes_held() == 0, "bodies of a lost node are kept");
  return 0;
}
