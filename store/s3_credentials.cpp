// Finds access keys, for s3_store.cpp. Nothing here writes a secret to a message.
#include "store/s3_credentials.hpp"

#include <cstdlib>
#include <filesystem>
#include <optional>

#include "base/files.hpp"

namespace echoline::store {
namespace {

constexpr std::size_t kProfileFileBytesMax = 1u << 20;
constexpr std::string_view kOperation = "credentials of the store";

std::string_view trimmed(std::string_view text) {
  constexpr std::string_view kBlanks = " \t\r";
  const auto first = text.find_first_not_of(kBlanks);
  if (first == text.npos) return {};
  return text.substr(first, text.find_last_not_of(kBlanks) - first + 1);
}

std::string variable(const Environment& environment, const char* name) {
  const char* const value = environment(name);
  return value ? value : "";
}

std::filesystem::path profile_file(const Environment& environment, const char* name, const char* in_home) {
  if (const std::string file = variable(environment, name); !file.empty()) return file;
  return std::filesystem::path(variable(environment, "HOME")) / ".aws" / in_home;
}

std::string profile_name(const std::string& profile, const Environment& environment) {
  if (!profile.empty()) return profile;
  const std::string from_environment = variable(environment, "AWS_PROFILE");
  return from_environment.empty() ? "default" : from_environment;
}

}  // namespace

const char* process_environment(const char* name) { return std::getenv(name); }

Result<std::map<std::string, std::string>> parse_profile(std::string_view file, std::string_view section,
                                                         std::string_view file_name) {
  std::map<std::string, std::string> keys;
  bool is_inside = false, has_nested_values = false;
  std::size_t number = 0;
  for (std::size_t begin = 0; begin < file.size();) {
    const std::size_t end = std::min(file.find('\n', begin), file.size());
    const std::string_view whole = file.substr(begin, end - begin), line = trimmed(whole);
    begin = end + 1;
    ++number;
    if (line.empty() || line.front() == '#' || line.front() == ';') continue;
    const auto refuse = [&](std::string_view expected) {
      return fail(Code::kInvalid, kOperation, "{}:{}: expected {}", file_name, number, expected);
    };
    if (line.front() == '[') {
      const auto close = line.find(']');
      if (close == line.npos) return refuse("']' after '['");
      std::string_view name = trimmed(line.substr(1, close - 1));
      constexpr std::string_view kProfile = "profile ";
      if (name.starts_with(kProfile)) name = trimmed(name.substr(kProfile.size()));
      is_inside = name == section;
      has_nested_values = false;
      continue;
    }
    const bool is_indented = whole.front() == ' ' || whole.front() == '\t';
    if (is_indented && has_nested_values) continue;  // as below "s3 =" in AWS's file
    const auto equals = line.find('=');
    if (equals == line.npos) return refuse("KEY = VALUE or [SECTION]");
    const std::string_view value = trimmed(line.substr(equals + 1));
    has_nested_values = value.empty();
    if (is_inside) keys[std::string(trimmed(line.substr(0, equals)))] = value;
  }
  return keys;
}

Result<S3Credentials> find_s3_credentials(const std::string& profile, const Environment& environment) {
  if (profile.empty()) {
    std::string access_key = variable(environment, "AWS_ACCESS_KEY_ID");
    if (!access_key.empty()) {
      S3Credentials found{.access_key = std::move(access_key),
                          .secret_key = overlay::trust::Secret(variable(environment, "AWS_SECRET_ACCESS_KEY")),
                          .session_token = overlay::trust::Secret(variable(environment, "AWS_SESSION_TOKEN"))};
      if (found.secret_key.empty())
        return fail(Code::kInvalid, kOperation, "AWS_ACCESS_KEY_ID is set, but AWS_SECRET_ACCESS_KEY is not: set both");
      return found;
    }
  }
  const std::string name = profile_name(profile, environment);
  const std::filesystem::path path = profile_file(environment, "AWS_SHARED_CREDENTIALS_FILE", "credentials");
  auto file = read_file(path, kProfileFileBytesMax);
  if (!file)
    return fail(Code::kInvalid, kOperation,
                "expected AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment, or a profile file; found "
                "neither ({})",
                file.error().detail);
  auto keys = parse_profile(*file, name, path.string());
  overlay::trust::wipe(*file);
  if (!keys) return keys.error();
  S3Credentials found{.access_key = (*keys)["aws_access_key_id"],
                      .secret_key = overlay::trust::Secret(std::move((*keys)["aws_secret_access_key"])),
                      .session_token = overlay::trust::Secret(std::move((*keys)["aws_session_token"]))};
  if (found.access_key.empty() || found.secret_key.empty())
    return fail(Code::kInvalid, kOperation,
                "{}: expected aws_access_key_id and aws_secret_access_key in section [{}], found {}", path.string(),
                name, found.access_key.empty() ? "no access key" : "no secret key");
  return found;
}

Result<std::string> find_s3_region(const std::string& profile, const Environment& environment) {
  for (const char* const name : {"AWS_REGION", "AWS_DEFAULT_REGION"})
    if (const std::string region = variable(environment, name); !region.empty()) return region;
  const std::filesystem::path path = profile_file(environment, "AWS_CONFIG_FILE", "config");
  if (const auto file = read_file(path, kProfileFileBytesMax)) {
    ECHO_ASSIGN(auto keys, parse_profile(*file, profile_name(profile, environment), path.string()));
    if (!keys["region"].empty()) return keys["region"];
  }
  return std::string("us-east-1");
}

}  // namespace echoline::store
