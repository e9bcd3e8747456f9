// Finds the few elements of S3's answers that matter. The answers are flat enough for that: no element contains another
// of the same name.
#include "store/s3_answers.hpp"

#include <charconv>

namespace echoline::store {
namespace {

constexpr std::string_view kOperation = "list objects";

// The bytes between the first <element> from `begin` on and its end, and the position after it.
struct Found {
  std::string_view inside;
  std::size_t end = 0;
};
std::optional<Found> find_element(std::string_view xml, std::string_view element, std::size_t begin) {
  const std::string open = fmt::format("<{}>", element), close = fmt::format("</{}>", element);
  const auto first = xml.find(open, begin);
  if (first == xml.npos) return std::nullopt;
  const auto inside = first + open.size(), last = xml.find(close, inside);
  if (last == xml.npos) return std::nullopt;
  return Found{.inside = xml.substr(inside, last - inside), .end = last + close.size()};
}

// Appends a code point as UTF-8; false for one that XML does not allow.
bool append_code_point(std::string& text, unsigned code) {
  constexpr unsigned kLast = 0x10FFFF;
  if (code == 0 || code > kLast) return false;
  if (code < 0x80) {
    text += static_cast<char>(code);
  } else if (code < 0x800) {
    text += static_cast<char>(0xC0 | (code >> 6));
    text += static_cast<char>(0x80 | (code & 0x3F));
  } else if (code < 0x10000) {
    text += static_cast<char>(0xE0 | (code >> 12));
    text += static_cast<char>(0x80 | ((code >> 6) & 0x3F));
    text += static_cast<char>(0x80 | (code & 0x3F));
  } else {
    text += static_cast<char>(0xF0 | (code >> 18));
    text += static_cast<char>(0x80 | ((code >> 12) & 0x3F));
    text += static_cast<char>(0x80 | ((code >> 6) & 0x3F));
    text += static_cast<char>(0x80 | (code & 0x3F));
  }
  return true;
}

std::optional<std::string> unescaped(std::string_view text) {
  constexpr std::pair<std::string_view, char> kEntities[] = {
      {"amp", '&'}, {"lt", '<'}, {"gt", '>'}, {"quot", '"'}, {"apos", '\''}};
  std::string plain;
  for (std::size_t at = 0; at < text.size();) {
    if (text[at] == '<') return std::nullopt;
    if (text[at] != '&') {
      plain += text[at++];
      continue;
    }
    const auto end = text.find(';', at);
    if (end == text.npos) return std::nullopt;
    const std::string_view name = text.substr(at + 1, end - at - 1);
    at = end + 1;
    if (name.starts_with('#')) {
      const bool is_hex = name.starts_with("#x");
      unsigned code = 0;
      const char* const first = name.data() + (is_hex ? 2 : 1);
      const char* const last = name.data() + name.size();
      const auto [stop, error] = std::from_chars(first, last, code, is_hex ? 16 : 10);
      if (error != std::errc() || stop != last || !append_code_point(plain, code)) return std::nullopt;
      continue;
    }
    bool is_known = false;
    for (const auto& [entity, character] : kEntities)
      if (name == entity) plain += character, is_known = true;
    if (!is_known) return std::nullopt;
  }
  return plain;
}

}  // namespace

std::optional<std::string> xml_text(std::string_view xml, std::string_view element) {
  const auto found = find_element(xml, element, 0);
  return found ? unescaped(found->inside) : std::nullopt;
}

Result<S3List> parse_s3_list(std::string_view xml) {
  if (!find_element(xml, "IsTruncated", 0))
    return fail(Code::kCorrupt, kOperation, "expected a ListBucketResult, found {} bytes without <IsTruncated>",
                xml.size());
  S3List list;
  std::size_t at = 0;
  while (const auto object = find_element(xml, "Contents", at)) {
    at = object->end;
    const auto key = xml_text(object->inside, "Key"), size = xml_text(object->inside, "Size");
    ObjectInfo info;
    const char* const end = size ? size->data() + size->size() : nullptr;
    if (!key || key->empty() || !size || size->empty() || std::from_chars(size->data(), end, info.bytes).ptr != end)
      return fail(Code::kCorrupt, kOperation, "object {} of a list has no valid <Key> and <Size>", list.objects.size());
    info.key = *key;
    list.objects.push_back(std::move(info));
  }
  if (xml_text(xml, "IsTruncated") == "true") {
    list.next = xml_text(xml, "NextContinuationToken").value_or("");
    if (list.next.empty())
      return fail(Code::kCorrupt, kOperation, "a truncated list has no valid <NextContinuationToken>");
  }
  return list;
}

}  // namespace echoline::store
