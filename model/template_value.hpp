// The values that a chat template computes with, and Jinja's operations on them. Private to model/.
#pragma once
#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "base/result.hpp"

namespace echoline::model::chat {

struct Value;
using List = std::vector<Value>;
// Entries in order of insertion, with strings as keys. Copies of a Value share its Dict, because a namespace can be
// changed through each variable that holds it.
using Dict = std::vector<std::pair<std::string, Value>>;

struct Undefined {
  std::string name;  // of the missing variable, attribute or element, for messages
};
struct None {};

struct Value {
  using Held = std::variant<Undefined, None, bool, std::int64_t, double, std::string, std::shared_ptr<const List>,
                            std::shared_ptr<Dict>>;
  Held held;

  template <class T>
  const T* as() const {
    return std::get_if<T>(&held);
  }
  const List* list() const {
    return as<std::shared_ptr<const List>>() ? as<std::shared_ptr<const List>>()->get() : nullptr;
  }
  Dict* dict() const { return as<std::shared_ptr<Dict>>() ? as<std::shared_ptr<Dict>>()->get() : nullptr; }
  bool is_undefined() const { return as<Undefined>() != nullptr; }
};

Value make_list(List items);
Value make_dict(Dict entries);
Value from_json(const nlohmann::ordered_json& json);

const Value* find(const Dict& dict, std::string_view key);
void set_entry(Dict& dict, std::string_view key, Value value);

// The value's type for messages, such as "a string" or "a list".
std::string kind(const Value& value);
// Whether the value counts as true in a condition.
bool is_truthy(const Value& value);
// The text of a value that {{ value }} prints. kInvalid for lists and mappings.
Result<std::string> text(const Value& value);
bool equal(const Value& a, const Value& b);
// The text that Python's json.dumps(value, ensure_ascii=False) returns.
Result<std::string> to_json(const Value& value);

// The code points of a UTF-8 text; each invalid byte is an entry of its own.
std::vector<std::string_view> characters(std::string_view text);
// Python's str.strip(), lstrip() and rstrip(). `to_remove`: the code points to remove; null: white space.
std::string strip(std::string_view text, bool left, bool right, const std::string* to_remove = nullptr);

}  // namespace echoline::model::chat
