#pragma once

#include <cstddef>
#include <type_traits>
#include <utility>

/// Finds the fields of a plain struct at compile time, for map_tensors.
namespace semitone::detail {

template <typename... Types>
struct TypeList {};

/// The largest number of fields that a struct may have.
inline constexpr std::size_t kMostFields = 16;
/// The largest number of values that its braces may take; each element of an array counts as one.
inline constexpr std::size_t kMostInitializers = 64;

/// Converts to any field type. Never called.
struct AnyField {
  template <typename Field>
  operator Field() const noexcept;  // NOLINT(google-explicit-constructor)
};

/// Converts to a base of a class.
template <typename Class>
struct AnyBase {
  template <typename Base>
    requires(std::is_base_of_v<Base, Class> && !std::is_same_v<Base, Class>)
  operator Base() const noexcept;  // NOLINT(google-explicit-constructor)
};

template <std::size_t>
using AnyFieldAt = AnyField;

/// Whether T{before…, {array…}, after…} is possible.
template <typename T, std::size_t... before, std::size_t... array, std::size_t... after>
consteval bool takes_array(std::index_sequence<before...>, std::index_sequence<array...>,
                           std::index_sequence<after...>) {
  return requires { T{AnyFieldAt<before>{}..., {AnyFieldAt<array>{}...}, AnyFieldAt<after>{}...}; };
}
template <typename T, std::size_t... fields>
consteval bool takes(std::index_sequence<fields...>) {
  return requires { T{AnyFieldAt<fields>{}...}; };
}

/// The most values that T's braces take: one for each field, n for a field of type Element[n].
template <typename T, std::size_t count = kMostInitializers + 1>
consteval std::size_t initializer_count() {
  if constexpr (count == 0 || takes<T>(std::make_index_sequence<count>())) {
    return count;
  } else {
    return initializer_count<T, count - 1>();
  }
}

/// How many of these values belong to the field that begins at `at`: an array's length, or else 1.
template <typename T, std::size_t total, std::size_t at, std::size_t length = total - at>
consteval std::size_t initializers_of_field() {
  if constexpr (length < 2) {
    return 1;
  } else {
    using Before = std::make_index_sequence<at>;
    using Array = std::make_index_sequence<length>;
    constexpr bool fits =
        takes_array<T>(Before(), Array(), std::make_index_sequence<total - at - length>());
    // An aggregate member that is not an array leaves too many values for the other fields.
    constexpr bool is_full =
        !takes_array<T>(Before(), Array(), std::make_index_sequence<total - at - length + 1>());
    if constexpr (fits && is_full) {
      return length;
    } else {
      return initializers_of_field<T, total, at, length - 1>();
    }
  }
}

template <typename T, std::size_t total, std::size_t at = 0>
consteval std::size_t count_fields() {
  if constexpr (at >= total) {
    return 0;
  } else {
    return 1 + count_fields<T, total, at + initializers_of_field<T, total, at>()>();
  }
}

/// How many fields with_fields can visit. 0 if there are none or the struct is not supported: it
/// must be an aggregate without base classes, with at most kMostFields fields.
template <typename T>
consteval std::size_t field_count() {
  if constexpr (!std::is_class_v<T> || !std::is_aggregate_v<T>) {
    return 0;
  } else if constexpr (requires { T{AnyBase<T>{}}; }) {
    return 0;
  } else {
    constexpr std::size_t initializers = initializer_count<T>();
    if constexpr (initializers > kMostInitializers) {
      return 0;
    } else {
      constexpr std::size_t fields = count_fields<T, initializers>();
      return fields > kMostFields ? 0 : fields;
    }
  }
}

/// Calls visit(TypeList of the fields' types, fields...).
template <typename Value, typename Visit>
constexpr decltype(auto) with_fields(Value& value, Visit&& visit) {
  constexpr std::size_t count = field_count<std::remove_const_t<Value>>();
  if constexpr (count == 1) {
    auto& [f0] = value;
    return visit(TypeList<decltype(f0)>(), f0);
  } else if constexpr (count == 2) {
    auto& [f0, f1] = value;
    return visit(TypeList<decltype(f0), decltype(f1)>(), f0, f1);
  } else if constexpr (count == 3) {
    auto& [f0, f1, f2] = value;
    return visit(TypeList<decltype(f0), decltype(f1), decltype(f2)>(), f0, f1, f2);
  } else if constexpr (count == 4) {
    auto& [f0, f1, f2, f3] = value;
    return visit(TypeList<decltype(f0), decltype(f1), decltype(f2), decltype(f3)>(), f0, f1, f2,
                 f3);
  } else if constexpr (count == 5) {
    auto& [f0, f1, f2, f3, f4] = value;
    return visit(TypeList<decltype(f0), decltype(f1), decltype(f2), decltype(f3), decltype(f4)>(),
                 f0, f1, f2, f3, f4);
  } else if constexpr (count == 6) {
    auto& [f0, f1, f2, f3, f4, f5] = value;
    return visit(TypeList<decltype(f0), decltype(f1), decltype(f2), decltype(f3), decltype(f4),
                          decltype(f5)>(),
                 f0, f1, f2, f3, f4, f5);
  } else if constexpr (count == 7) {
    auto& [f0, f1, f2, f3, f4, f5, f6] = value;
    return visit(TypeList<decltype(f0), decltype(f1), decltype(f2), decltype(f3), decltype(f4),
                          decltype(f5), decltype(f6)>(),
                 f0, f1, f2, f3, f4, f5, f6);
  } else if constexpr (count == 8) {
    auto& [f0, f1, f2, f3, f4, f5, f6, f7] = value;
    return visit(TypeList<decltype(f0), decltype(f1), decltype(f2), decltype(f3), decltype(f4),
                          decltype(f5), decltype(f6), decltype(f7)>(),
                 f0, f1, f2, f3, f4, f5, f6, f7);
  } else if constexpr (count == 9) {
    auto& [f0, f1, f2, f3, f4, f5, f6, f7, f8] = value;
    return visit(TypeList<decltype(f0), decltype(f1), decltype(f2), decltype(f3), decltype(f4),
                          decltype(f5), decltype(f6), decltype(f7), decltype(f8)>(),
                 f0, f1, f2, f3, f4, f5, f6, f7, f8);
  } else if constexpr (count == 10) {
    auto& [f0, f1, f2, f3, f4, f5, f6, f7, f8, f9] = value;
    return visit(TypeList<decltype(f0), decltype(f1), decltype(f2), decltype(f3), decltype(f4),
                          decltype(f5), decltype(f6), decltype(f7), decltype(f8), decltype(f9)>(),
                 f0, f1, f2, f3, f4, f5, f6, f7, f8, f9);
  } else if constexpr (count == 11) {
    auto& [f0, f1, f2, f3, f4, f5, f6, f7, f8, f9, f10] = value;
    return visit(
        TypeList<decltype(f0), decltype(f1), decltype(f2), decltype(f3), decltype(f4), decltype(f5),
                 decltype(f6), decltype(f7), decltype(f8), decltype(f9), decltype(f10)>(),
        f0, f1, f2, f3, f4, f5, f6, f7, f8, f9, f10);
  } else if constexpr (count == 12) {
    auto& [f0, f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11] = value;
    return visit(TypeList<decltype(f0), decltype(f1), decltype(f2), decltype(f3), decltype(f4),
                          decltype(f5), decltype(f6), decltype(f7), decltype(f8), decltype(f9),
                          decltype(f10), decltype(f11)>(),
                 f0, f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11);
  } else if constexpr (count == 13) {
    auto& [f0, f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12] = value;
    return visit(TypeList<decltype(f0), decltype(f1), decltype(f2), decltype(f3), decltype(f4),
                          decltype(f5), decltype(f6), decltype(f7), decltype(f8), decltype(f9),
                          decltype(f10), decltype(f11), decltype(f12)>(),
                 f0, f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12);
  } else if constexpr (count == 14) {
    auto& [f0, f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12, f13] = value;
    return visit(TypeList<decltype(f0), decltype(f1), decltype(f2), decltype(f3), decltype(f4),
                          decltype(f5), decltype(f6), decltype(f7), decltype(f8), decltype(f9),
                          decltype(f10), decltype(f11), decltype(f12), decltype(f13)>(),
                 f0, f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12, f13);
  } else if constexpr (count == 15) {
    auto& [f0, f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12, f13, f14] = value;
    return visit(
        TypeList<decltype(f0), decltype(f1), decltype(f2), decltype(f3), decltype(f4), decltype(f5),
                 decltype(f6), decltype(f7), decltype(f8), decltype(f9), decltype(f10),
                 decltype(f11), decltype(f12), decltype(f13), decltype(f14)>(),
        f0, f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12, f13, f14);
  } else if constexpr (count == 16) {
    auto& [f0, f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12, f13, f14, f15] = value;
    return visit(
        TypeList<decltype(f0), decltype(f1), decltype(f2), decltype(f3), decltype(f4), decltype(f5),
                 decltype(f6), decltype(f7), decltype(f8), decltype(f9), decltype(f10),
                 decltype(f11), decltype(f12), decltype(f13), decltype(f14), decltype(f15)>(),
        f0, f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12, f13, f14, f15);
  }
}

}  // namespace semitone::detail
