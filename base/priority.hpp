// Thread scheduling, for machines with more busy threads than processors.
#pragma once

namespace echoline {

// Requests time slices of 0.1 ms for the calling thread and the threads that it starts. It is for a thread that does
// little work at a time while others wait for it, such as a forwarding loop or a disk writer. Linux schedules threads
// with shorter slices sooner, without changing their share of the processors. The call needs no privilege. It has an
// effect since Linux 6.12; older versions prefer threads that have slept anyway.
void request_short_time_slices();

}  // namespace echoline
