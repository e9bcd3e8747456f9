// The normalizer of a tokenizer.json: how a text is changed before it is split. Internal to model.
#pragma once
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "model/text_pattern.hpp"
#include "model/unicode.hpp"

namespace echoline::model {

// Immutable. Thread-safe.
class Normalizer {
 public:
  // Reads 'normalizer' of the file: null, NFC, NFD, NFKC, NFKD, Prepend, Replace, or a Sequence of them.
  static Result<Normalizer> read(const nlohmann::json& root);

  // Whether `text` certainly stays as it is. Costs little.
  bool keeps(std::string_view text) const;
  // `prepends`: apply Prepend, which a text that continues another one must not get.
  Result<std::string> apply(std::string_view text, bool prepends) const;

 private:
  struct Prefix {
    std::string text;
  };
  struct Replacement {
    TextPattern pattern;
    std::string replacement;
  };
  using Step = std::variant<NormalForm, Prefix, Replacement>;

  Status read_step(const nlohmann::json& step, int depth);

  std::vector<Step> steps_;
  bool has_only_forms_ = true;  // no step changes ASCII
};

}  // namespace echoline::model
