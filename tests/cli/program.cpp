// Starts and ends the program that a test runs.
#include "tests/cli/program.hpp"

#include <arpa/inet.h>
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <thread>

namespace echoline::testing {
namespace {

std::string read_all(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  std::stringstream text;
  text << in.rdbuf();
  return text.str();
}

std::filesystem::path temporary_file() {
  std::string name = (std::filesystem::temp_directory_path() / "echoline-test-XXXXXX").string();
  ::close(::mkstemp(name.data()));
  return name;
}

}  // namespace

Program::Program(const std::vector<std::string>& arguments, bool own_input)
    : out_(temporary_file()), err_(temporary_file()) {
  std::vector<std::string> words{ECHOLINE_PROGRAM};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  pid_ = ::fork();
  if (pid_ == 0) {
    if (!own_input) ::dup2(::open("/dev/null", O_RDONLY), STDIN_FILENO);
    ::dup2(::open(out_.c_str(), O_WRONLY), STDOUT_FILENO);
    ::dup2(::open(err_.c_str(), O_WRONLY), STDERR_FILENO);
    ::execv(argv[0], argv.data());
    ::_exit(127);
  }
}

Program::~Program() {
  if (running()) wait(std::chrono::seconds(0));
  std::filesystem::remove(out_);
  std::filesystem::remove(err_);
}

void Program::signal(int number) const {
  if (pid_ > 0) ::kill(pid_, number);
}

bool Program::running() {
  if (pid_ <= 0) return false;
  if (::waitpid(pid_, &raw_status_, WNOHANG) != pid_) return true;
  pid_ = -1;
  return false;
}

Outcome Program::wait(std::chrono::seconds limit) {
  if (!eventually(limit, [this] { return !running(); })) {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, &raw_status_, 0);
    pid_ = -1;
  }
  const int status = WIFSIGNALED(raw_status_) ? 128 + WTERMSIG(raw_status_) : WEXITSTATUS(raw_status_);
  return {status, read_all(out_), read_all(err_)};
}

Outcome run_program(const std::vector<std::string>& arguments, std::chrono::seconds limit, bool own_input) {
  Program program(arguments, own_input);
  return program.wait(limit);
}

bool eventually(std::chrono::seconds limit, const std::function<bool()>& condition) {
  const auto deadline = std::chrono::steady_clock::now() + limit;
  while (!condition()) {
    if (std::chrono::steady_clock::now() >= deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return true;
}

TemporaryFolder::TemporaryFolder() {
  std::string name = (std::filesystem::temp_directory_path() / "echoline-test-XXXXXX").string();
  path_ = ::mkdtemp(name.data());
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code ec;
  std::filesystem::remove_all(path_, ec);
}

nlohmann::json json_file(const std::filesystem::path& path) {
  const nlohmann::json value = nlohmann::json::parse(read_all(path), nullptr, false);
  return value.is_discarded() ? nlohmann::json() : value;
}

std::vector<nlohmann::json> json_lines(const std::filesystem::path& path) {
  std::vector<nlohmann::json> rows;
  std::istringstream in(read_all(path));
  for (std::string line; std::getline(in, line);) {
    nlohmann::json row = nlohmann::json::parse(line, nullptr, false);
    if (row.is_object()) rows.push_back(std::move(row));
  }
  return rows;
}

std::vector<std::pair<std::string, pid_t>> rented_processes(const std::filesystem::path& run_folder) {
  std::vector<std::pair<std::string, pid_t>> processes;
  for (const nlohmann::json& row : json_lines(run_folder / "events.jsonl")) {
    if (row.value("event", "") != "rented") continue;
    const std::string instance = row.at("detail");  // "local:<pid>:<start time>"
    const std::size_t colon = instance.find(':');
    processes.emplace_back(row.at("offer").get<std::string>(), std::stoi(instance.substr(colon + 1)));
  }
  return processes;
}

std::uint16_t free_port() {
  const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  if (::bind(fd, reinterpret_cast<const sockaddr*>(&address), size) != 0) return 0;
  ::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size);
  ::close(fd);
  return ntohs(address.sin_port);
}

bool alive(pid_t pid) {
  // A zombie no longer runs; its parent has not waited for it yet.
  std::ifstream stat("/proc/" + std::to_string(pid) + "/stat");
  std::string text;
  if (!std::getline(stat, text)) return false;
  const std::size_t paren = text.rfind(") ");
  return paren != std::string::npos && text[paren + 2] != 'Z' && text[paren + 2] != 'X';
}

}  // namespace echoline::testing
