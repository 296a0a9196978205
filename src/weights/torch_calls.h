// The calls with which PyTorch describes tensors in a pickle.

#pragma once

#include "src/weights/pickle.h"

#include <c10/core/ScalarType.h>

#include <optional>
#include <string>
#include <string_view>

namespace semitone::weights {

// The number of items that calls may copy. A pickle can repeat a call in five bytes.
struct Copies {
  std::size_t& made;
  std::size_t most;
};

// What a call of this class or function gives: a TensorInStorage, a Dict, one of the arguments, or
// an Object for functions that are not known. An Object with a problem if the arguments are not as
// PyTorch writes them, or describe a tensor that is not read: the file may have it in a part that
// is not asked for.
decltype(Value::held) result_of(const std::string& function, const List& arguments, Copies& copies);

// The storage that a persistent id describes: ("storage", class, key, device, elements). FileError
// if it is none.
Storage storage_of(const Value& persistent_id, const std::string& source);

// The name of the class of a storage, "FloatStorage", or nothing for dtypes that have none.
std::optional<std::string_view> storage_class_of(c10::ScalarType dtype);
// The name in Python of a dtype without such a class, "float8_e5m2", or nothing for others.
std::optional<std::string_view> other_dtype_name(c10::ScalarType dtype);

}  // namespace semitone::weights
