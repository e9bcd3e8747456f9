// Thread scheduling, for machines with more busy threads than processors.
#pragma once

namespace echoline {

// For a thread that does little work at a time while others wait for it, such as a forwarding loop or a disk writer.
// The calling thread requests time slices of 0.1 ms; Linux schedules threads with shorter slices sooner, without
// changing their share of the processors. Needs no privilege. Effective since Linux 6.12; older versions prefer threads
// that have slept anyway. Inherited by threads that it starts.
void take_short_turns();

}  // namespace echoline
