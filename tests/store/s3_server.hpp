// A small S3 server for tests: objects in memory, over HTTP on loopback. It checks the signature of each request, and
// behaves badly on demand.
#pragma once
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>

namespace echoline::store {

// Faults of a request.
enum class S3Fault {
  kNone,
  kInternalError,       // 500, before any effect
  kLostAnswer,          // the effect, then 500
  kSlowDown,            // 503 SlowDown
  kTruncatedBody,       // a GET sends half of its body and closes the connection
  kWrongEtag,           // a PUT answers with another entity tag than it keeps
  kExpiredCredentials,  // 400 ExpiredToken
  kWrongRegion,         // 301 with the bucket's region
  kIgnoredRange,        // a GET sends the whole object
};

class S3Server {
 public:
  struct Settings {
    std::string access_key = "AKIDEXAMPLE", secret_key = "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY", session_token = {};
    std::string region = "eu-central-1", bucket = "policies";
    std::size_t page_keys = 1000;    // of a list
    double mbit_per_s = 0;           // of all transfers together in each direction; 0: no limit
    bool keeps_conditions = true;    // false: ignores If-None-Match
    std::size_t part_bytes_min = 0;  // smaller parts but the last are refused, as AWS does below 5 MiB
  };
  S3Server();  // with the default settings
  explicit S3Server(Settings settings);
  ~S3Server();
  std::string endpoint() const;
  const Settings& settings() const;
  // Asked for each request, by "PUT key", "GET key", "LIST prefix", "DELETE key", "POST key".
  void set_fault(std::function<S3Fault(const std::string& request)> fault);
  void set_session_token(const std::string& token);
  // Lists show the objects of now until show_all().
  void freeze_lists();
  void show_all();

  std::map<std::string, std::string> objects() const;
  std::size_t uploads_in_parts() const;                   // that have neither ended nor been aborted
  std::map<std::string, std::uint64_t> requests() const;  // by method; "refused": with a wrong signature

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace echoline::store
