// What libtorch offers on this machine; torch-free for those who only want to know.
#pragma once
#include <string>

namespace echoline::model {

struct Runtime {
  std::string torch_version;
  int threads = 1;
  int cuda_devices = 0;
};

Runtime runtime();

}  // namespace echoline::model
