#include "src/comm/backends.h"

#include <algorithm>

namespace semitone::comm {

const Backend* find_backend(std::string_view name) {
  const auto found = std::find_if(backends().begin(), backends().end(),
                                  [name](const Backend& backend) { return backend.name == name; });
  return found == backends().end() ? nullptr : &*found;
}

const Backend& backend_for_other_device(c10::DeviceType device) {
  const auto found =
      std::find_if(backends().begin(), backends().end(),
                   [device](const Backend& backend) { return backend.device != device; });
  return found == backends().end() ? backends().front() : *found;
}

std::string backend_names() {
  std::string names;
  for (const Backend& backend : backends()) {
    if (!names.empty()) names += ", ";
    names += backend.name;
  }
  return names;
}

}  // namespace semitone::comm
