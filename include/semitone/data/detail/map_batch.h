#pragma once

#include "semitone/core/map_tensors.h"

#include <torch/data/example.h>

#include <type_traits>
#include <utility>
#include <vector>

/// map_tensors for the batches of torch::data.
namespace semitone::data::detail {

template <typename T>
inline constexpr bool is_example = false;
template <typename Data, typename Target>
inline constexpr bool is_example<torch::data::Example<Data, Target>> = true;

template <typename T>
inline constexpr bool is_vector = false;
template <typename Element>
inline constexpr bool is_vector<std::vector<Element>> = true;

/// map_tensors, which also looks into torch::data::Example and vectors of it. Example has
/// constructors, so that map_tensors alone cannot find its fields.
template <typename T, typename Transform>
auto map_batch(const T& value, const Transform& transform) {
  if constexpr (is_example<T>) {
    if constexpr (std::is_void_v<typename T::TargetType>) {
      return T(map_batch(value.data, transform));
    } else {
      return T(map_batch(value.data, transform), map_batch(value.target, transform));
    }
  } else if constexpr (is_vector<T>) {
    T result;
    result.reserve(value.size());
    for (const auto& element : value) result.push_back(map_batch(element, transform));
    return result;
  } else {
    return map_tensors(value, transform);
  }
}

}  // namespace semitone::data::detail
