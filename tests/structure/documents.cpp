#include "tests/structure/documents.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <fstream>
#include <map>
#include <regex>

namespace echoline::structure {
namespace {

// Lower case, punctuation left out, spaces as hyphens.
std::string anchor_of(const std::string& heading) {
  std::string anchor;
  for (const char c : heading) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == ' ')
      anchor += '-';
    else if (byte >= 0x80 || std::isalnum(byte) != 0 || c == '-' || c == '_')
      anchor += static_cast<char>(std::tolower(byte));
  }
  return anchor;
}

Document read_document(const std::filesystem::path& root, const std::filesystem::path& path) {
  static const std::regex kLink(R"(\]\(([^)\s]+)\))"), kCode("`[^`]*`"), kHeading(R"(^#+ +(.*?) *$)");
  Document document;
  document.path = std::filesystem::relative(path, root).generic_string();
  std::ifstream in(path);
  bool code = false;
  for (std::string line; std::getline(in, line);) {
    if (line.starts_with("```")) code = !code;
    if (code) continue;
    if (std::smatch match; std::regex_match(line, match, kHeading)) document.anchors.insert(anchor_of(match[1]));
    const std::string text = std::regex_replace(line, kCode, "");
    for (std::sregex_iterator it(text.begin(), text.end(), kLink), end; it != end; ++it)
      if (const std::string target = (*it)[1]; target.find(':') == std::string::npos) document.links.push_back(target);
  }
  return document;
}

}  // namespace

std::vector<Document> read_documents(const std::filesystem::path& root) {
  static const std::set<std::string> kLeftOut{"build", "runs", "sweeps"};
  std::vector<Document> documents;
  for (auto it = std::filesystem::recursive_directory_iterator(root); it != std::filesystem::end(it); ++it) {
    const std::string name = it->path().filename();
    if (it->is_directory() && (name.starts_with('.') || kLeftOut.contains(name))) it.disable_recursion_pending();
    if (it->is_regular_file() && it->path().extension() == ".md") documents.push_back(read_document(root, it->path()));
  }
  std::sort(documents.begin(), documents.end(), [](const auto& a, const auto& b) { return a.path < b.path; });
  return documents;
}

std::vector<std::string> check_links(const std::filesystem::path& root) {
  const std::vector<Document> documents = read_documents(root);
  std::map<std::string, const Document*> by_path;
  for (const Document& document : documents) by_path[document.path] = &document;
  std::vector<std::string> violations;
  for (const Document& document : documents)
    for (const std::string& link : document.links) {
      const auto hash = std::min(link.find('#'), link.size());
      const std::filesystem::path file = std::filesystem::path(document.path).parent_path() / link.substr(0, hash);
      const std::string target = hash == 0 ? document.path : file.lexically_normal().generic_string();
      if (!std::filesystem::exists(root / target)) {
        violations.push_back(fmt::format("{}: links to {}, which does not exist", document.path, link));
      } else if (hash < link.size()) {
        const auto to = by_path.find(target);
        if (to == by_path.end() || !to->second->anchors.contains(link.substr(hash + 1)))
          violations.push_back(fmt::format("{}: links to {}, which has no such heading", document.path, link));
      }
    }
  return violations;
}

}  // namespace echoline::structure
