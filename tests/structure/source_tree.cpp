#include "tests/structure/source_tree.hpp"

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <regex>
#include <sstream>

#include "base/result.hpp"

namespace echoline::structure {
namespace {

SourceFile read_source(const std::filesystem::path& root, const std::filesystem::path& path) {
  SourceFile file;
  file.path = std::filesystem::relative(path, root).generic_string();
  file.folder = file.path.substr(0, file.path.find('/'));
  file.is_header = path.extension() == ".hpp" || path.extension() == ".cuh";
  std::ifstream in(path);
  file.text.assign(std::istreambuf_iterator<char>(in), {});
  static const std::regex kInclude(R"(^\s*#\s*include\s*["<]([^">]+)[">])");
  static const std::regex kPrivate(R"(\b([Pp]rivate|[Ii]nternal)\b)");
  std::istringstream lines(file.text);
  bool in_first_comment = true;
  for (std::string line; std::getline(lines, line); ++file.lines) {
    in_first_comment = in_first_comment && line.starts_with("//");
    if (in_first_comment && file.is_header && std::regex_search(line, kPrivate)) file.is_private = true;
    if (std::smatch match; std::regex_search(line, match, kInclude)) file.includes.push_back(match[1]);
  }
  return file;
}

// Runs the compiler's preprocessor on a source that includes `headers`. Returns the files it read, or nothing on
// failure.
std::vector<std::string> preprocess(const std::filesystem::path& root, const std::vector<std::string>& headers,
                                    bool& good) {
  const auto source = std::filesystem::temp_directory_path() /
                      fmt::format("echoline_headers_{}.cpp", std::hash<std::string>{}(root.string()));
  {
    std::ofstream out(source);
    for (const std::string& header : headers) out << "#include \"" << header << "\"\n";
  }
  const std::string command = fmt::format("'{}' -std=c++20 -M -I'{}' -I'{}' '{}' 2>/dev/null", ECHOLINE_COMPILER,
                                          root.string(), ECHOLINE_GENERATED_DIR, source.string());
  std::string output;
  FILE* pipe = popen(command.c_str(), "r");
  ECHO_CHECK(pipe != nullptr);
  char buffer[4096];
  for (std::size_t n = 0; (n = fread(buffer, 1, sizeof buffer, pipe)) > 0;) output.append(buffer, n);
  good = pclose(pipe) == 0;
  std::filesystem::remove(source);
  std::replace(output.begin(), output.end(), '\n', ' ');
  return split(output, ' ');
}

bool is_hidden_library(const std::string& path) {
  static const std::regex kHidden(
      R"((/torch/|/ATen/|/c10/|/uv\.h$|/uv/[a-z]+\.h$|/sqlite3\.h$|/openssl/|/blake3\.h$|/boost/graph/))");
  return std::regex_search(path, kHidden);
}

}  // namespace

std::vector<std::string> split(std::string_view text, char separator) {
  std::vector<std::string> parts;
  std::istringstream in{std::string(text)};
  for (std::string part; std::getline(in, part, separator);)
    if (!part.empty()) parts.push_back(part);
  return parts;
}

Layers parse_layers(std::string_view text) {
  Layers layers;
  for (const std::string& line : split(text, '|')) {
    const auto colon = line.find(':');
    ECHO_CHECK(colon != std::string::npos, "expected 'folder: folders', found '{}'", line);
    auto& allowed = layers[line.substr(0, colon)];
    for (const std::string& folder : split(line.substr(colon + 1), ' ')) allowed.insert(folder);
  }
  return layers;
}

std::vector<SourceFile> read_tree(const std::filesystem::path& root, const Layers& layers) {
  std::vector<SourceFile> files;
  std::vector<std::string> folders{"tests"};
  for (const auto& [folder, allowed] : layers) folders.push_back(folder);
  for (const std::string& folder : folders) {
    if (!std::filesystem::exists(root / folder)) continue;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(root / folder)) {
      const std::string extension = entry.path().extension();
      if (entry.is_regular_file() &&
          (extension == ".hpp" || extension == ".cpp" || extension == ".cu" || extension == ".cuh"))
        files.push_back(read_source(root, entry.path()));
    }
  }
  std::sort(files.begin(), files.end(), [](const auto& a, const auto& b) { return a.path < b.path; });
  return files;
}

std::vector<std::string> check_includes(const std::vector<SourceFile>& files, const Layers& layers) {
  std::set<std::string> private_headers;
  for (const SourceFile& file : files)
    if (file.is_private) private_headers.insert(file.path);

  std::vector<std::string> violations;
  for (const SourceFile& file : files) {
    if (file.folder == "tests") continue;  // a test may look at everything
    for (const std::string& include : file.includes) {
      const std::string folder = include.substr(0, include.find('/'));
      if (folder == file.folder || include.find('/') == std::string::npos) continue;
      const bool layered = layers.contains(folder);
      if (folder == "tests" || (layered && !layers.at(file.folder).contains(folder)))
        violations.push_back(fmt::format("{}: includes {}, which {}/ may not use", file.path, include, file.folder));
      else if (private_headers.contains(include))
        violations.push_back(fmt::format("{}: includes {}, which is private to {}/", file.path, include, folder));
    }
  }
  return violations;
}

std::vector<std::string> check_torch(const std::vector<SourceFile>& files, const std::vector<std::string>& places,
                                     const std::set<std::string>& torch_sources) {
  // Walks back from libtorch along the includes.
  std::map<std::string, std::vector<const SourceFile*>> includers;
  for (const SourceFile& file : files)
    for (const std::string& include : file.includes) {
      const bool torch = include.starts_with("torch/") || include.starts_with("ATen/") || include.starts_with("c10/");
      includers[torch ? "libtorch" : include].push_back(&file);
    }
  std::map<std::string, std::string> through;  // file -> what it includes
  std::vector<std::string> open{"libtorch"};
  while (!open.empty()) {
    const std::string what = open.back();
    open.pop_back();
    for (const SourceFile* file : includers[what])
      if (through.emplace(file->path, what).second) open.push_back(file->path);
  }
  std::vector<std::string> violations;
  for (const SourceFile& file : files) {
    const auto knows = through.find(file.path);
    if (knows == through.end() || file.path.starts_with("tests/bench/")) continue;
    const auto is_here = [&](const std::string& place) { return file.path.starts_with(place); };
    if (file.folder != "tests" && std::none_of(places.begin(), places.end(), is_here))
      violations.push_back(fmt::format("{}: includes {}, where libtorch must not be known", file.path, knows->second));
    else if (!file.is_header && !torch_sources.contains(file.path))
      violations.push_back(
          fmt::format("{}: includes {}, and is not among the TORCH sources", file.path, knows->second));
  }
  return violations;
}

std::vector<std::string> check_style(const std::vector<SourceFile>& files) {
  static const std::regex kBanned(R"(\bstd::v?format(_to)?\s*\(|\bco_(await|yield|return)\b|\bat::parallel_for\s*\()");
  std::vector<std::string> violations;
  for (const SourceFile& file : files) {
    const auto complain = [&](std::string_view what) { violations.push_back(fmt::format("{}: {}", file.path, what)); };
    if (file.lines > 1000) complain(fmt::format("is longer than 1000 lines ({})", file.lines));
    if (file.is_header && !file.text.starts_with("// "))
      complain("a header begins with a comment that says what it is for");
    if (file.is_header && file.text.find("\n#pragma once\n") == std::string::npos) complain("has no #pragma once");
    if (std::smatch match; std::regex_search(file.text, match, kBanned)) complain(fmt::format("uses {}", match.str()));
  }
  return violations;
}

std::vector<std::string> public_headers(const std::vector<SourceFile>& files, const std::string& folder) {
  std::vector<std::string> headers;
  for (const SourceFile& file : files)
    if (file.folder == folder && file.is_header && !file.is_private) headers.push_back(file.path);
  return headers;
}

std::vector<std::string> check_hidden_libraries(const std::filesystem::path& root,
                                                const std::vector<std::string>& headers) {
  const auto problem = [&](const std::vector<std::string>& some) -> std::string {
    bool good = false;
    for (const std::string& path : preprocess(root, some, good))
      if (is_hidden_library(path)) return "includes " + path;
    return good ? "" : "does not preprocess";
  };
  std::vector<std::string> violations;
  if (headers.empty() || problem(headers).empty()) return violations;
  for (const std::string& header : headers)
    if (const std::string what = problem({header}); !what.empty()) violations.push_back(header + ": " + what);
  return violations;
}

}  // namespace echoline::structure
