// Output of the program. Data goes to stdout, and a failed write there is an error of the program. Everything else goes
// to stderr, where failed writes are ignored.
#pragma once
#include <fmt/format.h>

#include <string>
#include <string_view>
#include <vector>

namespace echoline::cli {

// Writes to stderr; errors are ignored.
void write_stderr(std::string_view text);
template <class... Args>
void print_stderr(fmt::format_string<Args...> format, Args&&... args) {
  write_stderr(fmt::format(format, std::forward<Args>(args)...));
}

// Opens /dev/null in place of each closed descriptor of 0 to 2. Otherwise a file that is opened later takes the number
// and receives the program's output.
void open_standard_files();
// Flushes stdout. Returns `exit_code` if everything was written. Otherwise it returns 1 and prints the reason to
// stderr, unless the reader of a pipe has closed it.
int flush_stdout(int exit_code);

// Wraps text to lines of at most `columns` characters, unless a word is longer. The first line is indented by
// `first_indent`, the others by `next_indent`. The result ends with a newline.
std::string wrap_text(std::string_view text, std::size_t first_indent, std::size_t next_indent, std::size_t columns);

// Quotes a word for a shell if it needs quotes.
std::string shell_word(std::string_view word);
// The command that resumes a run: "echoline up CONFIG --set a=b --resume".
std::string resume_command(std::string_view config, const std::vector<std::string>& overrides);

}  // namespace echoline::cli
