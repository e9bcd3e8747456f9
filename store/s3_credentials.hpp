// The access keys of S3-compatible services, from the environment or the profile file that AWS's own tools use.
#pragma once
#include <functional>
#include <map>
#include <string>
#include <string_view>

#include "base/result.hpp"
#include "overlay/trust/secret.hpp"

namespace echoline::store {

struct S3Credentials {
  std::string access_key;
  overlay::trust::Secret secret_key, session_token;  // the token is empty for keys that do not expire
  friend bool operator==(const S3Credentials& a, const S3Credentials& b) {
    return a.access_key == b.access_key && a.secret_key == b.secret_key && a.session_token == b.session_token;
  }
};

// An environment variable; null if it is not set.
using Environment = std::function<const char*(const char*)>;
const char* process_environment(const char* name);

// AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN. Without the first, the profile (`profile`, else
// AWS_PROFILE, else "default") in the file AWS_SHARED_CREDENTIALS_FILE, else ~/.aws/credentials. A named `profile` is
// read even if the environment has keys. kInvalid says which of these was looked for; no message has a secret.
Result<S3Credentials> find_s3_credentials(const std::string& profile,
                                          const Environment& environment = process_environment);

// AWS_REGION, AWS_DEFAULT_REGION, or the region of the profile in AWS_CONFIG_FILE, else ~/.aws/config, else us-east-1.
Result<std::string> find_s3_region(const std::string& profile, const Environment& environment = process_environment);

// The keys of one section of a profile file: lines "[NAME]" or "[profile NAME]", then lines "key = value". Empty if it
// has no such section. kInvalid names the first line of another form. Pure.
Result<std::map<std::string, std::string>> parse_profile(std::string_view file, std::string_view section,
                                                         std::string_view file_name);

}  // namespace echoline::store
