// Rules about source files, checked by reading them: allowed includes, and the form of headers.
#pragma once
#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace echoline::structure {

// Folder -> folders it may use, from cmake/EcholineLayers.cmake ("a:|b: a|c: a b").
using Layers = std::map<std::string, std::set<std::string>>;
Layers parse_layers(std::string_view text);

struct SourceFile {
  std::string path;    // relative to the root, with '/'
  std::string folder;  // the top-level folder
  bool is_header = false;
  bool is_private = false;  // a header whose first comment says that it is private or internal to its folder
  int lines = 0;
  std::vector<std::string> includes;  // what stands between the quotes or angle brackets
  std::string text;
};

// The .hpp, .cpp, .cu and .cuh files of the layered folders and of tests/.
std::vector<SourceFile> read_tree(const std::filesystem::path& root, const Layers& layers);

// Every violation, one line each: an include of a folder that the table forbids, of another folder's private header,
// or of a test from the product.
std::vector<std::string> check_includes(const std::vector<SourceFile>& files, const Layers& layers);

// Two kinds of violations, one line each:
// - a file of the product that includes libtorch, directly or through others, and whose path begins with none of
//   `places`;
// - a source (tests but benchmarks included) that does so and is not in `torch_sources`, the sources that a build
//   without libtorch leaves out.
std::vector<std::string> check_torch(const std::vector<SourceFile>& files, const std::vector<std::string>& places,
                                     const std::set<std::string>& torch_sources);

// Splits "a|b|c".
std::vector<std::string> split(std::string_view text, char separator);

// Headers begin with a comment and then #pragma once; no file is longer than 1,000 lines; nothing uses std::format or
// coroutines, which g++ 12 does not have or miscompiles, or at::parallel_for, which stays on one thread here
// (model/parallel.hpp).
std::vector<std::string> check_style(const std::vector<SourceFile>& files);

// The headers of a folder that other folders may include.
std::vector<std::string> public_headers(const std::vector<SourceFile>& files, const std::string& folder);

// Those of `headers` that include, directly or through anything else, a file of libtorch, libuv, SQLite or
// Boost.Graph; "does not preprocess" for those that do not stand alone. Asks the compiler (-M), once when all is well.
std::vector<std::string> check_hidden_libraries(const std::filesystem::path& root,
                                                const std::vector<std::string>& headers);

}  // namespace echoline::structure
