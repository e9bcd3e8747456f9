// The Python programs that grade Python programs, as text. Private to data_plane/.
#pragma once

namespace echoline::data_plane {

extern const char *const kValuesScript, *const kCandidateScript, *const kExaminerScript;

}  // namespace echoline::data_plane
