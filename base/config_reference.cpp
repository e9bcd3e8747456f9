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

// Type, range and default of a key, such as "whole number, 1 to 64; default: ...".
std::string facts(const ConfigKey& key) {
  std::string text = key.type == "choice" ? "one of " + key.range : key.type;
  if (key.type != "choice" && !key.range.empty()) text += ", " + key.range;
  if (key.required) text += "; required";
  if (!key.fallback.empty() && !key.fallback_is_value) text += "; default: " + key.fallback;
  return text;
}

// Wraps text to at most 120 columns, with `indent` on each line.
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

namespace {

using Schema = nlohmann::ordered_json;

// The schema of a quantity's text; only the reader checks the number.
Schema quantity(const char* units) {
  return {{"type", "string"}, {"pattern", fmt::format("^\\s*-?[0-9._]+\\s*({})\\s*$", units)}};
}

Schema schema_of_type(const ConfigKey& key, std::string_view type) {
  const auto number = [&](const char* name) {
    Schema schema{{"type", name}};
    if (!key.least.empty()) schema["minimum"] = Schema::parse(key.least);
    if (!key.most.empty()) schema["maximum"] = Schema::parse(key.most);
    return schema;
  };
  if (type.ends_with(" or auto"))
    return {{"anyOf", {schema_of_type(key, type.substr(0, type.size() - 8)), Schema{{"const", "auto"}}}}};
  if (type.starts_with("list: ")) return {{"type", "array"}, {"items", schema_of_type({}, type.substr(6))}};
  if (type == "whole number") return number("integer");
  if (type == "number") return number("number");
  if (type == "true or false") return {{"type", "boolean"}};
  if (type == "mapping") return {{"type", "object"}};
  if (type == "choice") return {{"enum", key.choices}};
  if (type == "duration") return quantity("ns|us|ms|s|min|h");
  if (type == "size") return quantity("[kMGT]?B|[KMGT]iB");
  if (type == "rate") return quantity("[kMG]?bit/s");
  return {{"type", {"string", "number", "boolean"}}};  // the reader takes YAML's plain scalars as texts
}

// Allows null, because a key without a value keeps its default.
void allow_null(Schema& schema) {
  if (schema.contains("enum"))
    schema["enum"].push_back(nullptr);
  else if (schema.contains("anyOf"))
    schema["anyOf"].push_back({{"type", "null"}});
  else if (schema["type"].is_array())
    schema["type"].push_back("null");
  else
    schema["type"] = {schema["type"], "null"};
}

Schema empty_section() {
  return {{"type", "object"}, {"properties", Schema::object()}, {"additionalProperties", false}};
}

// The schema of the section at a dotted path, created if necessary. `root` is a section.
Schema& section_at(Schema& root, std::string_view path) {
  Schema* at = &root;
  while (!path.empty()) {
    const std::size_t end = std::min(path.find('.'), path.size());
    std::string name(path.substr(0, end));
    path.remove_prefix(std::min(end + 1, path.size()));
    const bool list = name.ends_with("[]");
    if (list) name.resize(name.size() - 2);
    Schema& child = (*at)["properties"][name];
    if (child.is_null()) child = list ? Schema{{"type", "array"}, {"items", empty_section()}} : empty_section();
    at = list ? &child["items"] : &child;
  }
  return *at;
}

}  // namespace

std::string reference_schema(std::span<const ConfigKey> keys) {
  Schema root = empty_section();
  root["$schema"] = "https://json-schema.org/draft/2020-12/schema";
  root["title"] = "A run file of echoline";
  const auto put = [](Schema& top, std::string_view path, const ConfigKey& key) {
    const std::size_t dot = path.rfind('.');
    const std::string_view section = dot == std::string_view::npos ? "" : path.substr(0, dot);
    const std::string name(path.substr(dot + 1));  // the whole path if it has no dot: npos + 1 is 0
    if (is_section(key)) {
      section_at(top, std::string(path) + (key.type == "list" ? "[]" : ""));
      section_at(top, section)["properties"][name]["description"] = key.meaning;
      return;
    }
    Schema& parent = section_at(top, section);
    Schema schema = schema_of_type(key, key.type);
    schema["description"] =
        key.fallback.empty() ? key.meaning : fmt::format("{} (default: {})", key.meaning, key.fallback);
    if (key.required)
      parent["required"].push_back(name);
    else
      allow_null(schema);
    parent["properties"][name] = std::move(schema);
  };
  // Additional keys of a section, given a value of another key. Keys with the same condition are grouped.
  struct Conditional {
    std::string section, when;
    Schema then{{"properties", Schema::object()}};  // without `additionalProperties`: other keys are not repeated
  };
  std::vector<Conditional> conditionals;
  for (const ConfigKey& key : keys) {
    if (key.when.empty()) {
      put(root, key.path, key);
      continue;
    }
    const std::string section = key.path.substr(0, key.path.find('.'));
    if (conditionals.empty() || conditionals.back().section != section || conditionals.back().when != key.when)
      conditionals.push_back({section, key.when});
    put(conditionals.back().then, key.path.substr(section.size() + 1), key);
  }
  for (Conditional& c : conditionals) {
    Schema& section = section_at(root, c.section);
    for (const auto& [name, ignored] : c.then["properties"].items())
      section["properties"].emplace(name, Schema::object());
    const std::size_t colon = c.when.find(": ");
    const std::string key = c.when.substr(0, colon), value = c.when.substr(colon + 2);
    section["allOf"].push_back(
        {{"if", {{"properties", {{key, {{"const", value}}}}}, {"required", {key}}}}, {"then", std::move(c.then)}});
  }
  return root.dump(2) + "\n";
}

std::string reference_yaml(std::span<const ConfigKey> keys) {
  std::string out;
  std::string off;  // the section that is commented out completely
  std::string in_list;
  for (const ConfigKey& key : keys) {
    const auto depth = static_cast<std::size_t>(std::count(key.path.begin(), key.path.end(), '.'));
    const std::string indent(2 * depth, ' ');
    const std::string name = key.path.substr(key.path.rfind('.') + 1);
    if (!off.empty() && !key.path.starts_with(off)) off.clear();
    if (is_section(key)) {
      // A list may be empty; keys that its elements require are required only in an element.
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
