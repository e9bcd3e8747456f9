#include "base/config_reference.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

namespace echoline {
namespace {

bool is_section(const ConfigKey& key) { return key.type == "section" || key.type == "list"; }

std::string code(const std::string& text) { return text.empty() ? "" : "`" + text + "`"; }

std::string cell(std::string text) {
  for (std::size_t at = 0; (at = text.find('|', at)) != std::string::npos; at += 2) text.insert(at, 1, '\\');
  return text;
}

std::string default_text(const ConfigKey& key) {
  if (key.required) return "required";
  return key.fallback_is_value ? code(key.fallback) : key.fallback;
}

// "whole number, 1 to 64; default: ..." in brackets behind a meaning.
std::string facts(const ConfigKey& key) {
  std::string text = key.type == "choice" ? "one of " + key.range : key.type;
  if (key.type != "choice" && !key.range.empty()) text += ", " + key.range;
  if (key.required) text += "; required";
  if (!key.fallback.empty() && !key.fallback_is_value) text += "; default: " + key.fallback;
  return text;
}

// Lines of at most 120 columns, each beginning with `indent`.
std::string wrapped(const std::string& indent, const std::string& text) {
  std::string out, line = indent;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = std::min(text.find(' ', at), text.size());
    if (line.size() + 1 + end - at > 120 && line != indent) out += std::exchange(line, indent) + "\n";
    line += (line == indent ? "" : " ") + text.substr(at, end - at);
    at = end + 1;
  }
  return out + line + "\n";
}

}  // namespace

std::string reference_markdown(std::span<const ConfigKey> keys) {
  std::string out;
  bool in_table = false;
  for (const ConfigKey& key : keys) {
    if (is_section(key)) {
      const bool top = key.path.find('.') == std::string::npos;
      out += fmt::format("\n{} {}{}\n\n", top ? "##" : "###", key.path,
                         key.when.empty() ? "" : " with `" + key.when + "`");
      std::string meaning = key.meaning;
      if (!meaning.empty() && meaning.back() != '.') meaning += ".";
      out += meaning + "\n";
      in_table = false;
      continue;
    }
    if (!in_table) out += "\n| key | type | default | range | meaning |\n|---|---|---|---|---|\n";
    in_table = true;
    out += fmt::format("| `{}` | {} | {} | {} | {} |\n", key.path.substr(key.path.rfind('.') + 1), key.type,
                       cell(default_text(key)), cell(key.range), cell(key.meaning));
  }
  return out;
}

std::string reference_json(std::span<const ConfigKey> keys) {
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  for (const ConfigKey& key : keys) {
    nlohmann::ordered_json row{{"path", key.path}, {"type", key.type}, {"required", key.required}};
    if (!key.range.empty()) row["range"] = key.range;
    if (!key.fallback.empty()) row["default"] = key.fallback;
    if (!key.when.empty()) row["when"] = key.when;
    row["meaning"] = key.meaning;
    list.push_back(std::move(row));
  }
  return nlohmann::ordered_json{{"schema_version", 1}, {"keys", std::move(list)}}.dump(2) + "\n";
}

std::string reference_yaml(std::span<const ConfigKey> keys) {
  std::string out;
  std::string off;  // the section that is commented out as a whole
  std::string in_list;
  for (const ConfigKey& key : keys) {
    const auto depth = static_cast<std::size_t>(std::count(key.path.begin(), key.path.end(), '.'));
    const std::string indent(2 * depth, ' ');
    const std::string name = key.path.substr(key.path.rfind('.') + 1);
    if (!off.empty() && !key.path.starts_with(off)) off.clear();
    if (is_section(key)) {
      // A list may be empty, and what its elements require is asked for where there is one.
      if (key.presence || !key.when.empty() || key.type == "list") off = key.path + (key.type == "list" ? "[]." : ".");
      out += "\n" + wrapped(indent + "# ", (key.when.empty() ? "" : "With `" + key.when + "`. ") + key.meaning);
      out += indent + (off.empty() ? "" : "#") + name + ":\n";
      continue;
    }
    out += wrapped(indent + "# ", fmt::format("{} [{}]", key.meaning, facts(key)));
    const std::string list = key.path.substr(0, key.path.rfind('.'));
    const char* item = !list.ends_with("[]") ? "" : std::exchange(in_list, list) == list ? "  " : "- ";
    out += fmt::format("{}{}{}{}:{}\n", indent, key.required && off.empty() ? "" : "#", item, name,
                       key.fallback_is_value && !key.fallback.empty() ? " " + key.fallback : "");
  }
  return out.empty() ? out : out.substr(out.front() == '\n' ? 1 : 0);
}

}  // namespace echoline
