// The fuzz target on valid texts and mutations of them.
#include <gtest/gtest.h>

#include <random>

#include "store/manifest.hpp"
#include "tests/fuzz/input.hpp"

namespace echoline::store {
namespace {

// The text without its signature.
std::string body_of(const std::string& text) { return text.substr(0, text.rfind("signature ")); }

TEST(StoreFuzz, SurvivesMutatedTexts) {
  const overlay::trust::SigningKey key{overlay::trust::SigningKey::Seed{}};
  const Manifest snapshot{.run_id = "run",
                          .name = {.epoch = 1, .version = Version{5}},
                          .state_bytes = 100,
                          .patch_bytes = 10,
                          .sha256 = std::string(64, 'a'),
                          .term = 3};
  Manifest delta = snapshot;
  delta.kind = delta::PatchKind::kDelta;
  delta.base = VersionName{.epoch = 0, .version = Version{4}};
  const std::vector<std::string> texts{
      body_of(sign(snapshot, key)),
      body_of(sign(delta, key)),
      body_of(sign(RunDescription{.run_id = "run", .key = key.public_key()}, key)),
      body_of(sign(std::vector<StoredFile>{{"config.json", 3, std::string(64, 'b')}}, key)),
      sign(delta, key) + sign(snapshot, key),
      "<L><IsTruncated>true</IsTruncated><Contents><Key>a&amp;</Key><Size>12</Size></Contents>"
      "<NextContinuationToken>t</NextContinuationToken></L>",
      "[default]\naws_access_key_id = d\n[profile x]\ns3 =\n  a = b\n",
      "deltas/00000003.000000000041/ready",
      "lease/000000000007"};
  std::mt19937 random(1);
  for (const std::string& text : texts) {
    test::fuzz_input(text);
    for (int i = 0; i < 300; ++i) {
      std::string changed = text;
      for (std::uint32_t changes = 1 + random() % 3; changes > 0 && !changed.empty(); --changes) {
        const std::size_t at = random() % changed.size();
        switch (random() % 3) {
          case 0:
            changed[at] = static_cast<char>(random());
            break;
          case 1:
            changed.erase(at, 1 + random() % 8);
            break;
          default:
            changed.insert(at, changed.substr(random() % changed.size(), 1 + random() % 8));
            break;
        }
      }
      test::fuzz_input(changed);
    }
  }
}

}  // namespace
}  // namespace echoline::store
