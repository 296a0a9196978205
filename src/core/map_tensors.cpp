#include "semitone/core/map_tensors.h"

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>

#include <utility>
#include <vector>

namespace semitone {
namespace detail {
namespace {

bool same(const c10::IValue& before, const c10::IValue& after) {
  return before.isTensor() ? before.toTensor().is_same(after.toTensor()) : before.is(after);
}

c10::IValue map_tuple(const c10::IValue& value, TensorTransform transform) {
  const auto tuple = value.toTuple();
  std::vector<c10::IValue> elements;
  bool changed = false;
  for (const c10::IValue& element : tuple->elements()) {
    elements.push_back(map_ivalue(element, transform));
    changed = changed || !same(element, elements.back());
  }
  if (!changed) return value;
  // A NamedTuple keeps its type, which has the fields' names.
  const auto type = tuple->type();
  return type->schema() != nullptr ? c10::ivalue::Tuple::createNamed(std::move(elements), type)
                                   : c10::ivalue::Tuple::create(std::move(elements));
}

c10::IValue map_list(const c10::IValue& value, TensorTransform transform) {
  const auto list = value.toList();
  c10::impl::GenericList result(list.elementType());
  result.reserve(list.size());
  bool changed = false;
  for (std::size_t i = 0; i < list.size(); ++i) {
    const c10::IValue& element = list.get(i);
    result.push_back(map_ivalue(element, transform));
    changed = changed || !same(element, result.get(i));
  }
  return changed ? c10::IValue(result) : value;
}

c10::IValue map_dict(const c10::IValue& value, TensorTransform transform) {
  const auto dict = value.toGenericDict();
  c10::impl::GenericDict result(dict.keyType(), dict.valueType());
  bool changed = false;
  for (const auto& entry : dict) {
    c10::IValue mapped = map_ivalue(entry.value(), transform);
    changed = changed || !same(entry.value(), mapped);
    result.insert(entry.key(), std::move(mapped));
  }
  return changed ? c10::IValue(result) : value;
}

}  // namespace

c10::IValue map_ivalue(const c10::IValue& value, TensorTransform transform) {
  if (value.isTensor()) return transform(value.toTensor());
  if (value.isTuple()) return map_tuple(value, transform);
  if (value.isIntList() || value.isDoubleList() || value.isBoolList()) return value;
  if (value.isList()) return map_list(value, transform);
  if (value.isGenericDict()) return map_dict(value, transform);
  return value;
}

}  // namespace detail

}  // namespace semitone
