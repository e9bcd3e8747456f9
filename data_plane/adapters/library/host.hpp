// The program that loads a task's shared library inside the sandbox (host.cpp), as bytes. Private to data_plane/.
#pragma once
#include <string_view>

namespace echoline::data_plane::library {

std::string_view host_program();

}  // namespace echoline::data_plane::library
