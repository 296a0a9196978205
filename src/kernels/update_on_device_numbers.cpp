#include "src/kernels/pinned.h"
#include "src/kernels/update_launches.h"
#include "src/kernels/update_on_device.h"

#include <torch/types.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>
#include <variant>
#include <vector>

// The numbers of a step on their way to the device's memory.
namespace semitone::kernels {
namespace {

// fp64 numbers of a rule in memory. Flags share the last one.
template <typename Rule>
constexpr std::size_t numbers_of() {
  static_assert(std::is_trivially_copyable_v<Rule> && alignof(Rule) == alignof(double));
  return sizeof(Rule) / sizeof(double);
}

// Calls visit(values, the number's place in a rule) for those of the numbers that are defined.
template <typename Rule, typename Visit>
void for_each_defined(const ComputedNumbers& numbers, const Visit& visit) {
  const auto look = [&](const at::Tensor& values, std::size_t offset) {
    if (values.defined()) visit(values, offset / sizeof(double));
  };
  look(numbers.grad_scale, offsetof(Rule, grad_scale));
  if constexpr (requires(Rule rule) { rule.trust_ratio; }) {
    look(numbers.weight_decay, offsetof(Rule, weight_decay));
    look(numbers.trust_ratio, offsetof(Rule, trust_ratio));
  }
  if constexpr (requires(Rule rule) { rule.correction; })
    look(numbers.correction, offsetof(Rule, correction));
  if constexpr (requires(Rule rule) { rule.step_size; })
    look(numbers.step_size, offsetof(Rule, step_size));
}

// Writes the numbers of rules, and the inputs behind them.
template <typename Rule>
double* write_numbers(double* to, const std::vector<Rule>& rules, std::span<const double> inputs) {
  if (!rules.empty()) std::memcpy(to, rules.data(), rules.size() * sizeof(Rule));
  return std::copy(inputs.begin(), inputs.end(), to + rules.size() * numbers_of<Rule>());
}

}  // namespace

UpdateOnDevice::UpdateOnDevice(c10::Device device) : device_(device) {}

void UpdateOnDevice::allocate(std::size_t rules, std::size_t numbers_of_each, std::size_t inputs) {
  const auto count = static_cast<std::int64_t>(rules);
  const auto numbers = static_cast<std::int64_t>(rules * numbers_of_each);
  const auto all = numbers + static_cast<std::int64_t>(inputs);
  sent_ = at::empty({all}, at::TensorOptions(device_).dtype(at::kDouble));
  table_ = sent_.narrow(0, 0, numbers).view({count, static_cast<std::int64_t>(numbers_of_each)});
  inputs_ = sent_.narrow(0, numbers, all - numbers);
  if (count > 0) inputs_ = inputs_.view({count, (all - numbers) / count});
}

void UpdateOnDevice::send(const Rules& rules, std::span<const double> inputs) {
  prepare(rules, inputs.size());
  upload({&rules, 1}, inputs, sent_);
}

void UpdateOnDevice::send_either(const std::array<Rules, 2>& rules,
                                 std::span<const double> inputs) {
  if (rules[0].index() != rules[1].index() || inputs.size() % 2 != 0)
    throw Error(kUpdate, "two sets of rules of the same kind", "others");
  prepare(rules[0], inputs.size() / 2);
  if (!either_.defined()) either_ = at::empty({2, sent_.numel()}, sent_.options());
  upload(rules, inputs, either_);
}

void UpdateOnDevice::choose(const at::Tensor& second) const {
  const at::NoGradGuard no_grad;
  check(second);
  // As bits: flags need not be numbers.
  const at::Tensor bits = either_.view(at::kLong);
  sent_.view(at::kLong).copy_(at::where(second.reshape({}).ne(0), bits[1], bits[0]));
}

// Allocates memory the first time.
void UpdateOnDevice::prepare(const Rules& rules, std::size_t inputs) {
  std::visit(
      [&]<typename Rule>(const std::vector<Rule>& list) {
        if (!sent_.defined()) {
          allocate(list.size(), numbers_of<Rule>(), inputs);
          rules_ = list;
        }
        const std::size_t size = list.size() * numbers_of<Rule>() + inputs;
        if (!std::holds_alternative<std::vector<Rule>>(rules_) ||
            sent_.numel() != static_cast<std::int64_t>(size) ||
            table_.size(0) != static_cast<std::int64_t>(list.size()))
          throw Error(kUpdate, "as many rules as before, of the same kind", "others");
      },
      rules);
  rules_ = rules;
  computed_ = {};
}

// Copies sets of rules, each with its share of the inputs behind it.
void UpdateOnDevice::upload(std::span<const Rules> sets, std::span<const double> inputs,
                            const at::Tensor& into) {
  const at::Tensor host = empty_for_copy({into.numel()}, at::kDouble, device_);
  auto* to = host.mutable_data_ptr<double>();
  const std::size_t share = inputs.size() / sets.size();
  for (std::size_t i = 0; i < sets.size(); ++i) {
    std::visit(
        [&](const auto& list) { to = write_numbers(to, list, inputs.subspan(i * share, share)); },
        sets[i]);
  }
  // LibTorch's allocator keeps pinned memory until the copy is done. For other memory CUDA
  // only promises that it may have been read when the call returns.
  into.view({-1}).copy_(host, /*non_blocking=*/has_pinned_memory(device_));
}

void UpdateOnDevice::set(const ComputedNumbers& numbers) {
  std::visit(
      [&]<typename Rule>(const std::vector<Rule>&) {
        if (!kHasComputedNumbers<Rule>)
          throw Error(kUpdate, "a rule whose numbers may depend on norms", Rule::kName);
        for_each_defined<Rule>(numbers, [&](const at::Tensor& values, std::size_t place) {
          table_.select(1, static_cast<std::int64_t>(place)).copy_(values);
        });
      },
      rules_);
  const auto take = [](at::Tensor& into, const at::Tensor& values) {
    if (values.defined()) into = values;
  };
  take(computed_.grad_scale, numbers.grad_scale);
  take(computed_.weight_decay, numbers.weight_decay);
  take(computed_.trust_ratio, numbers.trust_ratio);
  take(computed_.correction, numbers.correction);
  take(computed_.step_size, numbers.step_size);
}

}  // namespace semitone::kernels
