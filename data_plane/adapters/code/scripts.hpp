// The programs in Python that grade programs in Python, as text. Private to data_plane/.
#pragma once

namespace echoline::data_plane {

extern const char *const kValuesScript, *const kCandidateScript, *const kExaminerScript;

}  // namespace echoline::data_plane
