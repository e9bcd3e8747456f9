// echoline adapter: lists tasks and tries them without a run. An adapter connects a task to the program.
#include "cli/adapter_verbs.hpp"
#include "cli/verbs.hpp"

namespace echoline::cli {

void add_adapter(Verb& program, int& exit_code) {
  auto* adapter = program.add_verb("adapter", "Try tasks without a run");
  adapter->require_verb();
  add_adapter_list(*adapter, exit_code);
  add_adapter_check(*adapter, exit_code);
  add_adapter_play(*adapter, exit_code);
  add_adapter_bench(*adapter, exit_code);
  add_adapter_new(*adapter, exit_code);
  add_adapter_poker(*adapter, exit_code);
}

}  // namespace echoline::cli
