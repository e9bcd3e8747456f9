// How soon a thread runs when it has something to do, on a machine with more busy threads than processors.
#pragma once

namespace echoline {

// For a thread that does little at a time while others wait for it: a loop that forwards, a writer to disk. The calling
// thread asks for turns of 0.1 ms; Linux runs a thread with shorter turns sooner and leaves its share of the processors
// as it is. Needs no privilege. Linux 6.12 and newer heed it; older ones prefer a thread that has slept anyway. Threads
// that it starts do the same.
void take_short_turns();

}  // namespace echoline
