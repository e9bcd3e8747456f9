// Parses a chat template into a tree of statements and expressions. Private to model/.
#pragma once
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.hpp"
#include "model/template_value.hpp"

namespace echoline::model::chat {

struct Expression {
  enum class Kind {
    kLiteral,      // value
    kName,         // name
    kList,         // parts
    kMapping,      // parts: key, value, key, value, ...
    kAttribute,    // parts[0].name
    kIndex,        // parts[0][parts[1]]
    kSlice,        // parts[0][parts[1]:parts[2]:parts[3]], each of the last three may be absent
    kCall,         // parts[0](parts[1], ...); the last keywords.size() arguments are named
    kFilter,       // parts[0] | name(parts[1], ...)
    kTest,         // parts[0] is name(parts[1], ...)
    kNot,          // not parts[0]
    kNegative,     // -parts[0]
    kBinary,       // parts[0] name parts[1], where name is the operator: and, or, in, +, <, ...
    kConditional,  // parts[1] if parts[0] else parts[2], which may be absent
  };
  Kind kind;
  std::size_t line = 0;
  std::string name;
  Value value;
  std::vector<std::unique_ptr<Expression>> parts;
  std::vector<std::string> keywords;  // names of the last arguments
  std::size_t depth = 1;              // levels of this tree; bounded, because evaluation recurses
};

struct Statement {
  enum class Kind {
    kText,     // text
    kOutput,   // {{ expression }}
    kIf,       // the first branch whose condition holds; a branch without condition is the else
    kFor,      // targets in expression (if condition): branches[0]; branches[1] if there was no item
    kSet,      // targets[0] or targets[0].attribute = expression
    kSetText,  // targets[0] = the output of branches[0]
    kMacro,    // defines targets[0](targets[1], ...) as branches[0]; the last parameters have the values `defaults`
    kScope,    // branches[0], in a scope of its own for variables ({% generation %})
    kBreak,
    kContinue,
  };
  struct Branch {
    std::unique_ptr<Expression> condition;
    std::vector<Statement> body;
  };
  Kind kind;
  std::size_t line = 0;
  std::string text;
  std::unique_ptr<Expression> expression, condition;
  std::vector<std::string> targets;
  std::string attribute;
  std::vector<Branch> branches;
  std::vector<std::unique_ptr<Expression>> defaults;
};

inline constexpr std::size_t kTemplateBytesMax = 1 << 20;

// Treats white space like Hugging Face: trim_blocks and lstrip_blocks are on, and a last newline is dropped. kInvalid
// names the line, and the construct that is malformed or not implemented.
Result<std::vector<Statement>> parse_template(std::string_view text);

}  // namespace echoline::model::chat
