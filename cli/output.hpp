// Output of the program. Data goes to stdout, and a failed write there is an error of the program. Everything else goes
// to stderr, where failed writes are ignored.
#pragma once
#include <fmt/format.h>

#include <string>
#include <string_view>
#include <vector>

namespace echoline::cli {

// Writes to stderr; errors are ignored.
void say_text(std::string_view text);
template <class... Args>
void say(fmt::format_string<Args...> format, Args&&... args) {
  say_text(fmt::format(format, std::forward<Args>(args)...));
}

// Opens /dev/null for each of the descriptors 0 to 2 that is closed, so that no other file gets its number.
void open_standard_files();
// Flushes stdout. Returns `exit` when everything was written, otherwise 1, with the reason on stderr. A reader that has
// closed the pipe is no error and no reason is printed.
int flush_output(int exit);

// Wraps text to lines of at most `columns` characters, unless a word is longer. The first is indented by `first`, the
// others by `rest`; ends with a newline.
std::string wrapped(std::string_view text, std::size_t first, std::size_t rest, std::size_t columns);

// Quotes a word for a shell if it needs quotes.
std::string shell_word(std::string_view word);
// The command that resumes a run: "echoline VERB CONFIG --set a=b --resume".
std::string resume_command(std::string_view config, const std::vector<std::string>& overrides);

}  // namespace echoline::cli
