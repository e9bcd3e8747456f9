// The pre-tokenizer of a tokenizer.json, which splits a text into pieces; each piece is encoded on its own. Internal to
// model.
#pragma once
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "model/text_pattern.hpp"

namespace echoline::model {

// Immutable. Thread-safe.
class PreTokenizer {
 public:
  // Reads 'pre_tokenizer' of tokenizer.json: null, Split, Digits, Metaspace, WhitespaceSplit, ByteLevel, or a Sequence
  // of them in which ByteLevel is the last.
  static Result<PreTokenizer> read(const nlohmann::json& root);

  // Whether the vocabulary is written in the alphabet of byte_level.hpp.
  bool is_byte_level() const { return is_byte_level_; }

  using OnPiece = std::function<Status(std::string_view piece)>;
  // Calls `on_piece` for each piece in turn, and ends with its first error. `begins_text`: nothing is before `text`,
  // neither text nor an added token. `continues`: `text` continues another text, so no space is put before it.
  Status split(std::string_view text, bool begins_text, bool continues, const OnPiece& on_piece) const {
    return split_from(0, text, begins_text, continues, on_piece);
  }

 private:
  // The effect of a Split on a match and on the text between two matches.
  enum class Behavior { kIsolated, kRemoved, kMergedWithPrevious, kMergedWithNext, kContiguous };
  struct Split {
    TextPattern pattern;
    Behavior behavior = Behavior::kIsolated;
    bool inverts = false;  // the text between two matches counts as the match, and the match as the text between
  };
  // Whether `replacement` is put before a text that has none there. kFirst: only at the begin of the whole text.
  enum class Prepends { kNever, kFirst, kAlways };
  struct Metaspace {
    std::string replacement;                // replaces each space
    Prepends prepends = Prepends::kAlways;  // to which texts `replacement` is prepended
  };
  struct SpacePrefix {};  // puts a space before a text that neither begins with one nor continues another
  using Step = std::variant<Split, Metaspace, SpacePrefix>;

  Status read_step(const nlohmann::json& step, int depth);
  Status read_split(const nlohmann::json& step);
  Status read_metaspace(const nlohmann::json& step);
  Status add_regex(const std::string& expression);
  // Applies the steps from `step_index` on to one piece. The other parameters are those of split().
  Status split_from(std::size_t step_index, std::string_view text, bool begins_text, bool continues,
                    const OnPiece& on_piece) const;
  // The same if the step is a Split with the behavior kIsolated.
  Status split_isolated(std::size_t step_index, std::string_view text, bool begins_text, bool continues,
                        const OnPiece& on_piece) const;

  std::vector<Step> steps_;  // each is applied to the pieces that the previous one has made
  bool is_byte_level_ = false;
};

}  // namespace echoline::model
