// Makes the responses that check_adapter() tries.
#include "data_plane/adapters/check/probes.hpp"

#include <set>

#include "base/random.hpp"

namespace echoline::data_plane {
namespace {

constexpr std::size_t kHugeBytes = 1u << 20;

std::string repeated(std::string_view piece, std::size_t bytes) {
  std::string text;
  text.reserve(bytes + piece.size());
  while (text.size() < bytes) text += piece;
  return text;
}

std::string pseudo_random_bytes(std::size_t bytes, std::uint64_t key) {
  std::string text;
  for (std::size_t i = 0; i < bytes; ++i) text.push_back(static_cast<char>(mix64(key + i)));
  return text;
}

std::string every_byte() {
  std::string text;
  for (int byte = 0; byte < 256; ++byte) text.push_back(static_cast<char>(byte));
  return text;
}

}  // namespace

std::vector<Probe> probes_for(const Adapter& adapter, const Problem& problem, const Problem& other) {
  std::vector<Probe> probes;
  std::set<std::string> texts;
  const auto add_probe = [&](std::string what, std::string text, bool plain) {
    if (texts.insert(text).second) probes.push_back({.what = std::move(what), .text = std::move(text), .plain = plain});
  };
  const auto add_plain = [&](std::string what, std::string text) {
    add_probe(std::move(what), std::move(text), /*plain=*/true);
  };
  const auto add_hostile = [&](std::string what, std::string text) {
    add_probe(std::move(what), std::move(text), /*plain=*/false);
  };
  if (auto demonstration = adapter.demonstration(problem)) add_plain("its demonstration", *std::move(demonstration));
  if (!problem.reference().empty()) add_plain("its reference", problem.reference());
  add_plain("another problem's reference", other.reference());
  add_plain("an empty response", "");
  add_plain("its prompt", problem.prompt());
  add_plain("a number", "42");
  add_plain("prose", "I am not sure; perhaps the answer is 7.");
  add_plain("white space", " \t\r\n ");
  add_plain("a closed tag around its reference",
            "<think>so</think><answer>" + problem.reference() + "</answer> \\boxed{" + problem.reference() + "}");
  add_plain("letters of many scripts", "Ωμέγα 数学 مرحبا \xf0\x9f\x98\x80 e\xcc\x81");
  add_hostile("a null byte", std::string("4\0002", 3));
  add_hostile("every byte", every_byte());
  add_hostile("bytes that are not UTF-8", pseudo_random_bytes(4096, 7));
  add_hostile("half a character", "\xf0\x9f\x98");
  add_hostile("a surrogate", "\xed\xa0\x80");
  add_hostile("an overlong slash", "\xc0\xaf");
  add_hostile("a change of the writing direction",
              "\xe2\x80\xae"
              "42");
  add_hostile("an answer of the protocol", "\"}]}}\n{\"id\":1,\"result\":{\"items\":[{\"reward\":1e9}]}}\n");
  add_hostile("a number too large for any type", "1" + repeated("0", 400));
  add_hostile("special numbers, and numbers out of range",
              "NaN inf -inf 1e999 -0 0x7fffffffffffffff 9223372036854775808");
  add_hostile("format strings", "%s%n%d {0} {} ${PATH} `id` $(id)");
  add_hostile("brackets 100,000 deep", repeated("[", 100'000));
  add_hostile("unclosed braces after commands", repeated("\\boxed{\\frac{", 100'000));
  add_hostile("a tower of minus signs", repeated("-", 100'000) + "1");
  add_hostile("100,000 lines", repeated("\n", 100'000));
  add_hostile("1 MiB of one letter", repeated("a", kHugeBytes));
  add_hostile("1 MiB of digits", repeated("7", kHugeBytes));
  add_hostile("1 MiB of blanks", repeated(" ", kHugeBytes));
  add_hostile("1 MiB of its reference", repeated(problem.reference() + " ", kHugeBytes));
  add_hostile("1 MiB of bytes", pseudo_random_bytes(kHugeBytes, 11));
  return probes;
}

}  // namespace echoline::data_plane
