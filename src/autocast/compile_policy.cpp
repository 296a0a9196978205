#include "src/autocast/cast_policy_impl.h"
#include "src/autocast/dispatch.h"
#include "src/autocast/emulation.h"
#include "src/autocast/fast_kernels.h"
#include "src/autocast/op_names.h"
#include "src/autocast/operator_lists.h"

#include <c10/util/FunctionRef.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <utility>

// Turns a policy into the form that the dispatcher's kernels read, and installs the kernels that it
// needs.
namespace semitone::amp {
namespace {

// Calls install() once for each device. Two threads at the same time may call it twice, which is
// harmless. Everything that a policy may need besides its rows is installed at once: looking up
// each operator's kernel at every edit of a policy would cost 0.1 ms.
class OncePerDevice {
 public:
  void operator()(c10::DeviceType device, c10::function_ref<void()> install) {
    const auto bit = std::uint32_t{1} << static_cast<unsigned>(device);
    if ((done_.load(std::memory_order_acquire) & bit) != 0) return;
    install();
    done_.fetch_or(bit, std::memory_order_release);
  }

 private:
  std::atomic<std::uint32_t> done_{0};
};

// The operators of fast kernels by name. Those that run on a device are installed there.
// @param on_gpu  CastPolicy::fast_kernels_on_gpu
const std::map<std::string_view, OpId>& fast_operators(c10::DeviceType device, bool on_gpu) {
  using Operators = std::map<std::string_view, OpId>;
  static const auto* const operators = new Operators([] {
    Operators ids;
    for (const FastKernel& kernel : fast_kernels()) {
      const auto op = find_operator(kernel.op);
      if (op.has_value()) ids.emplace(kernel.op, op_id(*op));  // else not in this LibTorch
    }
    return ids;
  }());
  static std::array<OncePerDevice, 2> once;
  once[on_gpu ? 1 : 0](device, [&] {
    for (const auto& [name, id] : *operators) {
      if (find_fast_kernel(name)->runs_on(device, on_gpu))
        install_kernel(*find_operator(name), device);
    }
  });
  return *operators;
}

void install_matrix_products(c10::DeviceType device) {
  static OncePerDevice once;
  once(device, [&] {
    for (const auto& op : matrix_products()) install_kernel(op, device);
  });
}

void install_for_mixed(c10::DeviceType device) {
  static OncePerDevice once;
  once(device, [&] { install_mixed_kernels(device); });
}

void install_convolutions(c10::DeviceType device) {
  static OncePerDevice once;
  once(device, [&] {
    for (const auto& op : convolutions()) install_kernel(op, device);
  });
}

// So that their products stay out of fp8.
void install_recurrent_layers(c10::DeviceType device) {
  static OncePerDevice once;
  once(device, [&] {
    for (const std::string_view name : kRecurrent) {
      const auto found = aten_operators().find(std::string(name));
      if (found == aten_operators().end()) continue;
      for (const auto& op : found->second) install_kernel(op, device);
    }
  });
}

void use_fast_kernels(CompiledPolicy& policy, const std::set<std::string>& names, bool on_gpu) {
  if (names.empty()) return;
  const auto& operators = fast_operators(policy.device(), on_gpu);
  for (const std::string& name : names) {
    const auto id = operators.find(name);
    if (id != operators.end() && find_fast_kernel(name)->runs_on(policy.device(), on_gpu))
      policy.use_fast_kernel(id->second);
  }
}

// LibTorch's list for GPUs has the parts of cross_entropy_loss only. Semitone's kernel, which has
// no parts, returns what they do: fp32 if log_softmax does.
void follow_parts(CompiledPolicy& policy, const CastPolicy& of) {
  constexpr std::string_view kWhole = "cross_entropy_loss";
  const auto whole = of.find(kWhole);
  const auto part = of.find("log_softmax.int");
  if (!of.fast_kernels().contains(std::string(kWhole)) ||
      (whole.has_value() && whole->action != CastAction::leave) || !part.has_value() ||
      part->action != CastAction::fp32)
    return;
  policy.set_action(op_id(*find_operator(kWhole)), CastAction::fp32);
}

// The kernels of operators that have no row.
void install_kernels_without_rows(const CompiledPolicy& policy) {
  if (policy.lowers_mixed()) {
    install_for_mixed(policy.device());
  } else if (policy.emulates_any() || policy.fp8() != nullptr) {
    install_matrix_products(policy.device());
  } else if (policy.repairs()) {
    install_convolutions(policy.device());
  }
  if (policy.fp8() != nullptr) install_recurrent_layers(policy.device());
}

// Operators in these rows run in fp32 if they get a parameter that stays in fp32.
void keep_operators(CompiledPolicy& policy, const std::map<std::string, CastRow>& rows) {
  for (const auto& [name, row] : rows) {
    const auto op = find_operator(name);
    if (!op.has_value() || writes_to_argument(*op)) continue;  // the write would go to a copy
    policy.keep_operator(op_id(*op));
    install_kernel(*op, policy.device());
  }
}

}  // namespace

const CompiledPolicy::Actions& CastPolicy::Preset::actions(c10::DeviceType device) const {
  std::call_once(once, [&] {
    for (const auto& [name, row] : rows) {
      const auto op = find_operator(name);
      if (!op.has_value()) continue;  // a library that was unloaded since
      const OpId id = op_id(*op);
      if (id >= by_id.size()) by_id.resize(id + 1);
      by_id[id] = row.action;
      install_kernel(*op, device);
    }
  });
  return by_id;
}

std::shared_ptr<const CompiledPolicy> CastPolicy::compile() const {
  const c10::DeviceType device = target_.device;
  auto policy = std::make_shared<CompiledPolicy>(name_, target_, emulation_, preset_->as_libtorch);
  install_stock_kernels(device);
  policy->set_actions(preset_->actions(device));
  for (const auto& [name, row] : edits_) {
    const auto op = find_operator(name);
    if (!op.has_value()) continue;  // a library that was unloaded since
    policy->set_action(op_id(*op), row.action);
    install_kernel(*op, device);
  }
  use_fast_kernels(*policy, fast_kernels_, fast_kernels_on_gpu_);
  if (device != c10::DeviceType::CPU && fast_kernels_on_gpu_) follow_parts(*policy, *this);
  if (preset_->rows.empty()) policy->lower_mixed();
  policy->set_fp8(fp8_state_);
  install_kernels_without_rows(*policy);
  if (binding_ != nullptr) {
    for (const NamedParameter& named : *binding_) policy->add(named.parameter);
  }
  if (binding_ != nullptr && !globs_.empty()) {
    keep_operators(*policy, rows());
    keep_operators(*policy, semitone(target_).rows());
  }
  return policy;
}

std::shared_ptr<const CompiledPolicy> CastPolicy::compiled() const {
  std::call_once(compiled_->once, [this] { compiled_->policy = compile(); });
  return compiled_->policy;
}

}  // namespace semitone::amp
