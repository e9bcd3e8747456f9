// Flattens a run file, for the comparison when a run resumes.
#include "base/config_flat.hpp"

#include <algorithm>

#include "base/config_tree.hpp"

namespace echoline {
namespace {

void flatten(const ConfigNode& node, const std::string& path, std::map<std::string, std::string>& values) {
  using Kind = ConfigNode::Kind;
  const auto is_section = [](const ConfigNode& n) { return n.kind == Kind::kMapping; };
  if (is_section(node) && !node.children.empty()) {
    for (std::size_t i = 0; i < node.children.size(); ++i)
      flatten(node.children[i], path.empty() ? node.keys[i] : path + "." + node.keys[i], values);
  } else if (node.kind == Kind::kSequence && std::any_of(node.children.begin(), node.children.end(), is_section)) {
    for (std::size_t i = 0; i < node.children.size(); ++i)
      flatten(node.children[i], fmt::format("{}[{}]", path, i), values);
  } else {
    values[path] = node.kind == Kind::kScalar ? node.text : to_json(node);  // a plain list, an empty section or null
  }
}

}  // namespace

Result<std::map<std::string, std::string>> flat_config(std::string_view yaml) {
  ConfigNode root;
  std::vector<ConfigProblem> problems;
  if (!parse_yaml(yaml, kFileSource, root, problems))
    return fail(Code::kInvalid, "read settings", "line {}: {}", problems.back().place.line, problems.back().message);
  std::map<std::string, std::string> values;
  if (root.kind == ConfigNode::Kind::kMapping) flatten(root, "", values);
  return values;
}

}  // namespace echoline
