// Finds the program in a response. Private to data_plane/.
#pragma once
#include <string>
#include <string_view>

namespace echoline::data_plane {

struct ExtractedProgram {
  std::string code;       // the program; empty if there is none
  bool fenced = false;    // the program was in a closed block
  bool thinking = false;  // <think>, some text and </think> come before the program
};

// The program is searched after the last "</think>". A block opens with a line of at least three backticks, alone or
// followed by "python", "py" or "python3". A line of at least as many backticks closes it. Blocks of other languages
// are skipped. The program is the last block that defines something (a line that begins with "def ", "class " or "async
// def "), otherwise the last block. A block that is not closed extends to the end of the response. Without any block,
// the whole text is the program. Linear time.
ExtractedProgram extract_code(std::string_view response);

// Whether an unindented line defines this function or class, or assigns to this name.
bool defines(std::string_view code, std::string_view name);

}  // namespace echoline::data_plane
