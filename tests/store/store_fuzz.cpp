// The parsers of a store: texts from a bucket, which may be forged; answers of a service; profile files.
#include <cstdlib>
#include <string_view>

#include "store/manifest.hpp"
#include "store/s3_answers.hpp"
#include "store/s3_credentials.hpp"

namespace {

using namespace echoline::store;

void require(bool condition) {
  if (!condition) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const echoline::overlay::trust::SigningKey key{echoline::overlay::trust::SigningKey::Seed{}};
  static const echoline::overlay::trust::Verifier verifier(key.public_key());
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  // Signed here, so that the parser behind the signature is reached; a text that it accepts is written back as it was.
  const std::string manifest = sign_text("store manifest", input, key);
  if (const auto read = read_manifest(manifest, verifier, "m")) require(sign(*read, key) == manifest);
  const std::string files = sign_text("store files", input, key);
  if (const auto read = read_file_list(files, verifier)) require(sign(*read, key) == files);
  if (const auto read = read_run_description(sign_text("store run", input, key)))
    require(read->key == key.public_key());
  read_latest(input, verifier).has_value();
  read_run_description(input).has_value();
  if (const auto list = parse_s3_list(input))
    for (const ObjectInfo& object : list->objects) require(!object.key.empty());
  if (const auto keys = parse_profile(input, "default", "credentials")) require(keys->size() <= size);
  if (const auto parsed = parse_publication_key(input))
    require(input.starts_with(folder_key(parsed->kind, parsed->name) + "/"));
  if (const auto term = parse_lease_key(input)) require(lease_key(*term) == input);
  return 0;
}
