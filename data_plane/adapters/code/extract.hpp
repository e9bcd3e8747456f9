// What of a response is its program, and how it was presented. Private to data_plane/.
#pragma once
#include <string>
#include <string_view>

namespace echoline::data_plane {

struct Extracted {
  std::string code;       // empty where there is none
  bool fenced = false;    // it stood in a block that was closed
  bool thinking = false;  // there is thinking before it: <think>, something, </think>
};

// The program is looked for after the last "</think>". A block begins with a line of three or more backticks at its
// beginning, after which "python", "py", "python3" or nothing stands, and ends with a line of as many or more
// backticks; blocks of other languages are passed over. The last block that defines something (a line that begins with
// "def ", "class " or "async def ") is the program, or else the last block; one that is not closed goes to the end of
// the response. Without any block, all is the program. Linear time.
Extracted extract_code(std::string_view response);

// Whether a line at the margin defines this function or class, or gives the name a value.
bool defines(std::string_view code, std::string_view name);

}  // namespace echoline::data_plane
