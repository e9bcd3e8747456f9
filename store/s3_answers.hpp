// Reads the XML bodies of S3's answers. Private to this folder.
#pragma once
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "store/object_store.hpp"

namespace echoline::store {

// One page of a list.
struct S3List {
  std::vector<ObjectInfo> objects;
  std::string next;  // the token of the next page; empty: none
};
// kCorrupt if a key or size is missing or malformed. Pure, like the others.
Result<S3List> parse_s3_list(std::string_view xml);

// The content of the first element of this name without nested elements, with XML's entities replaced. Absent if there
// is none, or if it is not closed.
std::optional<std::string> xml_text(std::string_view xml, std::string_view element);

}  // namespace echoline::store
