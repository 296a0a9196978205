#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/FunctionRef.h>

#include <array>
#include <cstddef>
#include <map>
#include <optional>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

/// Looking into whatever a model takes and returns: tensors in any nesting of standard containers and
/// IValues.
namespace semitone {

namespace detail {

template <typename T>
struct IsTuple : std::false_type {};
template <typename... Elements>
struct IsTuple<std::tuple<Elements...>> : std::true_type {};
template <typename First, typename Second>
struct IsTuple<std::pair<First, Second>> : std::true_type {};
template <typename Element, std::size_t size>
struct IsTuple<std::array<Element, size>> : std::true_type {};

template <typename T>
struct IsSequence : std::false_type {};
template <typename Element, typename Allocator>
struct IsSequence<std::vector<Element, Allocator>> : std::true_type {};

template <typename T>
struct IsMap : std::false_type {};
template <typename Key, typename Value, typename... Rest>
struct IsMap<std::map<Key, Value, Rest...>> : std::true_type {};
template <typename Key, typename Value, typename... Rest>
struct IsMap<std::unordered_map<Key, Value, Rest...>> : std::true_type {};

template <typename T>
struct IsOptional : std::false_type {};
template <typename Value>
struct IsOptional<std::optional<Value>> : std::true_type {};

using TensorTransform = c10::function_ref<at::Tensor(const at::Tensor&)>;

/// map_tensors of an IValue. What holds no tensor that changes stays the same object.
c10::IValue map_ivalue(const c10::IValue& value, TensorTransform transform);

template <typename T>
concept MapsItsTensors = requires(const T& value, TensorTransform transform) {
  value.map_tensors(transform);
};

/// Whether map_tensors looks into values of this type.
template <typename T>
struct HoldsTensors : std::bool_constant<std::is_same_v<T, at::Tensor> ||
                                         std::is_same_v<T, c10::IValue> || MapsItsTensors<T>> {};
template <typename... Elements>
struct HoldsTensors<std::tuple<Elements...>> : std::disjunction<HoldsTensors<Elements>...> {};
template <typename First, typename Second>
struct HoldsTensors<std::pair<First, Second>>
    : std::disjunction<HoldsTensors<First>, HoldsTensors<Second>> {};
template <typename Element, std::size_t size>
struct HoldsTensors<std::array<Element, size>> : HoldsTensors<Element> {};
template <typename Element, typename Allocator>
struct HoldsTensors<std::vector<Element, Allocator>> : HoldsTensors<Element> {};
template <typename Key, typename Value, typename... Rest>
struct HoldsTensors<std::map<Key, Value, Rest...>> : HoldsTensors<Value> {};
template <typename Key, typename Value, typename... Rest>
struct HoldsTensors<std::unordered_map<Key, Value, Rest...>> : HoldsTensors<Value> {};
template <typename Value>
struct HoldsTensors<std::optional<Value>> : HoldsTensors<Value> {};

}  // namespace detail

/// Calls transform, a function from tensor to tensor, on every tensor of a value and returns the
/// value with the results in their places: tensors, IValues, std::vector, array, pair, tuple,
/// optional, map and unordered_map, nested in any way. A type of your own takes part if it has a
/// method `T map_tensors(transform) const`. Everything else is returned as it is.
template <typename T, typename Transform>
auto map_tensors(T&& value, const Transform& transform) {
  using Value = std::remove_cvref_t<T>;
  if constexpr (!detail::HoldsTensors<Value>::value) {
    return std::decay_t<T>(std::forward<T>(value));
  } else if constexpr (std::is_same_v<Value, at::Tensor>) {
    return at::Tensor(transform(value));
  } else if constexpr (std::is_same_v<Value, c10::IValue>) {
    return detail::map_ivalue(value, transform);
  } else if constexpr (detail::MapsItsTensors<Value>) {
    return value.map_tensors(transform);
  } else if constexpr (detail::IsOptional<Value>::value) {
    return value.has_value() ? Value(map_tensors(*value, transform)) : Value();
  } else if constexpr (detail::IsTuple<Value>::value) {
    return std::apply(
        [&](const auto&... elements) { return Value{map_tensors(elements, transform)...}; }, value);
  } else if constexpr (detail::IsSequence<Value>::value) {
    Value result;
    result.reserve(value.size());
    for (const auto& element : value) result.push_back(map_tensors(element, transform));
    return result;
  } else {
    static_assert(detail::IsMap<Value>::value);
    Value result;
    for (const auto& [key, element] : value) result.emplace(key, map_tensors(element, transform));
    return result;
  }
}

}  // namespace semitone
