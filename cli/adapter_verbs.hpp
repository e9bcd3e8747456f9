// The verbs below `echoline adapter`. Private to cli/.
#pragma once
#include "cli/verb.hpp"

namespace echoline::cli {

void add_adapter_poker(Verb& adapter, int& exit);

}  // namespace echoline::cli
