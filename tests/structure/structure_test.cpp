// The tree against its own rules, and the rules against trees that break them.
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>

#include "base/result.hpp"
#include "tests/structure/documents.hpp"
#include "tests/structure/source_tree.hpp"

namespace echoline::structure {
namespace {

const std::filesystem::path kRoot = ECHOLINE_SOURCE_DIR;
const Layers kLayers = parse_layers(ECHOLINE_LAYERS);

std::string joined(const std::vector<std::string>& lines) {
  std::string text;
  for (const std::string& line : lines) text += line + "\n";
  return text;
}

TEST(Tree, FoldersIncludeOnlyAllowedFolders) {
  const auto files = read_tree(kRoot, kLayers);
  EXPECT_GT(files.size(), 10u) << "the tree is at " << kRoot;
  EXPECT_EQ(joined(check_includes(files, kLayers)), "");
}

TEST(Tree, SourcesBuiltWithoutLibtorchDoNotIncludeIt) {
  const auto sources = split(ECHOLINE_TORCH_SOURCES, '|');
  EXPECT_EQ(joined(check_torch(read_tree(kRoot, kLayers), split(ECHOLINE_TORCH_PLACES, '|'),
                               {sources.begin(), sources.end()})),
            "");
}

TEST(Tree, FilesKeepTheHouseStyle) { EXPECT_EQ(joined(check_style(read_tree(kRoot, kLayers))), ""); }

TEST(Tree, PublicHeadersHideTheirLibraries) {
  const auto files = read_tree(kRoot, kLayers);
  const std::string configured = ECHOLINE_LIBRARIES;  // "|base|chains|"
  for (const std::string folder : {"overlay", "chains", "provisioner", "replay_buffer"}) {
    if (configured.find("|" + folder + "|") == std::string::npos) continue;  // ECHOLINE_ONLY: no generated headers
    const auto headers = public_headers(files, folder);
    EXPECT_FALSE(headers.empty()) << folder;
    EXPECT_EQ(joined(check_hidden_libraries(kRoot, headers)), "");
  }
}

TEST(Tree, DocumentsLinkToFilesAndHeadingsThatExist) {
  EXPECT_GT(read_documents(kRoot).size(), 20u);
  EXPECT_EQ(joined(check_links(kRoot)), "");
}

// A page that no index lists is not found. docs/decisions has an index of its own.
TEST(Tree, AnIndexListsEveryPage) {
  const std::vector<Document> documents = read_documents(kRoot);
  std::set<std::string> listed{"docs/README.md"};
  for (const Document& index : documents)
    if (index.path == "docs/README.md" || index.path == "docs/decisions/README.md")
      for (const std::string& link : index.links)
        listed.insert((std::filesystem::path(index.path).parent_path() / link).lexically_normal().generic_string());
  for (const Document& page : documents) {
    if (page.path.starts_with("docs/")) {
      EXPECT_TRUE(listed.contains(page.path)) << page.path << " is in no index";
    }
  }
}

// The program, the Python client and the newest section of the changelog have one version.
TEST(Tree, VersionsAgree) {
  const auto find = [](const std::filesystem::path& file, const std::string& before, const std::string& after) {
    std::ifstream in(kRoot / file);
    for (std::string line; std::getline(in, line);)
      if (line.starts_with(before)) return line.substr(before.size(), line.find(after, before.size()) - before.size());
    return std::string("nothing that begins with ") + before;
  };
  EXPECT_EQ(find("clients/python/pyproject.toml", "version = \"", "\""), ECHOLINE_VERSION);
  const std::string newest = find("CHANGELOG.md", "## ", " ");
  EXPECT_TRUE(newest == ECHOLINE_VERSION || newest == "Unreleased") << newest;
}

// A small tree in a temporary folder that breaks the rules.
class BrokenTree : public testing::Test {
 protected:
  BrokenTree() { std::filesystem::create_directories(root_); }
  ~BrokenTree() override { std::filesystem::remove_all(root_); }

  void write(const std::string& path, const std::string& text) {
    std::filesystem::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << text;
  }
  std::string includes() { return joined(check_includes(read_tree(root_, layers_), layers_)); }
  std::string style() { return joined(check_style(read_tree(root_, layers_))); }
  std::string hidden(const std::string& folder) {
    return joined(check_hidden_libraries(root_, public_headers(read_tree(root_, layers_), folder)));
  }

  const std::filesystem::path root_ =
      std::filesystem::path(testing::TempDir()) / ("echoline_tree_" + std::to_string(getpid()));
  const Layers layers_ = parse_layers("low:|middle: low|high: low middle");
};

TEST_F(BrokenTree, LayersParse) {
  EXPECT_EQ(layers_.at("low").size(), 0u);
  EXPECT_EQ(layers_.at("high"), (std::set<std::string>{"low", "middle"}));
}

TEST_F(BrokenTree, AllowedIncludesPass) {
  write("high/a.cpp", "#include \"middle/b.hpp\"\n#include <vector>\n#include <sys/stat.h>\n#include \"high/c.hpp\"\n");
  write("tests/low/a_test.cpp", "#include \"high/c.hpp\"\n");
  EXPECT_EQ(includes(), "");
}

TEST_F(BrokenTree, UpwardIncludesFail) {
  write("low/a.cpp", "  # include \"middle/b.hpp\"\n");
  write("low/sub/b.hpp", "#include <high/c.hpp>\n");
  EXPECT_EQ(includes(),
            "low/a.cpp: includes middle/b.hpp, which low/ may not use\n"
            "low/sub/b.hpp: includes high/c.hpp, which low/ may not use\n");
}

TEST_F(BrokenTree, LibtorchIsFoundThroughOtherHeaders) {
  write("low/tensors/loss.hpp", "#include \"low/tensors/model.hpp\"\n");
  write("low/tensors/model.hpp", "#include <torch/types.h>\n");
  write("low/tensors/loss.cpp", "#include \"low/tensors/loss.hpp\"\n");
  write("low/tensors/forgotten.cpp", "#include <ATen/ATen.h>\n");
  write("low/tensors/plain.cpp", "#include <vector>\n");
  write("middle/a.hpp", "#include \"low/tensors/loss.hpp\"\n");
  write("high/b.cpp", "#include \"middle/a.hpp\"\n");
  write("tests/high/b_test.cpp", "#include \"middle/a.hpp\"\n");
  EXPECT_EQ(joined(check_torch(read_tree(root_, layers_), {"low/tensors/"}, {"low/tensors/loss.cpp"})),
            "high/b.cpp: includes middle/a.hpp, where libtorch must not be known\n"
            "low/tensors/forgotten.cpp: includes libtorch, and is not among the TORCH sources\n"
            "middle/a.hpp: includes low/tensors/loss.hpp, where libtorch must not be known\n"
            "tests/high/b_test.cpp: includes middle/a.hpp, and is not among the TORCH sources\n");
}

TEST_F(BrokenTree, LinksThatLeadNowhereAreNamed) {
  write("low/FORMAT.md", "# Bytes\n\n## Where T_b goes, in `ms`\n\n```\n# no heading\n[no](link.md)\n```\n");
  write(
      "README.md",
      "[a](low/FORMAT.md) [b](low/FORMAT.md#where-t_b-goes-in-ms) [c](https://example.org/x.md) [d](#here)\n# Here\n");
  EXPECT_EQ(joined(check_links(root_)), "");
  write("low/notes.md", "[a](FORMAT.md#no-heading) [b](../low/gone.md) [c](FORMAT.md)\n[d](#bytes)\n");
  EXPECT_EQ(joined(check_links(root_)),
            "low/notes.md: links to FORMAT.md#no-heading, which has no such heading\n"
            "low/notes.md: links to ../low/gone.md, which does not exist\n"
            "low/notes.md: links to #bytes, which has no such heading\n");
}

TEST_F(BrokenTree, PrivateHeadersAndTestsStayHome) {
  write("low/inner.hpp", "// Helpers.\n// Private to this folder.\n#pragma once\n");
  write("low/a.cpp", "#include \"low/inner.hpp\"\n");
  write("middle/a.cpp", "#include \"low/inner.hpp\"\n#include \"tests/low/util.hpp\"\n");
  EXPECT_EQ(includes(),
            "middle/a.cpp: includes low/inner.hpp, which is private to low/\n"
            "middle/a.cpp: includes tests/low/util.hpp, which middle/ may not use\n");
}

TEST_F(BrokenTree, StyleIsChecked) {
  std::string banned = "auto x = std::";  // in two parts, or this file would break the rule itself
  banned += "format(\"{}\", 1);\n";
  write("low/a.hpp", "#pragma once\n");
  write("low/b.hpp", "// About b.\nint b();\n");
  write("low/c.cpp", banned);
  write("low/d.cpp", std::string(1001, '\n'));
  write("low/e.hpp", "// About e.\n#pragma once\n");
  write("low/f.cpp", "at::parallel_for" + std::string("(0, 8, 1, work);\n"));
  EXPECT_EQ(style(),
            "low/a.hpp: a header begins with a comment that says what it is for\n"
            "low/a.hpp: has no #pragma once\n"
            "low/b.hpp: has no #pragma once\n"
            "low/c.cpp: uses std::"
            "format(\n"
            "low/d.cpp: is longer than 1000 lines (1001)\n"
            "low/f.cpp: uses at::parallel_for"
            "(\n");
}

TEST_F(BrokenTree, HiddenLibrariesAreFoundThroughOtherHeaders) {
  write("low/clean.hpp", "// Clean.\n#pragma once\n#include <string>\n");
  EXPECT_EQ(hidden("low"), "");
  write("low/storage.hpp", "// Storage.\n#pragma once\n#include \"low/inner.hpp\"\n");
  write("low/inner.hpp", "// Private to this folder.\n#pragma once\n#include <sqlite3.h>\n");
  write("low/loop.hpp", "// Loop.\n#pragma once\n#include <uv.h>\n");
  write("low/keys.hpp", "// Keys.\n#pragma once\n#include <openssl/evp.h>\n");
  write("low/graph.hpp", "// Graph.\n#pragma once\n#include <boost/graph/adjacency_list.hpp>\n");
  write("low/tensor.hpp", "// Tensor.\n#pragma once\n#include <c10/macros/Macros.h>\n");
  write("low/torn.hpp", "// Torn.\n#pragma once\n#include \"low/missing.hpp\"\n");
  const std::string found = hidden("low");
  for (const char* part : {"low/storage.hpp: includes ", "sqlite3.h\n", "low/loop.hpp: includes ", "uv.h\n",
                           "low/graph.hpp: includes ", "/boost/graph/", "low/keys.hpp: includes ", "/openssl/",
                           "low/tensor.hpp: includes ", "low/torn.hpp: does not preprocess\n"})
    EXPECT_NE(found.find(part), std::string::npos) << part << "\nin\n" << found;
  EXPECT_EQ(found.find("clean.hpp"), std::string::npos) << found;
  EXPECT_EQ(found.find("inner.hpp:"), std::string::npos) << found;
}

}  // namespace
}  // namespace echoline::structure
