// The memory of a GPU by its name, for catalogues that state it for all GPUs together, in another unit, or not at all.
// Private to provisioner/.
#pragma once
#include <optional>
#include <string_view>

namespace echoline::provisioner {

// Memory of one GPU in GB of 10^9 bytes. `stated_mib`: what a catalogue states for a machine with `count` of these
// GPUs. It may be the memory of one GPU or of all of them; the nominal sizes of the GPU's name decide which. A number
// below 1024 is taken as GiB. If a GPU is sold with two sizes and the statement decides for neither, the result is the
// smaller one. Absent if the name is unknown, and the statement is missing or ambiguous.
std::optional<double> gpu_memory_gb(std::string_view gpu, int count, std::optional<double> stated_mib);

}  // namespace echoline::provisioner
