// Formats the reference of a file that ConfigFile reads, from its reader's declarations (ConfigFile::keys()).
#pragma once
#include <span>
#include <string>

#include "base/config.hpp"

namespace echoline {

// One heading and one table per section.
std::string reference_markdown(std::span<const ConfigKey> keys);
// A JSON Schema (draft 2020-12) of the file, for completion and checks in an editor. Keys that are read only with a
// certain value of another key are under `if` and `then`. It checks form, ranges and names; only the reader checks
// relations between keys.
std::string reference_schema(std::span<const ConfigKey> keys);
// An object with schema_version and all properties of the keys.
std::string reference_json(std::span<const ConfigKey> keys);
// A file to fill in: every key with its meaning; keys with a default are commented out.
std::string reference_yaml(std::span<const ConfigKey> keys);

}  // namespace echoline
