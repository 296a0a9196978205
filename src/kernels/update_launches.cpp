#include "src/kernels/update_launches.h"

#include "semitone/core/dtype.h"
#include "src/kernels/flat.h"

#include <algorithm>

namespace semitone::kernels {
namespace {

void check_like_param(const at::Tensor& tensor, const Update& item, const char* what) {
  if (tensor.layout() != at::kStrided || tensor.device() != item.param.device() ||
      tensor.sizes() != item.param.sizes()) {
    throw Error(
        kUpdate,
        c10::str(what, " like its parameter, ", item.param.sizes(), " on ", item.param.device()),
        c10::str(tensor.sizes(), " on ", tensor.device(), ", ", tensor.layout()));
  }
}

void check_floating(const at::Tensor& tensor, const Update& item, const char* what) {
  if (!tensor.defined()) throw Error(kUpdate, what, "an undefined tensor");
  if (!tensor.is_floating_point())
    throw Error(kUpdate, c10::str(what, " of a floating dtype"), dtype_name(tensor.scalar_type()));
  check_like_param(tensor, item, what);
}

void check_state(const Update& item, bool takes_bf16) {
  const auto wide = item.param.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const auto dtype = takes_bf16 && wide == at::kFloat && item.state[0].defined() &&
                             item.state[0].scalar_type() == at::kBFloat16
                         ? at::kBFloat16
                         : wide;
  for (const at::Tensor& state : item.state) {
    if (!state.defined()) continue;
    check_like_param(state, item, "state");
    if (state.scalar_type() != dtype)
      throw Error(kUpdate, "state in " + dtype_name(dtype), dtype_name(state.scalar_type()));
  }
}

}  // namespace

void check_update(const Update& item, bool takes_bf16_state) {
  check_floating(item.param, item, "a parameter");
  check_floating(item.grad, item, "a gradient");
  if (item.copy.defined()) check_floating(item.copy, item, "a copy");
  check_state(item, takes_bf16_state);
  if (!item.low.defined()) return;
  check_like_param(item.low, item, "lower halves");
  if (item.param.scalar_type() != at::kBFloat16 || item.low.scalar_type() != at::kShort) {
    throw Error(kUpdate, "int16 lower halves of a bfloat16 parameter",
                dtype_name(item.low.scalar_type()) + " of " + dtype_name(item.param.scalar_type()));
  }
}

bool fits_kernel(const Update& item) {
  const auto flat = [&](const at::Tensor& tensor) {
    return !tensor.defined() || same_flat_layout(tensor, item.param);
  };
  return has_kernels(item.param) && format_of(item.param.scalar_type()).has_value() &&
         format_of(item.grad.scalar_type()).has_value() &&
         (!item.copy.defined() || format_of(item.copy.scalar_type()).has_value()) &&
         flat(item.param) && flat(item.low) && flat(item.grad) && flat(item.copy) &&
         std::all_of(item.state.begin(), item.state.end(), flat);
}

UpdateSpan span_of(const Update& item) {
  UpdateSpan span;
  span.grad = item.grad.const_data_ptr();
  span.grad_format = *format_of(item.grad.scalar_type());
  span.param = written_data(item.param);
  span.param_format = *format_of(item.param.scalar_type());
  if (item.low.defined()) span.low = reinterpret_cast<std::uint16_t*>(written_data(item.low));
  if (item.copy.defined()) {
    span.copy = written_data(item.copy);
    span.copy_format = *format_of(item.copy.scalar_type());
  }
  for (std::size_t k = 0; k < item.state.size(); ++k) {
    if (!item.state[k].defined()) continue;
    span.state[k] = written_data(item.state[k]);
    span.state_format = *format_of(item.state[k].scalar_type());
  }
  span.seed = item.seed;
  span.size = static_cast<std::size_t>(item.param.numel());
  return span;
}

UpdateSpan part_of(const UpdateSpan& whole, std::size_t begin, std::size_t size) {
  UpdateSpan part = whole;
  part.grad = static_cast<const char*>(whole.grad) + begin * bytes_of(whole.grad_format);
  part.param = static_cast<char*>(whole.param) + begin * bytes_of(whole.param_format);
  if (whole.low != nullptr) part.low = whole.low + begin;
  if (whole.copy != nullptr)
    part.copy = static_cast<char*>(whole.copy) + begin * bytes_of(whole.copy_format);
  for (void*& state : part.state) {
    if (state != nullptr) state = static_cast<char*>(state) + begin * bytes_of(whole.state_format);
  }
  part.first_element = whole.first_element + static_cast<std::uint32_t>(begin);
  part.size = size;
  return part;
}

}  // namespace semitone::kernels
