// Output of all subcommands: stdout, stderr, line wrapping and words for a shell.
#include "cli/output.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdio>
#include <cstring>

namespace echoline::cli {

void write_stderr(std::string_view text) {
  std::fwrite(text.data(), 1, text.size(), stderr);
  std::fflush(stderr);
}

void open_standard_files() {
  for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (::fcntl(fd, F_GETFD) != -1 || errno != EBADF) continue;
    // open() returns the lowest free number, which is `fd`. Writes to it fail, because /dev/null is open only for
    // reading.
    if (::open("/dev/null", O_RDONLY) != fd) ::_exit(1);
  }
}

int flush_stdout(int exit_code) {
  const bool failed_before = std::ferror(stdout) != 0;
  if (std::fflush(stdout) == 0 && !failed_before) return exit_code;
  const int error = errno;  // of fflush(), or of the write that failed before: main() has stored it again
  // EPIPE: the reader of the pipe, such as `head`, wants no more.
  if (error != EPIPE) print_stderr("echoline: cannot write to standard output: {}\n", std::strerror(error));
  return 1;
}

std::string wrap_text(std::string_view text, std::size_t first_indent, std::size_t next_indent, std::size_t columns) {
  // Counts UTF-8 characters: every byte that does not continue one (10xxxxxx) begins one.
  const auto width = [](std::string_view word) {
    return static_cast<std::size_t>(
        std::count_if(word.begin(), word.end(), [](unsigned char c) { return (c & 0xc0) != 0x80; }));
  };
  std::string wrapped(first_indent, ' ');
  std::size_t line_columns = first_indent;
  bool has_words = false;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find(' '), text.size());
    const std::string_view word = text.substr(0, end);
    if (has_words && line_columns + 1 + width(word) > columns) {
      wrapped += "\n" + std::string(next_indent, ' ');
      line_columns = next_indent;
    } else if (has_words) {
      wrapped += ' ';
      ++line_columns;
    }
    wrapped += word;
    line_columns += width(word);
    has_words = true;
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return wrapped + "\n";
}

std::string shell_word(std::string_view word) {
  const bool needs_no_quotes = !word.empty() && std::all_of(word.begin(), word.end(), [](unsigned char c) {
    return std::isalnum(c) != 0 || std::string_view("-_./=:@%+,").find(static_cast<char>(c)) != std::string_view::npos;
  });
  if (needs_no_quotes) return std::string(word);
  std::string quoted = "'";  // a quote in the word becomes '\''
  for (const char c : word) quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return quoted + "'";
}

std::string resume_command(std::string_view config, const std::vector<std::string>& overrides) {
  std::string command = "echoline up " + shell_word(config);
  for (const std::string& text : overrides) command += " --set " + shell_word(text);
  return command + " --resume";
}

}  // namespace echoline::cli
