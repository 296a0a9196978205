#include "semitone/core/detail/parameter_places.h"

namespace semitone::detail {

ParameterPlaces places_of(const std::vector<torch::optim::OptimizerParamGroup>& groups) {
  ParameterPlaces places;
  for (const auto& group : groups) {
    for (const at::Tensor& parameter : group.params()) {
      places.try_emplace(parameter.unsafeGetTensorImpl(),
                         static_cast<std::uint32_t>(places.size()));
    }
  }
  return places;
}

}  // namespace semitone::detail
