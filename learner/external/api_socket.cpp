// Makes the socket's private folder. Called by TrainerServer and by a trainer's node.
#include "learner/external/api_socket.hpp"

#include <sys/socket.h>
#include <sys/un.h>

#include "base/files.hpp"

namespace echoline::learner {

Result<std::filesystem::path> listen_on_socket(HttpServer& server, const std::filesystem::path& folder,
                                               std::string_view remedy) {
  const std::filesystem::path private_folder = std::filesystem::absolute(folder) / "trainer",
                              path = private_folder / "api.sock";
  if (path.string().size() >= sizeof(sockaddr_un::sun_path))
    return fail(Code::kInvalid, "trainer api", "{}: the path of a socket has at most {} bytes; {}", path.string(),
                sizeof(sockaddr_un::sun_path) - 1, remedy);
  ECHO_TRY(make_folders(private_folder));
  std::error_code error;
  std::filesystem::permissions(private_folder, std::filesystem::perms::owner_all, error);
  if (error) return fail(Code::kIo, "trainer api", "{}: {}", private_folder.string(), error.message());
  std::filesystem::remove(path, error);  // left by an earlier process
  server.set_address_family(AF_UNIX);
  // httplib ignores the port of a socket's path, but 0 would mean "any port" and fail.
  if (!server.bind_to_port(path.string().c_str(), 1))
    return fail(Code::kIo, "trainer api", "cannot listen on {}", path.string());
  return path;
}

}  // namespace echoline::learner
