// The unix socket of a trainer API. Its folder admits only its owner, so no other user can connect. Private to
// learner/.
#pragma once
#include <filesystem>

#include "base/result.hpp"
#include "learner/external/http_server.hpp"

namespace echoline::learner {

// Listens on `folder`/trainer/api.sock, and returns that path. kInvalid: the path is too long; the message ends with
// `remedy`.
Result<std::filesystem::path> listen_on_socket(HttpServer& server, const std::filesystem::path& folder,
                                               std::string_view remedy);

}  // namespace echoline::learner
