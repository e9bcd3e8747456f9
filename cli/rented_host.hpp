// What a worker finds out about the rented host that it runs on, from the environment that the host's owner sets.
#pragma once
#include <string>

namespace echoline::cli {

class RentedHost {
 public:
  // Takes the instance's key out of the environment, which every process started from here would inherit.
  RentedHost();
  // Ends this instance, where it holds a key that can do that: nobody else may be there to stop paying for it.
  void end() const;

 private:
  std::string id_, key_;
};

}  // namespace echoline::cli
