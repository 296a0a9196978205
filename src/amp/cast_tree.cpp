#include "semitone/amp/cast_tree.h"

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>

namespace semitone::amp {

at::Tensor cast_floating(const at::Tensor& tensor, c10::ScalarType dtype, bool wide) {
  if (!tensor.defined() || !tensor.is_floating_point() || tensor.scalar_type() == dtype)
    return tensor;
  if (tensor.scalar_type() == at::kDouble && !wide) return tensor;
  return tensor.to(dtype);
}

c10::IValue cast_floating(const c10::IValue& value, c10::ScalarType dtype, bool wide) {
  const auto cast = [&](const c10::IValue& inner) { return cast_floating(inner, dtype, wide); };
  if (value.isTensor()) return cast_floating(value.toTensor(), dtype, wide);
  if (value.isTuple()) {
    std::vector<c10::IValue> elements;
    for (const c10::IValue& element : value.toTupleRef().elements())
      elements.push_back(cast(element));
    return c10::ivalue::Tuple::create(std::move(elements));
  }
  if (value.isList()) {
    const auto list = value.toList();
    c10::impl::GenericList result(list.elementType());
    result.reserve(list.size());
    for (std::size_t i = 0; i < list.size(); ++i) result.push_back(cast(list.get(i)));
    return result;
  }
  if (value.isGenericDict()) {
    const auto dict = value.toGenericDict();
    c10::impl::GenericDict result(dict.keyType(), dict.valueType());
    for (const auto& entry : dict) result.insert(entry.key(), cast(entry.value()));
    return result;
  }
  return value;
}

}  // namespace semitone::amp
