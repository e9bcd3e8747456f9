// The memory of a GPU by its name, for catalogues that state it for all GPUs together, in another unit, or not at all.
// Private to provisioner/.
#pragma once
#include <optional>
#include <string_view>

namespace echoline::provisioner {

// Memory of one GPU in GB of 10^9 bytes. `stated_mib`: what a catalogue states for a machine with `count` of these
// GPUs; it may mean one GPU or all of them, and a number below 1024 is taken as GiB. The name decides between the
// meanings. If two sizes are possible, the result is the smaller one. Absent if the name is unknown, and the statement
// is missing or has two meanings.
std::optional<double> gpu_memory_gb(std::string_view gpu, int count, std::optional<double> stated_mib);

}  // namespace echoline::provisioner
