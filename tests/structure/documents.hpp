// Rules about the Markdown documents of the tree.
#pragma once
#include <filesystem>
#include <set>
#include <string>
#include <vector>

namespace echoline::structure {

struct Document {
  std::string path;                // relative to the root, with '/'
  std::vector<std::string> links;  // targets without a scheme, in order; code is left out
  std::set<std::string> anchors;   // of its headings, as GitHub makes them
};

// The .md files below `root`, without hidden folders and the outputs of builds and runs (build, runs, sweeps).
std::vector<Document> read_documents(const std::filesystem::path& root);

// Every link to a file or heading that does not exist, one line each.
std::vector<std::string> check_links(const std::filesystem::path& root);

}  // namespace echoline::structure
