// Reads members of tokenizer.json; every error names the field. Internal to model.
#pragma once
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "base/result.hpp"

namespace echoline::model::tokenizer_json {

using Json = nlohmann::json;
inline constexpr std::size_t kDumpBytesMax = 80;  // of a value in a message

template <class... Args>
Error invalid(fmt::format_string<Args...> format, Args&&... args) {
  return fail(Code::kInvalid, "tokenizer.json", format, std::forward<Args>(args)...);
}

// A short dump of a JSON value for messages; never throws, even for invalid UTF-8.
inline std::string short_dump(const Json& value) {
  std::string text = value.dump(-1, ' ', /*ensure_ascii=*/true, Json::error_handler_t::replace);
  if (text.size() > kDumpBytesMax) text.replace(kDumpBytesMax, std::string::npos, "...");
  return text;
}

// Absent if `object` has no such member, or null.
inline const Json* member(const Json& object, const char* name) {
  if (!object.is_object()) return nullptr;
  const auto it = object.find(name);
  return it == object.end() || it->is_null() ? nullptr : &*it;
}
inline const std::string* text_member(const Json& object, const char* name) {
  const Json* value = member(object, name);
  return value && value->is_string() ? &value->get_ref<const std::string&>() : nullptr;
}
inline bool is_type(const Json& object, std::string_view type) {
  const std::string* found = text_member(object, "type");
  return found && *found == type;
}
// Any value but false counts as true.
inline bool is_true(const Json& object, const char* name, bool if_absent = false) {
  const Json* value = member(object, name);
  return value ? *value != false : if_absent;
}

}  // namespace echoline::model::tokenizer_json
