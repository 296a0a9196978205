#include "semitone/amp/cast_policy.h"

#include "semitone/core/device.h"
#include "semitone/core/dtype.h"
#include "semitone/core/error.h"
#include "semitone/core/nearest.h"
#include "src/amp/compiled_policy.h"
#include "src/amp/dispatch.h"
#include "src/amp/emulation.h"
#include "src/amp/fast_kernels.h"
#include "src/amp/op_names.h"
#include "src/amp/presets/presets.h"

#include <ATen/autocast_mode.h>
#include <c10/util/FunctionRef.h>

#include <fnmatch.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace semitone::amp {

std::string_view name_of(CastAction action) {
  switch (action) {
    case CastAction::lower:
      return "lower";
    case CastAction::fp32:
      return "fp32";
    case CastAction::promote:
      return "promote";
    case CastAction::widest:
      return "widest";
    case CastAction::leave:
      return "leave";
    case CastAction::ban:
      return "ban";
  }
  return "";
}

CastTarget::CastTarget() : CastTarget(default_device()) {}
CastTarget::CastTarget(c10::DeviceType device_type)
    : CastTarget(device_type, default_16bit_dtype(device_type)) {}
CastTarget::CastTarget(c10::ScalarType lower_dtype) : CastTarget(default_device(), lower_dtype) {}
CastTarget::CastTarget(c10::DeviceType device_type, c10::ScalarType lower_dtype)
    : device(device_type), dtype(lower_dtype) {
  if (!is_16bit(dtype)) {
    throw Error("amp.cast_policy", "float16 or bfloat16 to lower to", dtype_name(dtype),
                "for fp32 omit the region, or construct it with enabled = false");
  }
  if (!at::autocast::is_autocast_available(device)) {
    throw Error("amp.cast_policy", "a device type that LibTorch has autocast for",
                c10::DeviceTypeName(device, true));
  }
}

struct CastPolicy::NamedParameter {
  std::string name;
  BoundParameter parameter;
};

struct CastPolicy::Preset {
  Rows rows;
  bool as_libtorch;  // of preset torch: raises where LibTorch raises

  // Compiles the actions by OpId, with the operators' kernels installed on a device. Always the
  // same object.
  const CompiledPolicy::Actions& actions(c10::DeviceType device) const {
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

  mutable std::once_flag once;
  mutable CompiledPolicy::Actions by_id;
};

struct CastPolicy::Compiled {
  std::once_flag once;
  std::shared_ptr<const CompiledPolicy> policy;
  std::once_flag rows_once;
  Rows rows;  // the preset's with the edits
};

CastPolicy::CastPolicy(std::string name, CastTarget target, std::shared_ptr<const Preset> preset)
    : name_(std::move(name)),
      target_(target),
      preset_(std::move(preset)),
      compiled_(std::make_shared<Compiled>()) {}

void CastPolicy::edited() {
  compiled_ = std::make_shared<Compiled>();
}

class PolicyBuilder {
 public:
  using Rows = CastPolicy::Rows;

  static Rows rows(std::span<const presets::Rows> table) {
    Rows rows;
    for (const presets::Rows& group : table) {
      for (const std::string_view op : group.ops) add(rows, op, group.action);
    }
    return rows;
  }

  // Like rows, for a table with complete names: "prod" is only the overload without a name. Keeps
  // the operators for which LibTorch has a kernel.
  static Rows exact_rows(c10::DeviceType device, std::span<const presets::Rows> table) {
    Rows rows;
    const auto& stock = stock_operators(device);
    const std::set<std::string_view> registered(stock.begin(), stock.end());
    for (const presets::Rows& group : table) {
      for (const std::string_view op : group.ops) {
        if (registered.count(op) > 0) insert(rows, std::string(op), group.action);
      }
    }
    return rows;
  }

  static CastPolicy policy(std::string_view name, CastTarget target, Rows rows,
                           bool as_libtorch = false) {
    auto preset = std::make_shared<CastPolicy::Preset>();
    preset->rows = std::move(rows);
    preset->as_libtorch = as_libtorch;
    return {std::string(name), target, std::move(preset)};
  }

 private:
  static void add(Rows& rows, std::string_view name, CastAction action) {
    const auto found = aten_operators().find(std::string(name));
    if (found == aten_operators().end()) return;  // not in this version of LibTorch
    const bool only_writing =
        std::all_of(found->second.begin(), found->second.end(), writes_to_argument);
    for (const auto& op : found->second) {
      if (only_writing || !writes_to_argument(op))
        insert(rows, display_name(op.operator_name()), action);
    }
  }

  static void insert(Rows& rows, const std::string& name, CastAction action) {
    rows[name] = {action, std::string(presets::reason(action, name.substr(0, name.find('.'))))};
  }
};

namespace {

// Presets are made once for each target, and their copies share the compiled form, since a program
// may construct one at every step.
CastPolicy preset(std::string_view name, CastTarget target, c10::function_ref<CastPolicy()> build) {
  using Key = std::tuple<std::string_view, c10::DeviceType, c10::ScalarType>;
  static std::mutex mutex;
  static auto* const made = new std::map<Key, CastPolicy>;
  const std::lock_guard lock(mutex);
  const Key key(name, target.device, target.dtype);
  const auto found = made->find(key);
  return found != made->end() ? found->second : made->emplace(key, build()).first->second;
}

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

// The operators of fast kernels by name, installed on a device.
const std::map<std::string_view, OpId>& fast_operators(c10::DeviceType device) {
  using Operators = std::map<std::string_view, OpId>;
  static const auto* const operators = new Operators([] {
    Operators ids;
    for (const FastKernel& kernel : fast_kernels()) {
      const auto op = find_operator(kernel.op);
      if (op.has_value()) ids.emplace(kernel.op, op_id(*op));  // else not in this LibTorch
    }
    return ids;
  }());
  static OncePerDevice once;
  once(device, [&] {
    for (const auto& [name, id] : *operators) install_kernel(*find_operator(name), device);
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

}  // namespace

CastPolicy CastPolicy::semitone(CastTarget target) {
  return preset("semitone", target, [target] {
    CastPolicy policy = PolicyBuilder::policy(
        "semitone", target,
        target.device == c10::DeviceType::CPU
            ? PolicyBuilder::rows(presets::semitone_cpu())
            : PolicyBuilder::exact_rows(target.device, presets::torch_cuda()));
    return policy.fast_kernels(true);
  });
}

CastPolicy CastPolicy::torch(CastTarget target) {
  return preset("torch", target, [target] {
    const bool on_cpu = target.device == c10::DeviceType::CPU;
    return PolicyBuilder::policy(
        "torch", target,
        PolicyBuilder::exact_rows(target.device,
                                  on_cpu ? presets::torch_cpu() : presets::torch_cuda()),
        /*as_libtorch=*/true);
  });
}

CastPolicy CastPolicy::apex(CastTarget target) {
  return preset("apex", target, [target] {
    return PolicyBuilder::policy("apex", target, PolicyBuilder::rows(presets::apex()));
  });
}

CastPolicy CastPolicy::paddle(CastTarget target, PaddleLevel level) {
  const bool first = level == PaddleLevel::O1;
  const char* const name = first ? "paddle" : "paddle-o2";
  return preset(name, target, [&] {
    return PolicyBuilder::policy(
        name, target, PolicyBuilder::rows(first ? presets::paddle_o1() : presets::paddle_o2()));
  });
}

CastPolicy CastPolicy::none(CastTarget target) {
  return preset("none", target,
                [target] { return PolicyBuilder::policy("none", target, {}).fast_kernels(true); });
}

CastPolicy CastPolicy::by_name(std::string_view name, CastTarget target) {
  if (name == "semitone") return semitone(target);
  if (name == "torch") return torch(target);
  if (name == "apex") return apex(target);
  if (name == "paddle") return paddle(target);
  if (name == "paddle-o2") return paddle(target, PaddleLevel::O2);
  if (name == "none") return none(target);
  throw Error("amp.cast_policy", "semitone, torch, apex, paddle, paddle-o2 or none",
              "'" + std::string(name) + "'");
}

CastPolicy& CastPolicy::set(std::string_view op, CastAction action, std::string_view reason) {
  Rows edits = edits_;
  for (const auto& handle : resolve_operators(op, "amp.cast_policy")) {
    const std::string name = display_name(handle.operator_name());
    if (writes_to_argument(handle) && action != CastAction::ban && action != CastAction::leave) {
      throw Error("amp.cast_policy", "an out-of-place operator",
                  "'" + name + "', which writes to its argument",
                  "name the out-of-place form; in-place operators accept only ban() and leave()");
    }
    edits[name] = {action, std::string(reason)};
  }
  edits_ = std::move(edits);
  edited();
  return *this;
}

CastPolicy& CastPolicy::lower(std::string_view op, std::string_view reason) {
  return set(op, CastAction::lower, reason);
}
CastPolicy& CastPolicy::keep_fp32(std::string_view op, std::string_view reason) {
  return set(op, CastAction::fp32, reason);
}
CastPolicy& CastPolicy::promote(std::string_view op, std::string_view reason) {
  return set(op, CastAction::promote, reason);
}
CastPolicy& CastPolicy::widest(std::string_view op, std::string_view reason) {
  return set(op, CastAction::widest, reason);
}
CastPolicy& CastPolicy::leave(std::string_view op, std::string_view reason) {
  return set(op, CastAction::leave, reason);
}
CastPolicy& CastPolicy::ban(std::string_view op, std::string_view reason) {
  return set(op, CastAction::ban, reason);
}

void CastPolicy::keep_matching(Binding& binding, const std::string& glob) {
  bool matched = false;
  std::vector<std::string> names;
  for (NamedParameter& named : binding) {
    names.push_back(named.name);
    if (fnmatch(glob.c_str(), named.name.c_str(), 0) != 0) continue;
    named.parameter.keep_fp32 = true;
    matched = true;
  }
  if (matched) return;
  const std::string near = nearest(glob, names);
  throw Error("amp.cast_policy.bind", "a parameter that matches '" + glob + "'",
              "none among " + std::to_string(names.size()) + " parameters",
              near.empty() ? (names.empty() ? "" : "the first is called '" + names.front() + "'")
                           : "did you mean " + near + "?");
}

CastPolicy& CastPolicy::keep_fp32_params(std::string_view glob) {
  if (glob.empty()) throw Error("amp.cast_policy", "a glob of parameter names", "an empty one");
  if (binding_ != nullptr) {
    auto binding = std::make_shared<Binding>(*binding_);
    keep_matching(*binding, std::string(glob));
    binding_ = std::move(binding);
  }
  globs_.emplace_back(glob);
  edited();
  return *this;
}

CastPolicy& CastPolicy::emulation(Emulation value) {
  emulation_ = value;
  edited();
  return *this;
}

CastPolicy& CastPolicy::fast_kernel(std::string_view op, bool on) {
  const std::string name = display_name(op);
  if (find_fast_kernel(name) == nullptr) {
    std::string supported;
    for (const FastKernel& kernel : amp::fast_kernels())
      supported.append(supported.empty() ? "" : ", ").append(kernel.op);
    throw Error("amp.cast_policy", "an operator with a fast kernel", "'" + name + "'",
                "the operators with fast kernels are " + supported);
  }
  if (on) {
    fast_kernels_.insert(name);
  } else {
    fast_kernels_.erase(name);
  }
  edited();
  return *this;
}

CastPolicy& CastPolicy::fast_kernels(bool on) {
  fast_kernels_.clear();
  if (on) {
    for (const FastKernel& kernel : amp::fast_kernels()) fast_kernels_.emplace(kernel.op);
  }
  edited();
  return *this;
}

bool CastPolicy::keeps_fp32(const at::Tensor& parameter) const {
  return compiled()->keeps_fp32(parameter);
}

CastPolicy CastPolicy::with_target(CastTarget target) const {
  CastPolicy policy = *this;
  policy.target_ = target;
  if (target.device != target_.device) policy.preset_ = by_name(name_, target).preset_;
  policy.edited();
  return policy;
}

std::optional<CastRow> CastPolicy::find(std::string_view op) const {
  const std::string name = display_name(op);
  for (const Rows* rows : {&edits_, &preset_->rows}) {
    const auto found = rows->find(name);
    if (found != rows->end()) return found->second;
  }
  return std::nullopt;
}

const CastPolicy::Rows& CastPolicy::rows() const {
  if (edits_.empty()) return preset_->rows;
  std::call_once(compiled_->rows_once, [this] {
    compiled_->rows = preset_->rows;
    for (const auto& [name, row] : edits_) compiled_->rows[name] = row;
  });
  return compiled_->rows;
}

CastPolicy CastPolicy::bind(const Model& model) const {
  return bind(std::vector<Model>{model});
}

CastPolicy CastPolicy::bind(const std::vector<Model>& models) const {
  auto binding = std::make_shared<Binding>();
  for (const Model& model : models) {
    for (const Model::Entry& entry : model.entries()) {
      if (entry.is_parameter) binding->push_back({entry.name, BoundParameter(entry.tensor, false)});
    }
  }
  for (const std::string& glob : globs_) keep_matching(*binding, glob);
  CastPolicy bound = *this;
  bound.binding_ = std::move(binding);
  bound.edited();
  return bound;
}

std::shared_ptr<const CompiledPolicy> CastPolicy::compiled() const {
  std::call_once(compiled_->once, [this] {
    const c10::DeviceType device = target_.device;
    auto policy =
        std::make_shared<CompiledPolicy>(name_, target_, emulation_, preset_->as_libtorch);
    install_stock_kernels(device);
    policy->set_actions(preset_->actions(device));
    for (const auto& [name, row] : edits_) {
      const auto op = find_operator(name);
      if (!op.has_value()) continue;  // a library that was unloaded since
      policy->set_action(op_id(*op), row.action);
      install_kernel(*op, device);
    }
    if (device == c10::DeviceType::CPU && !fast_kernels_.empty()) {
      const auto& operators = fast_operators(device);
      for (const std::string& name : fast_kernels_) {
        const auto id = operators.find(name);
        if (id != operators.end()) policy->use_fast_kernel(id->second);
      }
    }
    if (preset_->rows.empty()) policy->lower_mixed();
    if (policy->lowers_mixed()) {
      install_for_mixed(device);
    } else if (policy->emulates_any()) {
      install_matrix_products(device);
    } else if (policy->repairs()) {
      install_convolutions(device);
    }
    if (binding_ != nullptr) {
      for (const NamedParameter& named : *binding_) policy->add(named.parameter);
    }
    if (binding_ != nullptr && !globs_.empty()) {
      const auto keep = [&](const Rows& rows) {
        for (const auto& [name, row] : rows) {
          const auto op = find_operator(name);
          if (!op.has_value() || writes_to_argument(*op)) continue;  // the write would go to a copy
          policy->keep_operator(op_id(*op));
          install_kernel(*op, device);
        }
      };
      keep(rows());
      keep(semitone(target_).rows());
    }
    compiled_->policy = std::move(policy);
  });
  return compiled_->policy;
}

}  // namespace semitone::amp
