// Reads ELF files, for `echoline bundle`.
#include "cli/shared_files.hpp"

#include <elf.h>

#include <algorithm>
#include <cstring>
#include <span>
#include <unordered_map>

#include "delta/mapped_file.hpp"

namespace echoline::cli {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kReadLibrary = "read library";

// The sections of a library that this file uses. All are empty unless it is a 64-bit ELF file with a section table.
class ElfFile {
 public:
  explicit ElfFile(std::span<const std::byte> bytes) : bytes_(bytes) {
    const auto* const header = at<Elf64_Ehdr>(0);
    if (header == nullptr || std::memcmp(header->e_ident, ELFMAG, SELFMAG) != 0 ||
        header->e_ident[EI_CLASS] != ELFCLASS64)
      return;
    for (unsigned i = 0; i < header->e_shnum; ++i) {
      const auto* const section = at<Elf64_Shdr>(header->e_shoff + std::uint64_t{i} * sizeof(Elf64_Shdr));
      if (section == nullptr) continue;
      Section* const target = section->sh_type == SHT_DYNSYM        ? &symbols_
                              : section->sh_type == SHT_DYNAMIC     ? &dynamic_
                              : section->sh_type == SHT_GNU_verneed ? &versions_
                                                                    : nullptr;
      if (target == nullptr) continue;
      if (const auto* const names =
              at<Elf64_Shdr>(header->e_shoff + std::uint64_t{section->sh_link} * sizeof(Elf64_Shdr)))
        *target = {section->sh_offset, section->sh_size, names->sh_offset, names->sh_size};
    }
  }

  std::uint64_t dynamic_offset() const { return dynamic_.offset; }

  std::vector<Elf64_Dyn> dynamic_entries() const {
    std::vector<Elf64_Dyn> entries;
    for (std::uint64_t i = 0; (i + 1) * sizeof(Elf64_Dyn) <= dynamic_.size; ++i)
      if (const auto* const entry = at<Elf64_Dyn>(dynamic_.offset + i * sizeof(Elf64_Dyn))) entries.push_back(*entry);
    return entries;
  }
  // The library that an entry of the dynamic table names; empty for other entries.
  std::string_view needed_library(const Elf64_Dyn& entry) const {
    return entry.d_tag == DT_NEEDED ? name(dynamic_, entry.d_un.d_val) : "";
  }

  // Calls visit(name, defined) for every named symbol; `defined`: this file defines it. Entry 0 of the table is no
  // symbol.
  template <class Visit>
  void visit_symbols(Visit&& visit) const {
    for (std::uint64_t i = 1; (i + 1) * sizeof(Elf64_Sym) <= symbols_.size; ++i) {
      const auto* const symbol = at<Elf64_Sym>(symbols_.offset + i * sizeof(Elf64_Sym));
      if (symbol == nullptr) return;
      if (const std::string_view symbol_name = name(symbols_, symbol->st_name); !symbol_name.empty())
        visit(symbol_name, symbol->st_shndx != SHN_UNDEF);
    }
  }

  // Calls visit(name) for every library of which the file requires certain versions. The loader refuses the file
  // without these libraries.
  template <class Visit>
  void visit_versioned_libraries(Visit&& visit) const {
    for (std::uint64_t offset = 0; offset < versions_.size;) {
      const auto* const entry = at<Elf64_Verneed>(versions_.offset + offset);
      if (entry == nullptr) return;
      visit(name(versions_, entry->vn_file));
      if (entry->vn_next == 0) return;
      offset += entry->vn_next;
    }
  }

 private:
  struct Section {
    std::uint64_t offset = 0, size = 0;
    std::uint64_t names_offset = 0, names_size = 0;  // of the string table with its names
  };

  // The structure at an offset; null if the file is too short or the offset is not aligned.
  template <class T>
  const T* at(std::uint64_t offset) const {
    if (offset > bytes_.size() || bytes_.size() - offset < sizeof(T) || offset % alignof(T) != 0) return nullptr;
    return reinterpret_cast<const T*>(bytes_.data() + offset);
  }
  std::string_view name(const Section& section, std::uint64_t offset) const {
    if (offset >= section.names_size || section.names_offset > bytes_.size() ||
        section.names_size > bytes_.size() - section.names_offset)
      return "";
    const char* const begin = reinterpret_cast<const char*>(bytes_.data() + section.names_offset + offset);
    return {begin, ::strnlen(begin, section.names_size - offset)};
  }

  std::span<const std::byte> bytes_;
  Section symbols_, dynamic_, versions_;
};

// Whether the library is needed even if no other library takes a symbol from it, because it registers itself when it is
// loaded, or is the loader.
bool is_used_without_symbols(const std::string& name) {
  for (const char* const prefix : {"libtorch", "libc10", "libcaffe2", "libcu", "libnv", "ld-linux"})
    if (name.starts_with(prefix)) return true;
  return false;
}

}  // namespace

Result<std::set<fs::path>> find_unneeded(const std::vector<fs::path>& loaded, const std::vector<fs::path>& roots) {
  std::vector<delta::MappedFile> files;
  std::vector<ElfFile> parsed;
  std::unordered_map<std::string_view, std::vector<std::size_t>> definers_of_symbol;  // indices in `loaded`
  std::unordered_map<std::string, std::size_t> index_by_name;
  for (std::size_t i = 0; i < loaded.size(); ++i) {
    ECHO_ASSIGN(delta::MappedFile file, delta::MappedFile::open(loaded[i], kReadLibrary));
    files.push_back(std::move(file));
    parsed.emplace_back(files.back().bytes());
    index_by_name[loaded[i].filename()] = i;
    parsed.back().visit_symbols([&](std::string_view name, bool defined) {
      if (defined) definers_of_symbol[name].push_back(i);
    });
  }
  std::vector<std::size_t> unvisited;
  std::vector<bool> is_needed(loaded.size());
  const auto mark_needed = [&](std::size_t i) {
    if (!is_needed[i]) unvisited.push_back(i);
    is_needed[i] = true;
  };
  for (std::size_t i = 0; i < loaded.size(); ++i)
    if (is_used_without_symbols(loaded[i].filename()) ||
        std::find(roots.begin(), roots.end(), loaded[i]) != roots.end())
      mark_needed(i);
  while (!unvisited.empty()) {
    const ElfFile& file = parsed[unvisited.back()];
    unvisited.pop_back();
    const auto mark_named = [&](std::string_view name) {
      if (const auto found = index_by_name.find(std::string(name)); found != index_by_name.end())
        mark_needed(found->second);
    };
    file.visit_versioned_libraries(mark_named);
    bool has_symbols = false;
    file.visit_symbols([&](std::string_view name, bool defined) {
      has_symbols = true;
      if (defined) return;
      if (const auto found = definers_of_symbol.find(name); found != definers_of_symbol.end())
        for (const std::size_t i : found->second) mark_needed(i);
    });
    // Without symbols it is not known what the file uses, so it needs all that it names.
    if (has_symbols) continue;
    for (const Elf64_Dyn& entry : file.dynamic_entries()) mark_named(file.needed_library(entry));
  }
  std::set<fs::path> unneeded;
  for (std::size_t i = 0; i < loaded.size(); ++i)
    if (!is_needed[i]) unneeded.insert(loaded[i]);
  return unneeded;
}

Result<std::vector<std::string>> needed_libraries(const fs::path& file) {
  ECHO_ASSIGN(const delta::MappedFile mapped_file, delta::MappedFile::open(file, kReadLibrary));
  const ElfFile elf_file(mapped_file.bytes());
  std::vector<std::string> names;
  for (const Elf64_Dyn& entry : elf_file.dynamic_entries())
    if (const std::string_view name = elf_file.needed_library(entry); !name.empty()) names.emplace_back(name);
  return names;
}

Result<int> remove_needed(const fs::path& file, const std::set<std::string>& names) {
  ECHO_ASSIGN(delta::MappedFile mapped_file, delta::MappedFile::open_to_write(file, kReadLibrary));
  const ElfFile elf_file(mapped_file.bytes());
  std::vector<Elf64_Dyn> entries = elf_file.dynamic_entries();
  const std::size_t entry_count = entries.size();
  std::erase_if(entries,
                [&](const Elf64_Dyn& entry) { return names.contains(std::string(elf_file.needed_library(entry))); });
  const int removed = static_cast<int>(entry_count - entries.size());
  entries.resize(entry_count, Elf64_Dyn{});  // DT_NULL, which ends the table
  if (removed > 0)
    std::memcpy(mapped_file.mutable_bytes().data() + elf_file.dynamic_offset(), entries.data(),
                entry_count * sizeof(Elf64_Dyn));
  return removed;
}

}  // namespace echoline::cli
