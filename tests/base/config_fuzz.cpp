// Reads any bytes as a run file, and as JSON, and checks what must hold for every input. libFuzzer calls it when
// ECHOLINE_FUZZ is on; config_test calls it on mutated run files in every ordinary test run.
#include <cstdint>
#include <string>
#include <string_view>

#include "base/config.hpp"

using namespace echoline;

namespace {

struct Seen {
  int steps = 3;
  double rate = 0.5;
  bool on = true;
  std::string name = "plain";
  std::optional<Duration> wait;
  std::optional<int> ahead;
  Bytes size{1024};
  BitRate uplink{8e6};
  std::vector<std::string> tags;
  std::string json;
  std::vector<std::string> users;
  friend bool operator==(const Seen&, const Seen&) = default;
};

Seen read_all(ConfigSection section, int depth) {
  Seen seen;
  section.read("steps", seen.steps, {.min = 0, .max = 1000});
  section.read("rate", seen.rate);
  section.read("on", seen.on);
  section.read("name", seen.name);
  section.read("wait", seen.wait, {.max = Duration(1'000'000'000)});
  section.read_or_auto("ahead", seen.ahead, {.min = -5, .max = 5});
  section.read("size", seen.size);
  section.read("uplink", seen.uplink);
  section.read("tags", seen.tags);
  seen.json = section.json("extra");
  for (ConfigSection item : section.sections("items")) {
    int id = 0;
    item.require("id", id);
    seen.users.push_back(std::to_string(id));
  }
  if (depth > 0) {
    ConfigSection users = section.section("users");
    for (const std::string& key : users.keys()) {
      const Seen inner = read_all(users.section(key), depth - 1);
      seen.users.push_back(key + inner.name + inner.json);
    }
  }
  return seen;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const auto expect = [&](bool holds, const char* what, std::string_view more = "") {
    ECHO_CHECK(holds, "{}\n--- input\n{}\n--- {}", what, text, more);
  };
  if (auto data = ConfigFile::parse_json(text, "fuzz")) {
    (void)read_all(data->root(), 2);
    if (const Status status = data->finish(); !status)
      expect(status.error().detail.starts_with("fuzz:"), "a place", status.error().detail);
  } else {
    expect(data.error().detail.starts_with("fuzz:"), "a place", data.error().detail);
  }
  auto file = ConfigFile::parse(text, "fuzz");
  if (!file) {
    expect(file.error().code == Code::kInvalid && file.error().detail.starts_with("fuzz:"), "a place",
           file.error().detail);
    return 0;
  }
  const Seen seen = read_all(file->root(), 2);
  if (Status status = file->finish(); !status) {
    expect(status.error().detail.starts_with("fuzz:"), "a place", status.error().detail);
    return 0;
  }
  // A file without problems reads back from its resolved form to the same values.
  const std::string resolved = file->resolved();
  auto again = ConfigFile::parse(resolved, "again");
  expect(again.has_value(), "the resolved form is a run file", resolved);
  const Seen seen_again = read_all(again->root(), 2);
  expect(again->finish().has_value() && seen == seen_again, "the same values", resolved);
  expect(again->resolved() == resolved, "a fixed point", resolved);
  return 0;
}
