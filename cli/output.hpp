// What the program says: data on stdout, where a failure to write is an error of the whole program, and everything else
// on stderr, where it is not.
#pragma once
#include <fmt/format.h>

#include <string>
#include <string_view>
#include <vector>

namespace echoline::cli {

// To stderr. Nobody may be reading there any more; the work goes on.
void say_text(std::string_view text);
template <class... Args>
void say(fmt::format_string<Args...> format, Args&&... args) {
  say_text(fmt::format(format, std::forward<Args>(args)...));
}

// Makes sure that files 0 to 2 are there, so that no other file can take the place of a closed one.
void open_standard_files();
// Writes out what stdout still holds. `exit` when all of it has arrived, else 1, and the reason on stderr; a reader
// that has gone away is no news.
int flush_output(int exit);

// Lines of at most `columns` characters where the words allow it, the first indented by `first`, the others by `rest`;
// ends with a newline.
std::string wrapped(std::string_view text, std::size_t first, std::size_t rest, std::size_t columns);

// A word as a shell reads it back, in quotes where it needs them.
std::string shell_word(std::string_view word);
// "echoline VERB CONFIG --set a=b --resume": the command that goes on with a run.
std::string resume_command(std::string_view config, const std::vector<std::string>& overrides);

}  // namespace echoline::cli
