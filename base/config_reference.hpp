// The reference of a file that ConfigFile reads, made from what its reader declares (ConfigFile::keys()).
#pragma once
#include <span>
#include <string>

#include "base/config.hpp"

namespace echoline {

// One heading and one table per section.
std::string reference_markdown(std::span<const ConfigKey> keys);
// As a JSON Schema (draft 2020-12) of the file, with which an editor completes and checks keys while one writes. Keys
// that are read only with a certain value of another key are under `if` and `then`. It checks form, ranges and names;
// what must hold between keys only the reader knows.
std::string reference_schema(std::span<const ConfigKey> keys);
// An object: schema_version, and the keys with everything that is known of them.
std::string reference_json(std::span<const ConfigKey> keys);
// A file to fill in: every key with its meaning, those with a default commented out.
std::string reference_yaml(std::span<const ConfigKey> keys);

}  // namespace echoline
