// The signal handlers of long subcommands.
#include "cli/signals.hpp"

#include <unistd.h>

#include <csignal>

namespace echoline::cli {
namespace {

std::atomic<bool> stop_requested = false;

void on_signal(int signal) {
  constexpr int kExitCodeOfSigint = 130;  // as shells report it
  // A second Ctrl-C ends the process at once. _exit() is allowed in a signal handler, unlike exit().
  if (stop_requested.exchange(true) && signal == SIGINT) ::_exit(kExitCodeOfSigint);
}

}  // namespace

const std::atomic<bool>& stop_on_signals() {
  struct sigaction action {};
  action.sa_handler = on_signal;
  sigemptyset(&action.sa_mask);
  ::sigaction(SIGINT, &action, nullptr);
  ::sigaction(SIGTERM, &action, nullptr);
  std::signal(SIGPIPE, SIG_IGN);
  return stop_requested;
}

}  // namespace echoline::cli
