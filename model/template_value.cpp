// Implements the values of chat templates, with Python's and Jinja's rules.
#include "model/template_value.hpp"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>

namespace echoline::model::chat {
namespace {

constexpr std::string_view kErrorSource = "chat template";

// The value of a boolean or number, by which Python compares them; absent for other values.
std::optional<double> number(const Value& value) {
  if (const auto* flag = value.as<bool>()) return *flag ? 1 : 0;
  if (const auto* integer = value.as<std::int64_t>()) return static_cast<double>(*integer);
  if (const auto* real = value.as<double>()) return *real;
  return std::nullopt;
}

// Whether Python's str.isspace() is true for the character.
bool is_space(std::string_view character) {
  if (character.size() == 1) {
    const auto byte = static_cast<unsigned char>(character.front());
    return byte == ' ' || (byte >= 0x09 && byte <= 0x0d) || (byte >= 0x1c && byte <= 0x1f);
  }
  static constexpr std::string_view kSpaces[] = {"\u0085", "\u00a0", "\u1680", "\u2000", "\u2001", "\u2002", "\u2003",
                                                 "\u2004", "\u2005", "\u2006", "\u2007", "\u2008", "\u2009", "\u200a",
                                                 "\u2028", "\u2029", "\u202f", "\u205f", "\u3000"};
  return std::find(std::begin(kSpaces), std::end(kSpaces), character) != std::end(kSpaces);
}

}  // namespace

Value make_list(List items) { return {std::make_shared<const List>(std::move(items))}; }
Value make_dict(Dict entries) { return {std::make_shared<Dict>(std::move(entries))}; }

Value from_json(const nlohmann::ordered_json& json) {
  if (json.is_boolean()) return {json.get<bool>()};
  if (json.is_number_integer()) return {json.get<std::int64_t>()};
  if (json.is_number()) return {json.get<double>()};
  if (json.is_string()) return {json.get<std::string>()};
  if (json.is_array()) {
    List items;
    for (const auto& item : json) items.push_back(from_json(item));
    return make_list(std::move(items));
  }
  if (json.is_object()) {
    Dict entries;
    for (const auto& [key, item] : json.items()) entries.emplace_back(key, from_json(item));
    return make_dict(std::move(entries));
  }
  return {None{}};
}

const Value* find(const Dict& dict, std::string_view key) {
  for (const auto& [name, value] : dict)
    if (name == key) return &value;
  return nullptr;
}

void set_entry(Dict& dict, std::string_view key, Value value) {
  for (auto& [name, old_value] : dict) {
    if (name != key) continue;
    old_value = std::move(value);
    return;
  }
  dict.emplace_back(key, std::move(value));
}

std::string kind(const Value& value) {
  if (const auto* undefined = value.as<Undefined>()) return fmt::format("'{}', which is undefined", undefined->name);
  // In the order of Value::Held.
  static constexpr std::string_view kNames[] = {"",        "none",     "a boolean", "an integer",
                                                "a float", "a string", "a list",    "a mapping"};
  return std::string(kNames[value.held.index()]);
}

bool is_truthy(const Value& value) {
  if (const auto as_number = number(value)) return *as_number != 0;
  if (const auto* string_value = value.as<std::string>()) return !string_value->empty();
  if (const List* list = value.list()) return !list->empty();
  if (const Dict* dict = value.dict()) return !dict->empty();
  return false;
}

Result<std::string> text(const Value& value) {
  if (value.is_undefined()) return std::string();
  if (value.as<None>()) return std::string("None");
  if (const auto* flag = value.as<bool>()) return std::string(*flag ? "True" : "False");
  if (const auto* integer = value.as<std::int64_t>()) return std::to_string(*integer);
  if (const auto* real = value.as<double>()) {
    std::string shown = fmt::format("{}", *real);
    if (std::isfinite(*real) && shown.find_first_of(".e") == std::string::npos) shown += ".0";
    return shown;
  }
  if (const auto* string_value = value.as<std::string>()) return *string_value;
  return fail(Code::kInvalid, kErrorSource, "printing {} is not implemented; use the filter tojson", kind(value));
}

bool equal(const Value& a, const Value& b) {
  if (const auto x = number(a), y = number(b); x && y) return *x == *y;
  if (a.held.index() != b.held.index()) return false;
  if (const auto* string_value = a.as<std::string>()) return *string_value == *b.as<std::string>();
  if (const List* list = a.list())
    return std::equal(list->begin(), list->end(), b.list()->begin(), b.list()->end(), equal);
  if (const Dict* dict = a.dict()) {
    if (dict == b.dict()) return true;  // the same mapping, which need not be searched
    return dict->size() == b.dict()->size() && std::all_of(dict->begin(), dict->end(), [&](const auto& entry) {
             const Value* other = find(*b.dict(), entry.first);
             return other != nullptr && equal(entry.second, *other);
           });
  }
  return true;  // both none or both undefined
}

Result<std::string> to_json(const Value& value) {
  if (value.is_undefined())
    return fail(Code::kInvalid, kErrorSource, "'{}' is undefined and has no JSON form", value.as<Undefined>()->name);
  if (value.as<None>()) return std::string("null");
  if (const auto* flag = value.as<bool>()) return std::string(*flag ? "true" : "false");
  const auto quoted = [](const std::string& raw) {
    return nlohmann::json(raw).dump(-1, ' ', /*ensure_ascii=*/false, nlohmann::json::error_handler_t::replace);
  };
  if (const auto* string_value = value.as<std::string>()) return quoted(*string_value);
  std::string out;
  if (const List* list = value.list()) {
    for (const Value& item : *list) {
      ECHO_ASSIGN(const std::string item_json, to_json(item));
      out += (out.empty() ? "" : ", ") + item_json;
    }
    return "[" + out + "]";
  }
  if (const Dict* dict = value.dict()) {
    for (const auto& [key, item] : *dict) {
      ECHO_ASSIGN(const std::string item_json, to_json(item));
      out += (out.empty() ? "" : ", ") + quoted(key) + ": " + item_json;
    }
    return "{" + out + "}";
  }
  return text(value);  // an integer or a float
}

std::vector<std::string_view> characters(std::string_view text) {
  std::vector<std::string_view> out;
  for (std::size_t i = 0; i < text.size();) {
    const auto first = static_cast<unsigned char>(text[i]);
    const std::size_t expected_bytes = first < 0xc0 ? 1 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
    std::size_t length = 1;
    while (length < expected_bytes && i + length < text.size() &&
           (static_cast<unsigned char>(text[i + length]) & 0xc0) == 0x80)
      ++length;
    if (length != expected_bytes) length = 1;  // not UTF-8: the byte is an entry of its own
    out.push_back(text.substr(i, length));
    i += length;
  }
  return out;
}

std::string strip(std::string_view text, bool left, bool right, const std::string* to_remove) {
  const auto text_characters = characters(text);
  const auto removed = to_remove ? characters(*to_remove) : std::vector<std::string_view>();
  const auto is_removed = [&](std::string_view c) {
    return to_remove ? std::find(removed.begin(), removed.end(), c) != removed.end() : is_space(c);
  };
  std::size_t begin = 0, end = text_characters.size();
  while (left && begin < end && is_removed(text_characters[begin])) ++begin;
  while (right && end > begin && is_removed(text_characters[end - 1])) --end;
  if (begin == end) return {};
  const char* first = text_characters[begin].data();
  const char* last = text_characters[end - 1].data() + text_characters[end - 1].size();
  return std::string(first, last);
}

}  // namespace echoline::model::chat
