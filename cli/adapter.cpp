// echoline adapter: looks at tasks and tries them without a run.
#include "cli/adapter_verbs.hpp"
#include "cli/verbs.hpp"

namespace echoline::cli {

void add_adapter(Verb& app, int& exit) {
  auto* adapter = app.add_verb("adapter", "Try tasks without a run");
  adapter->needs_verb();
  add_adapter_list(*adapter, exit);
  add_adapter_check(*adapter, exit);
  add_adapter_play(*adapter, exit);
  add_adapter_bench(*adapter, exit);
  add_adapter_new(*adapter, exit);
  add_adapter_poker(*adapter, exit);
}

}  // namespace echoline::cli
