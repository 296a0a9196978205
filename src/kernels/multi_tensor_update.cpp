#include "src/kernels/multi_tensor_update.h"

#include "semitone/core/dtype.h"
#include "semitone/core/error.h"
#include "src/kernels/flat.h"
#include "src/kernels/on_cuda.h"

#include <torch/types.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <type_traits>
#include <unordered_set>
#include <vector>

namespace semitone::kernels {
namespace {

constexpr auto kUpdate = "kernels.multi_tensor_update";

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

template <typename Rule>
constexpr bool kTakesBf16State = std::is_same_v<Rule, AdamRule> || std::is_same_v<Rule, SgdRule>;

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

void check(const Update& item, bool takes_bf16_state) {
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
  if (item.low.defined())
    span.low = static_cast<std::uint16_t*>(static_cast<void*>(written_data(item.low)));
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

// The elements [begin, begin + size) of a span.
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

template <typename Rule>
void check(std::span<const Update> items, std::span<const Rule> rules) {
  if (items.size() != rules.size()) {
    throw Error(kUpdate, "a rule for each parameter",
                c10::str(rules.size(), " for ", items.size()));
  }
  for (const Update& item : items) check(item, kTakesBf16State<Rule>);
}

// Tied parameters that are different tensors with the same memory are updated one after the other,
// in waves; all of a wave at once. This is the memory that a wave writes.
class WaveMemory {
 public:
  bool holds(const UpdateSpan& span) const {
    return memory_.count(span.param) > 0 || memory_.count(span.copy) > 0;
  }
  void add(const UpdateSpan& span) {
    memory_.insert(span.param);
    if (span.copy != nullptr) memory_.insert(span.copy);
  }
  void clear() { memory_.clear(); }

 private:
  std::unordered_set<const void*> memory_;
};

// The memory of several parameters in chunks, by waves.
template <typename Rule>
class Parts {
 public:
  void add(const Update& item, const Rule& rule) {
    const UpdateSpan whole = span_of(item);
    if (waves_.empty() || memory_.holds(whole)) {
      waves_.push_back({parts_.size(), {}});
      memory_.clear();
    }
    memory_.add(whole);
    for (std::size_t begin = 0; begin < whole.size; begin += kChunk) {
      const auto size = std::min<std::size_t>(kChunk, whole.size - begin);
      parts_.push_back({part_of(whole, begin, size), &rule});
      waves_.back().chunks.add(size);
    }
  }

  std::size_t size() const { return parts_.size(); }

  // Calls visit(number of the part, its span, its rule) from several threads.
  template <typename Visit>
  void for_each(const Visit& visit) {
    for (Wave& wave : waves_) {
      wave.chunks.for_each([&](std::size_t i) {
        const std::size_t number = wave.first + i;
        visit(number, parts_[number].span, *parts_[number].rule);
      });
    }
  }

 private:
  struct Part {
    UpdateSpan span;
    const Rule* rule;
  };
  struct Wave {
    std::size_t first;  // of its parts
    Chunks chunks;
  };
  std::vector<Part> parts_;
  std::vector<Wave> waves_;
  WaveMemory memory_;  // of the last wave
};

// The same for CUDA devices, where a wave is on one device and launches follow each other.
template <typename Rule>
class CudaWaves {
 public:
  void add(std::size_t number, const Update& item, const Rule& rule) {
    const UpdateSpan whole = span_of(item);
    if (waves_.empty() || memory_.holds(whole) || !same_device(item.param, waves_.back().param)) {
      waves_.push_back({item.param, {}, {}, {}});
      memory_.clear();
    }
    memory_.add(whole);
    waves_.back().numbers.push_back(number);
    waves_.back().spans.push_back(whole);
    waves_.back().rules.push_back(rule);
  }

  // Calls visit(a parameter of the wave, numbers of its items, step, stream).
  template <typename Visit>
  void for_each(const Visit& visit) const {
    for (const Wave& wave : waves_) {
      const CurrentCuda cuda(wave.param);
      visit(wave.param, wave.numbers, CudaStep<Rule>{.spans = wave.spans, .rules = wave.rules},
            cuda.stream());
    }
  }

 private:
  struct Wave {
    at::Tensor param;  // one of them
    std::vector<std::size_t> numbers;
    std::vector<UpdateSpan> spans;
    std::vector<Rule> rules;
  };
  std::vector<Wave> waves_;
  WaveMemory memory_;  // of the last wave
};

// The kernels and the reference of a rule.
template <typename Rule>
struct Kernels {
  void (*cpu)(const UpdateSpan&, const Rule&);
  void (*cuda)(const CudaStep<Rule>&, CudaStream);
  void (*definition)(const Update&, const Rule&);
};
template <typename Rule>
constexpr Kernels<Rule> kKernels;
template <>
constexpr Kernels<AdamRule> kKernels<AdamRule>{adam, adam_cuda, ref::adam};
template <>
constexpr Kernels<SgdRule> kKernels<SgdRule>{sgd, sgd_cuda, ref::sgd};
template <>
constexpr Kernels<AdagradRule> kKernels<AdagradRule>{adagrad, adagrad_cuda, ref::adagrad};
template <>
constexpr Kernels<NovoGradRule> kKernels<NovoGradRule>{novograd, novograd_cuda, ref::novograd};
// Of the second pass.
template <>
constexpr Kernels<LambRule> kKernels<LambRule>{lamb_apply, lamb_apply_cuda, ref::lamb_apply};

template <typename Rule>
void run(std::span<const Update> items, std::span<const Rule> rules) {
  constexpr Kernels<Rule> kernels = kKernels<Rule>;
  check(items, rules);
  Parts<Rule> parts;
  CudaWaves<Rule> waves;
  for (std::size_t i = 0; i < items.size(); ++i) {
    if (!fits_kernel(items[i])) {
      kernels.definition(items[i], rules[i]);
    } else if (runs_on_cuda(items[i].param)) {
      waves.add(i, items[i], rules[i]);
    } else {
      parts.add(items[i], rules[i]);
    }
  }
  waves.for_each([&](const at::Tensor&, const std::vector<std::size_t>&, const CudaStep<Rule>& step,
                     CudaStream stream) { kernels.cuda(step, stream); });
  parts.for_each(
      [&](std::size_t, const UpdateSpan& span, const Rule& rule) { kernels.cpu(span, rule); });
}

void check_found_inf(const at::Tensor& found_inf, c10::Device device) {
  if (!found_inf.defined()) return;
  if (found_inf.scalar_type() != at::kFloat || found_inf.numel() != 1 ||
      found_inf.device() != device) {
    throw Error(kUpdate, c10::str("found_inf of one float32 on ", device),
                c10::str(found_inf.numel(), " of ", dtype_name(found_inf.scalar_type()), " on ",
                         found_inf.device()));
  }
}

// With rules and found_inf in the memory of the parameters' device.
template <typename Rule>
void run_there(std::span<const Update> items, const at::Tensor& rules,
               const at::Tensor& found_inf) {
  const auto* const list = static_cast<const Rule*>(rules.const_data_ptr());
  const std::span<const Rule> list_of_rules(list,
                                            static_cast<std::size_t>(rules.numel()) / sizeof(Rule));
  check(items, list_of_rules);
  for (const Update& item : items) {
    if (item.param.device() == rules.device() && fits_kernel(item)) continue;
    throw Error(kUpdate,
                c10::str("float32 or 16-bit parameters without gaps on ", rules.device(),
                         ", and gradients and state with the same strides"),
                c10::str("one of ", dtype_name(item.param.scalar_type()), ", ", item.param.sizes(),
                         " on ", item.param.device()));
  }
  const float* const flag = found_inf.defined() ? found_inf.const_data_ptr<float>() : nullptr;
  if (!runs_on_cuda(rules)) {
    if (flag == nullptr || *flag == 0) run(items, list_of_rules);
    return;
  }
  CudaWaves<Rule> waves;
  for (std::size_t i = 0; i < items.size(); ++i) waves.add(i, items[i], Rule{});
  waves.for_each([&](const at::Tensor&, const std::vector<std::size_t>& numbers,
                     const CudaStep<Rule>& step, CudaStream stream) {
    kKernels<Rule>.cuda(
        {.spans = step.spans,
         .rules = {},
         .rules_on_device = list + numbers.front(),  // a wave's numbers are consecutive
         .found_inf = flag},
        stream);
  });
}

}  // namespace

void multi_tensor_adam(std::span<const Update> items, std::span<const AdamRule> rules) {
  run(items, rules);
}

void multi_tensor_sgd(std::span<const Update> items, std::span<const SgdRule> rules) {
  run(items, rules);
}

void multi_tensor_novograd(std::span<const Update> items, std::span<const NovoGradRule> rules) {
  run(items, rules);
}

void multi_tensor_adagrad(std::span<const Update> items, std::span<const AdagradRule> rules) {
  run(items, rules);
}

void multi_tensor_lamb_apply(std::span<const Update> items, std::span<const LambRule> rules) {
  run(items, rules);
}

void multi_tensor_update(std::span<const Update> items, const Rules& rules) {
  std::visit([&]<typename Rule>(
                 const std::vector<Rule>& list) { run(items, std::span<const Rule>(list)); },
             rules);
}

CapturableUpdate::CapturableUpdate(c10::Device device) : device_(device) {}

void CapturableUpdate::send(const Rules& rules) {
  std::visit(
      [&]<typename Rule>(const std::vector<Rule>& list) {
        static_assert(std::is_trivially_copyable_v<Rule>);
        const auto bytes = static_cast<std::int64_t>(list.size() * sizeof(Rule));
        if (!rules_.defined()) {
          run_ = run_there<Rule>;
          rules_ = at::empty({bytes}, at::TensorOptions(device_).dtype(at::kByte));
        }
        if (run_ != run_there<Rule> || rules_.numel() != bytes)
          throw Error(kUpdate, "as many rules as before, of the same kind", "others");
        // LibTorch's allocator keeps pinned memory until the copy is done. For other memory CUDA
        // only promises that it may have been read when the call returns.
        const auto host_memory =
            at::TensorOptions().dtype(at::kByte).pinned_memory(device_.is_cuda());
        const at::Tensor host = at::empty({bytes}, host_memory);
        std::copy(list.begin(), list.end(), static_cast<Rule*>(host.mutable_data_ptr()));
        rules_.copy_(host, /*non_blocking=*/true);
      },
      rules);
}

void CapturableUpdate::run(std::span<const Update> items, const at::Tensor& found_inf) const {
  if (!rules_.defined()) throw Error(kUpdate, "rules that were sent", "none");
  check_found_inf(found_inf, device_);
  run_(items, rules_, found_inf);
}

std::vector<LambNorms> multi_tensor_lamb_moments(std::span<const Update> items,
                                                 std::span<const LambRule> rules) {
  check(items, rules);
  std::vector<LambNorms> norms(items.size());
  Parts<LambRule> parts;
  CudaWaves<LambRule> waves;
  std::vector<std::size_t> item_of_part;
  ReadOnce others;
  for (std::size_t i = 0; i < items.size(); ++i) {
    if (!fits_kernel(items[i])) {
      others.add(i, ref::lamb_moments(items[i], rules[i]));
      continue;
    }
    Update moments = items[i];
    moments.copy = at::Tensor();  // written by the second pass
    if (runs_on_cuda(items[i].param)) {
      waves.add(i, moments, rules[i]);
      continue;
    }
    parts.add(moments, rules[i]);
    item_of_part.resize(parts.size(), i);
  }
  waves.for_each([&](const at::Tensor& param, const std::vector<std::size_t>& numbers,
                     const CudaStep<LambRule>& step, CudaStream stream) {
    std::size_t blocks = 0;
    for (const UpdateSpan& span : step.spans) blocks += cuda_blocks(span.size);
    const auto fp64 = at::TensorOptions(param.device()).dtype(at::kDouble);
    const at::Tensor memory = at::empty({static_cast<std::int64_t>(blocks), 2}, fp64);
    const at::Tensor sums = at::empty({static_cast<std::int64_t>(numbers.size()), 2}, fp64);
    lamb_moments_cuda(step, memory.mutable_data_ptr<double>(), sums.mutable_data_ptr<double>(),
                      stream);
    others.add(numbers, sums.sqrt());
  });
  std::vector<LambSquares> squares(parts.size());
  parts.for_each([&](std::size_t part, const UpdateSpan& span, const LambRule& rule) {
    squares[part] = lamb_moments(span, rule);
  });
  // In the order of the parts, independently of the threads.
  for (std::size_t part = 0; part < parts.size(); ++part) {
    norms[item_of_part[part]].param += squares[part].param;
    norms[item_of_part[part]].update += squares[part].update;
  }
  for (LambNorms& norm : norms) norm = {std::sqrt(norm.param), std::sqrt(norm.update)};
  others.for_each([&](std::size_t i, const double* read) { norms[i] = {read[0], read[1]}; });
  return norms;
}

}  // namespace semitone::kernels
