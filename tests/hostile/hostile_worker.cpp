// hostile_worker ATTACK HOST:PORT NAME SECONDS TOKEN..: joins a run with its tokens, performs the attack, and prints
// the outcome as JSON. Tokens are for the instances NAME-0, NAME-1, ..
#include <cstdio>
#include <cstdlib>

#include "base/log.hpp"
#include "tests/hostile/attacks.hpp"

int main(int argc, char** argv) {
  using namespace echoline;
  const std::vector<std::string> words(argv + 1, argv + argc);
  if (words.size() < 5) {
    fmt::print(stderr,
               "usage: hostile_worker ATTACK HOST:PORT NAME SECONDS TOKEN..; attacks: {}\nor {}: a member that does "
               "nothing else\n",
               fmt::join(hostile::attack_names(), " "), hostile::kNoAttack);
    return 2;
  }
  log::configure(log::Level::kOff, "hostile");
  hostile::AttackOptions options;
  const std::size_t colon = words[1].rfind(':');
  options.learner = {words[1].substr(0, colon), static_cast<std::uint16_t>(std::atoi(words[1].c_str() + colon + 1))};
  options.name = words[2];
  options.length = from_seconds(std::atof(words[3].c_str()));
  options.tokens.assign(words.begin() + 4, words.end());
  const auto result = hostile::attack(words[0], options);
  if (!result) {
    fmt::print(stderr, "{}\n", result.error().message());
    return 1;
  }
  fmt::print("{}\n", result->dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
  return 0;
}
