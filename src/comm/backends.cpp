#include "src/comm/backends.h"

#include "src/core/named_rows.h"

#include <algorithm>

namespace semitone::comm {

const Backend* find_backend(std::string_view name) {
  return find_row(backends(), name);
}

const Backend& backend_for_other_device(c10::DeviceType device) {
  const auto found =
      std::find_if(backends().begin(), backends().end(),
                   [device](const Backend& backend) { return backend.device != device; });
  return found == backends().end() ? backends().front() : *found;
}

std::string backend_names() {
  return join_names(backends());
}

}  // namespace semitone::comm
