// Formats the declarations of a reader as pages, schemas and templates. Verbs of the command line call it.
#include "base/config_reference.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

namespace echoline {
namespace {

constexpr std::size_t kColumnsMax = 120;
// Parts of ConfigKey::type.
constexpr std::string_view kOrAuto = " or auto", kListPrefix = "list: ";

bool is_section(const ConfigKey& key) { return key.type == "section" || key.type == "list"; }

std::string in_backticks(const std::string& text) { return text.empty() ? "" : "`" + text + "`"; }

std::string escape_table_cell(std::string text) {
  for (std::size_t bar = 0; (bar = text.find('|', bar)) != std::string::npos; bar += 2) text.insert(bar, 1, '\\');
  return text;
}

std::string default_cell(const ConfigKey& key) {
  if (key.required) return "required";
  return key.default_is_literal ? in_backticks(key.default_text) : key.default_text;
}

// Such as "whole number, 1 to 64; required". Only a default in words is part of it.
std::string type_and_range(const ConfigKey& key) {
  std::string text = key.type == "choice" ? "one of " + key.range : key.type;
  if (key.type != "choice" && !key.range.empty()) text += ", " + key.range;
  if (key.required) text += "; required";
  if (!key.default_text.empty() && !key.default_is_literal) text += "; default: " + key.default_text;
  return text;
}

// Wraps text to at most kColumnsMax columns, with `indent` on each line.
std::string wrap(const std::string& indent, const std::string& text) {
  std::string out, line = indent;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find(' ', begin), text.size());
    if (line.size() + 1 + end - begin > kColumnsMax && line != indent) out += std::exchange(line, indent) + "\n";
    line += (line == indent ? "" : " ") + text.substr(begin, end - begin);
    begin = end + 1;
  }
  return out + line + "\n";
}

}  // namespace

std::string reference_markdown(std::span<const ConfigKey> keys) {
  std::string out;
  bool in_table = false;
  for (const ConfigKey& key : keys) {
    if (is_section(key)) {
      const bool is_top_level = key.path.find('.') == std::string::npos;
      out += fmt::format("\n{} {}{}\n\n", is_top_level ? "##" : "###", key.path,
                         key.when.empty() ? "" : " with `" + key.when + "`");
      std::string meaning = key.meaning;
      if (!meaning.empty() && meaning.back() != '.') meaning += ".";
      out += wrap("", meaning);
      in_table = false;
      continue;
    }
    if (!in_table) out += "\n| key | type | default | range | meaning |\n|---|---|---|---|---|\n";
    in_table = true;
    out +=
        fmt::format("| `{}` | {} | {} | {} | {} |\n", key.path.substr(key.path.rfind('.') + 1), key.type,
                    escape_table_cell(default_cell(key)), escape_table_cell(key.range), escape_table_cell(key.meaning));
  }
  return out;
}

std::string reference_json(std::span<const ConfigKey> keys) {
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  for (const ConfigKey& key : keys) {
    nlohmann::ordered_json row{{"path", key.path}, {"type", key.type}, {"required", key.required}};
    if (!key.range.empty()) row["range"] = key.range;
    if (!key.default_text.empty()) row["default"] = key.default_text;
    if (!key.when.empty()) row["when"] = key.when;
    row["meaning"] = key.meaning;
    list.push_back(std::move(row));
  }
  return nlohmann::ordered_json{{"schema_version", 1}, {"keys", std::move(list)}}.dump(2) + "\n";
}

namespace {

using Schema = nlohmann::ordered_json;

// The schema of a quantity's text. The pattern checks only the form; ConfigSection checks the range.
Schema quantity(const char* units) {
  return {{"type", "string"}, {"pattern", fmt::format("^\\s*-?[0-9._]+\\s*({})\\s*$", units)}};
}

Schema schema_of_type(const ConfigKey& key, std::string_view type) {
  const auto number = [&](const char* name) {
    Schema schema{{"type", name}};
    if (!key.min_text.empty()) schema["minimum"] = Schema::parse(key.min_text);
    if (!key.max_text.empty()) schema["maximum"] = Schema::parse(key.max_text);
    return schema;
  };
  if (type.ends_with(kOrAuto))
    return {{"anyOf", {schema_of_type(key, type.substr(0, type.size() - kOrAuto.size())), Schema{{"const", "auto"}}}}};
  if (type.starts_with(kListPrefix))
    return {{"type", "array"}, {"items", schema_of_type({}, type.substr(kListPrefix.size()))}};
  if (type == "whole number") return number("integer");
  if (type == "number") return number("number");
  if (type == "true or false") return {{"type", "boolean"}};
  if (type == "mapping") return {{"type", "object"}};
  if (type == "choice") return {{"enum", key.choices}};
  if (type == "duration") return quantity("ns|us|ms|s|min|h");
  if (type == "size") return quantity("[kMGT]?B|[KMGT]iB");
  if (type == "rate") return quantity("[kMG]?bit/s");
  return {{"type", {"string", "number", "boolean"}}};  // ConfigSection takes YAML's plain scalars as texts
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

// The schema of the section at a dotted path, created if necessary. `root` is a section. A component `name[]` is the
// element of the list `name`.
Schema& section_at(Schema& root, std::string_view path) {
  Schema* section = &root;
  while (!path.empty()) {
    const std::size_t end = std::min(path.find('.'), path.size());
    std::string name(path.substr(0, end));
    path.remove_prefix(std::min(end + 1, path.size()));
    const bool is_list = name.ends_with("[]");
    if (is_list) name.resize(name.size() - 2);
    Schema& child = (*section)["properties"][name];
    if (child.is_null()) child = is_list ? Schema{{"type", "array"}, {"items", empty_section()}} : empty_section();
    section = is_list ? &child["items"] : &child;
  }
  return *section;
}

}  // namespace

std::string reference_schema(std::span<const ConfigKey> keys) {
  Schema root = empty_section();
  root["$schema"] = "https://json-schema.org/draft/2020-12/schema";
  root["title"] = "A run file of echoline";
  const auto add_key = [](Schema& top, std::string_view path, const ConfigKey& key) {
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
        key.default_text.empty() ? key.meaning : fmt::format("{} (default: {})", key.meaning, key.default_text);
    if (key.required)
      parent["required"].push_back(name);
    else
      allow_null(schema);
    parent["properties"][name] = std::move(schema);
  };
  // Additional keys of a section, given a value of another key. Keys with the same condition are grouped.
  struct Conditional {
    std::string section, when;
    // Has no `additionalProperties: false`, because it does not list the section's other keys.
    Schema then{{"properties", Schema::object()}};
  };
  std::vector<Conditional> conditionals;
  for (const ConfigKey& key : keys) {
    if (key.when.empty()) {
      add_key(root, key.path, key);
      continue;
    }
    const std::string section = key.path.substr(0, key.path.find('.'));
    if (conditionals.empty() || conditionals.back().section != section || conditionals.back().when != key.when)
      conditionals.push_back({section, key.when});
    add_key(conditionals.back().then, key.path.substr(section.size() + 1), key);
  }
  for (Conditional& conditional : conditionals) {
    Schema& section = section_at(root, conditional.section);
    // Declares the conditional keys, which the section's `additionalProperties: false` would refuse.
    for (const auto& [name, ignored] : conditional.then["properties"].items())
      section["properties"].emplace(name, Schema::object());
    const std::size_t colon = conditional.when.find(": ");  // ConfigKey::when
    const std::string key = conditional.when.substr(0, colon), value = conditional.when.substr(colon + 2);
    const Schema condition = {{"properties", {{key, {{"const", value}}}}}, {"required", {key}}};
    Schema rule = {{"if", condition}, {"then", std::move(conditional.then)}};
    section["allOf"].push_back(std::move(rule));
  }
  return root.dump(2) + "\n";
}

std::string reference_yaml(std::span<const ConfigKey> keys) {
  std::string out;
  std::string commented_prefix;  // prefix of the keys of a section that is commented out completely
  std::string open_list_path;    // the list whose first element has begun
  for (const ConfigKey& key : keys) {
    const auto depth = static_cast<std::size_t>(std::count(key.path.begin(), key.path.end(), '.'));
    const std::string indent(2 * depth, ' ');
    const std::string name = key.path.substr(key.path.rfind('.') + 1);
    if (!commented_prefix.empty() && !key.path.starts_with(commented_prefix)) commented_prefix.clear();
    if (is_section(key)) {
      // A list may be empty; keys that its elements require are required only in an element.
      if (key.optional_section || !key.when.empty() || key.type == "list")
        commented_prefix = key.path + (key.type == "list" ? "[]." : ".");
      out += "\n" + wrap(indent + "# ", (key.when.empty() ? "" : "With `" + key.when + "`. ") + key.meaning);
      out += indent + (commented_prefix.empty() ? "" : "#") + name + ":\n";
      continue;
    }
    out += wrap(indent + "# ", fmt::format("{} [{}]", key.meaning, type_and_range(key)));
    const std::string list = key.path.substr(0, key.path.rfind('.'));
    const bool in_element = list.ends_with("[]");
    const bool element_begun = in_element && open_list_path == list;
    if (in_element) open_list_path = list;
    const char* item = !in_element ? "" : element_begun ? "  " : "- ";  // the element's first key gets the dash
    out += fmt::format("{}{}{}{}:{}\n", indent, key.required && commented_prefix.empty() ? "" : "#", item, name,
                       key.default_is_literal && !key.default_text.empty() ? " " + key.default_text : "");
  }
  return out.empty() ? out : out.substr(out.front() == '\n' ? 1 : 0);
}

}  // namespace echoline
