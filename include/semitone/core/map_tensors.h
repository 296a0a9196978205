#pragma once

#include "semitone/core/detail/fields.h"

#include <ATen/core/Generator.h>
#include <ATen/core/List.h>
#include <ATen/core/Scalar.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/FunctionRef.h>

#include <array>
#include <concepts>
#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

namespace torch::nn::utils::rnn {
class PackedSequence;
}  // namespace torch::nn::utils::rnn

/// Finds the tensors in a model's arguments and results: in any nesting of structs, standard
/// containers and IValues.
namespace semitone {

/// Whether a class of yours holds no tensors that map_tensors would have to find. Specialise it for
/// a class that map_tensors cannot look into:
///
///     template <>
///     inline constexpr bool semitone::holds_no_tensors<MyConfig> = true;
template <typename T>
inline constexpr bool holds_no_tensors = false;

namespace detail {

using TensorTransform = c10::function_ref<at::Tensor(const at::Tensor&)>;

/// map_tensors of an IValue. A part in which no tensor changes stays the same object.
c10::IValue map_ivalue(const c10::IValue& value, TensorTransform transform);

template <typename T>
concept MapsItsTensors =
    requires(const T& value, TensorTransform transform) { value.map_tensors(transform); };

template <typename T, template <typename...> typename Template>
inline constexpr bool is_a = false;
template <template <typename...> typename Template, typename... Arguments>
inline constexpr bool is_a<Template<Arguments...>, Template> = true;

template <typename T>
inline constexpr bool is_std_array = false;
template <typename Element, std::size_t size>
inline constexpr bool is_std_array<std::array<Element, size>> = true;

/// Tuples, pairs and arrays.
template <typename T>
concept TupleLike = is_a<T, std::tuple> || is_a<T, std::pair> || is_std_array<T>;
template <typename T>
concept MapLike = is_a<T, std::map> || is_a<T, std::unordered_map>;
/// vector, deque, list, c10::SmallVector.
template <typename T>
concept Sequence = !is_a<T, std::basic_string> && requires(T value, const T& other) {
  typename T::value_type;
  value.push_back(*other.begin());
  other.end();
};
/// The smart pointers, callables and values of the standard library and LibTorch that have
/// destructors but hold no tensors of their own.
template <typename T>
concept KnownOpaque =
    is_a<T, std::basic_string> || is_a<T, std::function> || is_a<T, std::shared_ptr> ||
    is_a<T, std::unique_ptr> || is_a<T, std::weak_ptr> || is_a<T, c10::intrusive_ptr> ||
    std::same_as<T, at::Scalar> || std::same_as<T, c10::SymInt> || std::same_as<T, at::Generator> ||
    requires { typename T::ContainedType; };  // torch::nn::ModuleHolder

enum class Holding {
  none,
  tensors,
  unknown,  // a class that map_tensors cannot look into
};

constexpr Holding operator|(Holding a, Holding b) {
  if (a == Holding::tensors || b == Holding::tensors) return Holding::tensors;
  return a == Holding::unknown ? a : b;
}

template <typename T, typename... Outer>
consteval Holding holding();

template <typename... Outer, typename... Elements>
consteval Holding holding_of_any(TypeList<Elements...>) {
  return (Holding::none | ... | holding<std::remove_cvref_t<Elements>, Outer...>());
}

template <typename T>
struct ElementTypes;
template <template <typename...> typename Template, typename... Elements>
struct ElementTypes<Template<Elements...>> {
  using Types = TypeList<Elements...>;
};
template <typename Element, std::size_t size>
struct ElementTypes<std::array<Element, size>> {
  using Types = TypeList<Element>;
};

struct CollectTypes {
  template <typename Types, typename... Fields>
  constexpr Types operator()(Types types, Fields&...) const {
    return types;
  }
};
template <typename T>
using FieldTypes = decltype(with_fields(std::declval<T&>(), CollectTypes()));

/// What map_tensors finds in values of a type. Outer lists the enclosing types, since a struct may
/// hold a list of its own type.
template <typename T, typename... Outer>
consteval Holding holding() {
  if constexpr (std::is_array_v<T>) {
    return holding<std::remove_cv_t<std::remove_all_extents_t<T>>, Outer...>();
  } else if constexpr (!std::is_class_v<T> || (std::is_same_v<T, Outer> || ...) ||
                       holds_no_tensors<T>) {
    return Holding::none;
  } else if constexpr (std::is_same_v<T, at::Tensor> || std::is_same_v<T, c10::IValue> ||
                       std::is_same_v<T, torch::nn::utils::rnn::PackedSequence> ||
                       std::is_same_v<T, at::TensorList> || MapsItsTensors<T>) {
    return Holding::tensors;
  } else if constexpr (TupleLike<T> || is_a<T, std::variant>) {
    return holding_of_any<T, Outer...>(typename ElementTypes<T>::Types());
  } else if constexpr (MapLike<T>) {
    return holding<typename T::mapped_type, T, Outer...>();
  } else if constexpr (is_a<T, c10::List>) {
    return holding<std::remove_cvref_t<typename T::value_type>, T, Outer...>();
  } else if constexpr (is_a<T, std::optional> || Sequence<T>) {
    return holding<std::remove_cvref_t<typename T::value_type>, T, Outer...>();
  } else if constexpr (KnownOpaque<T>) {
    return Holding::none;
  } else if constexpr (field_count<T>() > 0) {
    return holding_of_any<T, Outer...>(FieldTypes<T>());
  } else {
    // A tensor has a destructor, and so has every class that holds one.
    return std::is_trivially_destructible_v<T> ? Holding::none : Holding::unknown;
  }
}

/// Whether map_tensors finds tensors in values of this type.
template <typename T>
struct HoldsTensors : std::bool_constant<holding<T>() == Holding::tensors> {};

/// The type that map_tensors returns: the type itself, or a vector for an at::TensorList.
template <typename T>
using Mapped = std::conditional_t<std::is_same_v<std::remove_cvref_t<T>, at::TensorList>,
                                  std::vector<at::Tensor>, std::decay_t<T>>;

}  // namespace detail

/// Calls transform, a function from tensor to tensor, on every tensor in a value, and returns the
/// value with the results in place of the tensors. It finds tensors in
/// - IValues, std::vector, deque, list, array, pair, tuple, optional, variant, map and
///   unordered_map, c10::List, c10::SmallVector and torch's PackedSequence (its data and indices;
///   LibTorch requires its batch sizes on the CPU, so they are not passed to transform); an
///   at::TensorList becomes a vector;
/// - aggregates (structs without base classes, private fields or constructors) with at most 16
///   fields, such as a model's results;
/// - classes of your own with a method `T map_tensors(transform) const`;
/// nested in any way. A value without tensors is returned unchanged. Tensors behind pointers and
/// references are not touched.
///
/// A class that map_tensors cannot look into is a compile-time error. Give it a method map_tensors,
/// or specialise holds_no_tensors for it. Classes with a trivial destructor hold no tensor and are
/// allowed. So are std::string, std::function, smart pointers, at::Scalar, c10::SymInt,
/// at::Generator and module holders.
template <typename T, typename Transform>
detail::Mapped<T> map_tensors(T&& value, const Transform& transform);

namespace detail {

/// Returns what map_tensors puts in place of one field of a struct.
template <typename Field, bool movable, typename Value, typename Transform>
decltype(auto) map_field(Value& field, const Transform& transform) {
  if constexpr (holding<std::remove_cvref_t<Field>>() != Holding::none) {
    static_assert(
        !std::is_reference_v<Field>,
        "map_tensors cannot replace a tensor that a struct holds by reference: hold it by "
        "value, which copies no data");
    return map_tensors(field, transform);
  } else if constexpr (std::is_reference_v<Field>) {
    return static_cast<Field>(field);
  } else if constexpr (movable && !std::is_const_v<Value>) {
    return std::move(field);
  } else {
    return static_cast<const Value&>(field);
  }
}

template <typename Field, typename Transform>
void assign_field(Field& field, const Transform& transform) {
  if constexpr (holding<std::remove_cv_t<Field>>() == Holding::none) {
    return;
  } else if constexpr (std::is_array_v<Field>) {
    for (auto& element : field) assign_field(element, transform);
  } else {
    field = map_tensors(field, transform);
  }
}

template <typename T, typename Transform>
std::remove_cvref_t<T> map_struct(T&& value, const Transform& transform) {
  using Value = std::remove_cvref_t<T>;
  constexpr bool movable = !std::is_lvalue_reference_v<T>;
  constexpr bool has_arrays = []<typename... Fields>(TypeList<Fields...>) {
    return (std::is_array_v<Fields> || ...);
  }(FieldTypes<Value>());
  if constexpr (has_arrays) {
    Value result(std::forward<T>(value));
    with_fields(result, [&](auto, auto&... fields) { (assign_field(fields, transform), ...); });
    return result;
  } else {
    return with_fields(value, [&]<typename... Fields>(TypeList<Fields...>, auto&... fields) {
      return Value{map_field<Fields, movable>(fields, transform)...};
    });
  }
}

}  // namespace detail

template <typename T, typename Transform>
detail::Mapped<T> map_tensors(T&& value, const Transform& transform) {
  using Value = std::remove_cvref_t<T>;
  constexpr auto found = detail::holding<Value>();
  static_assert(
      found != detail::Holding::unknown,
      "semitone cannot look into this class for tensors (a model's arguments and results "
      "are cast, split or gathered). Give it a method `T map_tensors(const auto& f) const` "
      "that calls f on each of its tensors, or, if it has none, write `template <> inline "
      "constexpr bool semitone::holds_no_tensors<T> = true;`");
  if constexpr (found != detail::Holding::tensors) {
    return std::decay_t<T>(std::forward<T>(value));
  } else if constexpr (std::is_same_v<Value, at::Tensor>) {
    return at::Tensor(transform(value));
  } else if constexpr (std::is_same_v<Value, c10::IValue>) {
    return detail::map_ivalue(value, transform);
  } else if constexpr (detail::MapsItsTensors<Value>) {
    return value.map_tensors(transform);
  } else if constexpr (std::is_same_v<Value, torch::nn::utils::rnn::PackedSequence>) {
    // LibTorch requires the batch sizes on the CPU, so they stay there.
    const auto map = [&](const at::Tensor& tensor) {
      return tensor.defined() ? at::Tensor(transform(tensor)) : tensor;
    };
    // Braces: in this order.
    return Value{map(value.data()), value.batch_sizes(), map(value.sorted_indices()),
                 map(value.unsorted_indices())};
  } else if constexpr (detail::is_a<Value, std::optional>) {
    return value.has_value() ? Value(map_tensors(*value, transform)) : Value();
  } else if constexpr (detail::is_a<Value, std::variant>) {
    return std::visit([&](const auto& held) { return Value(map_tensors(held, transform)); }, value);
  } else if constexpr (detail::TupleLike<Value>) {
    return std::apply(
        [&](const auto&... elements) { return Value{map_tensors(elements, transform)...}; }, value);
  } else if constexpr (detail::MapLike<Value>) {
    // A copy has the order of the map that it is made from, which matters for an unordered_map:
    // callers count on the same order in each pass over it.
    Value result(value);
    for (auto& [key, element] : result) element = map_tensors(element, transform);
    return result;
  } else if constexpr (detail::is_a<Value, c10::List>) {
    return detail::map_ivalue(c10::IValue(value), transform).template to<Value>();
  } else if constexpr (detail::Sequence<Value> || std::is_same_v<Value, at::TensorList>) {
    detail::Mapped<Value> result;
    for (const auto& element : value) result.push_back(map_tensors(element, transform));
    return result;
  } else {
    return detail::map_struct(std::forward<T>(value), transform);
  }
}

}  // namespace semitone
