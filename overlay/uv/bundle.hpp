// The worker's bundle as a file that a learner serves.
#pragma once
#include <filesystem>
#include <memory>
#include <string>

#include "base/files.hpp"
#include "base/result.hpp"
#include "base/units.hpp"
#include "overlay/trust/authority.hpp"

namespace echoline::overlay {

struct BundleFile {
  std::shared_ptr<const Descriptor> file;
  Bytes size;
  std::string sha256;  // in hexadecimal
};

// The data that a machine without any knowledge of the run needs before it fetches the bundle.
struct BundleTerms {
  std::string sha256;     // of the bundle, in hexadecimal
  std::string key_pin;    // of the learner's key, as `curl --pinnedpubkey` takes it
  std::string authority;  // the run's certificate (DER) in base64; it signs the learner's certificate, CN = learner
};
BundleTerms terms_of(const BundleFile& bundle, const trust::Authority& authority);

// Reads the whole file. kIo; kInvalid if it is not a regular file.
Result<BundleFile> open_bundle(const std::filesystem::path& path);

}  // namespace echoline::overlay
