// The subcommands of `echoline adapter`. Private to cli/.
#pragma once
#include "cli/verb.hpp"

namespace echoline::cli {

void add_adapter_check(Verb& adapter, int& exit_code);
void add_adapter_list(Verb& adapter, int& exit_code);
void add_adapter_play(Verb& adapter, int& exit_code);
void add_adapter_bench(Verb& adapter, int& exit_code);
void add_adapter_new(Verb& adapter, int& exit_code);
void add_adapter_poker(Verb& adapter, int& exit_code);

}  // namespace echoline::cli
