// The normalizer of a tokenizer.json, which changes a text before it is split. Internal to model.
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
  // Reads 'normalizer' of tokenizer.json: null, NFC, NFD, NFKC, NFKD, Prepend, Replace, or a Sequence of them.
  static Result<Normalizer> read(const nlohmann::json& root);

  // A cheap check. If true, apply() does not change `text`; if false, it may.
  bool keeps(std::string_view text) const;
  // The normalized text. `prepends` is false for a text that continues another one: then Prepend steps are skipped.
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
  bool has_only_forms_ = true;  // all steps are NormalForm, which does not change ASCII
};

}  // namespace echoline::model
