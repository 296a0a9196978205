#include "src/kernels/update_on_device.h"

#include "semitone/core/dtype.h"
#include "src/kernels/multi_tensor_lamb.h"
#include "src/kernels/update_launches.h"

#include <torch/types.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace semitone::kernels {
namespace {

ComputedNumbers numbers_at(const ComputedNumbers& lists, std::size_t index) {
  const auto at = [&](const at::Tensor& list) {
    return list.defined() ? list.select(0, static_cast<std::int64_t>(index)) : list;
  };
  return {at(lists.grad_scale), at(lists.weight_decay), at(lists.trust_ratio), at(lists.correction),
          at(lists.step_size)};
}

// Calls change(), which writes tensors of the item. Restores them on the device if found_inf is
// set there.
template <typename Change>
void change_unless(const at::Tensor& found_inf, const Update& item, const Change& change) {
  if (!found_inf.defined()) return change();
  std::vector<std::pair<at::Tensor, at::Tensor>> kept;
  for (const at::Tensor& tensor :
       {item.param, item.low, item.copy, item.state[0], item.state[1], item.state[2]}) {
    if (tensor.defined()) kept.emplace_back(tensor, tensor.clone());
  }
  change();
  const at::Tensor skips = found_inf.reshape({}).ne(0);
  for (const auto& [tensor, before] : kept) tensor.copy_(at::where(skips, before, tensor));
}

template <typename Rule>
void update_by_reference(const Update& item, const Rule& rule, const ComputedNumbers& computed) {
  if constexpr (kHasComputedNumbers<Rule>) {
    ref::update(item, rule, computed);
  } else {
    ref::update(item, rule);
  }
}

bool has_cuda_kernel(const Update& item) {
  return fits_kernel(item) && runs_on_cuda(item.param);
}

// Collects items for CUDA launches. The rules of a launch are neighbours in the device's memory.
template <typename Rule, typename Run>
class Launches {
 public:
  Launches(const at::Tensor& table, const at::Tensor& found_inf, const Run& run)
      : rules_(static_cast<const Rule*>(table.const_data_ptr())),
        found_inf_(found_inf.defined() ? found_inf.const_data_ptr<float>() : nullptr),
        run_(run) {}

  void add(std::size_t number, const Update& item) {
    if (next_ != number) flush();
    next_ = number + 1;
    launches_->add(number, item, Rule{});
  }

  void flush() {
    launches_->for_each([&](const at::Tensor& param, const std::vector<std::size_t>& numbers,
                            const CudaStep<Rule>& step, CudaStream stream) {
      run_(param, numbers,
           CudaStep<Rule>{.spans = step.spans,
                          .rules = {},
                          .rules_on_device = rules_ + numbers.front(),
                          .found_inf = found_inf_},
           stream);
    });
    launches_.emplace();
  }

 private:
  const Rule* rules_;
  const float* found_inf_;
  const Run& run_;
  std::size_t next_ = 0;
  std::optional<CudaLaunches<Rule>> launches_{std::in_place};
};

template <typename Rule>
std::vector<Rule> rules_in(const at::Tensor& table) {
  const auto* const first = static_cast<const Rule*>(table.const_data_ptr());
  return {first, first + table.size(0)};
}

// Whether the CPU's kernels can read the memory of the rules.
bool is_on_cpu(const at::Tensor& rules) {
  return rules.is_cpu() && !runs_on_cuda(rules);
}

bool is_set_on_cpu(const at::Tensor& found_inf) {
  return found_inf.defined() && *found_inf.const_data_ptr<float>() != 0;
}

at::Tensor moments_on_cpu(std::span<const Update> items, const at::Tensor& table,
                          const at::Tensor& found_inf) {
  at::Tensor norms = at::zeros({static_cast<std::int64_t>(items.size()), 2}, at::kDouble);
  if (is_set_on_cpu(found_inf)) return norms;
  auto* to = norms.mutable_data_ptr<double>();
  for (const LambNorms& of : multi_tensor_lamb_moments(items, rules_in<LambRule>(table))) {
    *to++ = of.param;
    *to++ = of.update;
  }
  return norms;
}

at::Tensor norms_on_cuda(const at::Tensor& param, std::size_t items, const CudaStep<LambRule>& step,
                         CudaStream stream) {
  std::size_t blocks = 0;
  for (const UpdateSpan& span : step.spans) blocks += cuda_blocks(span.size);
  const auto fp64 = at::TensorOptions(param.device()).dtype(at::kDouble);
  const at::Tensor memory = at::empty({static_cast<std::int64_t>(blocks), 2}, fp64);
  at::Tensor sums = at::empty({static_cast<std::int64_t>(items), 2}, fp64);
  lamb_moments_cuda(step, memory.mutable_data_ptr<double>(), sums.mutable_data_ptr<double>(),
                    stream);
  return sums.sqrt_();
}

}  // namespace

at::Tensor UpdateOnDevice::lamb_moments(std::span<const Update> items,
                                        const at::Tensor& found_inf) const {
  const at::NoGradGuard no_grad;
  check(found_inf);
  const auto& rules = std::get<std::vector<LambRule>>(rules_);
  check_updates(items, std::span<const LambRule>(rules));
  if (is_on_cpu(sent_)) return moments_on_cpu(items, table_, found_inf);
  std::vector<at::Tensor> norms(items.size());
  const auto run = [&](const at::Tensor& param, const std::vector<std::size_t>& numbers,
                       const CudaStep<LambRule>& step, CudaStream stream) {
    const auto rows = norms_on_cuda(param, numbers.size(), step, stream).unbind();
    for (std::size_t k = 0; k < numbers.size(); ++k) norms[numbers[k]] = rows[k];
  };
  Launches<LambRule, decltype(run)> launches(table_, found_inf, run);
  for (std::size_t i = 0; i < items.size(); ++i) {
    if (has_cuda_kernel(items[i])) {
      Update moments = items[i];
      moments.copy = at::Tensor();  // written by the second pass
      launches.add(i, moments);
      continue;
    }
    launches.flush();
    change_unless(found_inf, items[i], [&] {
      norms[i] = ref::lamb_moments(items[i], rules[i], numbers_at(computed_, i));
    });
  }
  launches.flush();
  return at::stack(norms);
}

template <typename Rule>
void UpdateOnDevice::run_rules(std::span<const Update> items, const std::vector<Rule>& rules,
                               const at::Tensor& found_inf) const {
  check_updates(items, std::span<const Rule>(rules));
  if (is_on_cpu(sent_)) {
    if (!is_set_on_cpu(found_inf)) multi_tensor_update(items, rules_in<Rule>(table_));
    return;
  }
  const auto run = [](const at::Tensor&, const std::vector<std::size_t>&,
                      const CudaStep<Rule>& step, CudaStream stream) { update_cuda(step, stream); };
  Launches<Rule, decltype(run)> launches(table_, found_inf, run);
  for (std::size_t i = 0; i < items.size(); ++i) {
    if (has_cuda_kernel(items[i])) {
      launches.add(i, items[i]);
      continue;
    }
    launches.flush();
    change_unless(found_inf, items[i],
                  [&] { update_by_reference(items[i], rules[i], numbers_at(computed_, i)); });
  }
  launches.flush();
}

void UpdateOnDevice::run(std::span<const Update> items, const at::Tensor& found_inf) const {
  const at::NoGradGuard no_grad;
  check(found_inf);
  std::visit([&](const auto& rules) { run_rules(items, rules, found_inf); }, rules_);
}

void UpdateOnDevice::check(const at::Tensor& found_inf) const {
  if (!sent_.defined()) throw Error(kUpdate, "rules that were sent", "none");
  if (!found_inf.defined()) return;
  if (found_inf.scalar_type() != at::kFloat || found_inf.numel() != 1 ||
      found_inf.device() != device_) {
    throw Error(kUpdate, c10::str("found_inf of one float32 on ", device_),
                c10::str(found_inf.numel(), " of ", dtype_name(found_inf.scalar_type()), " on ",
                         found_inf.device()));
  }
}

void UpdateOnDevice::require_capturable(std::span<const Update> items) const {
  if (!has_kernels(sent_))
    throw Error(kUpdate, "a device for which there are kernels", device_.str());
  for (const Update& item : items) {
    if (item.param.device() == device_ && fits_kernel(item)) continue;
    throw Error(kUpdate,
                c10::str("float32 or 16-bit parameters without gaps on ", device_,
                         ", and gradients and state with the same strides"),
                c10::str("one of ", dtype_name(item.param.scalar_type()), ", ", item.param.sizes(),
                         " on ", item.param.device()));
  }
}

}  // namespace semitone::kernels
