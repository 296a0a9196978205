#include "src/autocast/dispatch.h"

#include "src/autocast/cast_kernel.h"
#include "src/autocast/emulation.h"
#include "src/autocast/op_names.h"
#include "src/autocast/operator_lists.h"
#include "src/autocast/presets/presets.h"
#include "src/autocast/watching_kernels.h"

#include <ATen/autocast_mode.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>

namespace semitone::amp {
namespace {

// LibTorch warns, once per process, that a kernel is overridden, which is intended here.
struct Silence : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

std::vector<std::string> aten_operators_with_kernel(c10::DispatchKey key) {
  std::vector<std::string> names;
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getRegistrationsForDispatchKey(key)) {
    if (is_aten(name) && dispatcher.findSchema(name).has_value())
      names.push_back(display_name(name));
  }
  std::sort(names.begin(), names.end());
  return names;
}

std::vector<c10::OperatorHandle> operators_of_16bit_models() {
  std::vector<c10::OperatorHandle> operators;
  const auto add = [&](std::string_view name) {
    const auto found = aten_operators().find(std::string(name));
    if (found == aten_operators().end()) return;  // not in this version of LibTorch
    std::copy_if(found->second.begin(), found->second.end(), std::back_inserter(operators),
                 [](const c10::OperatorHandle& op) { return !writes_to_argument(op); });
  };
  for (const std::string_view name : kWidensMixed) add(name);
  for (const std::string_view name : kLack16Bits) add(name);
  for (const std::string_view name : kFollowWeights) add(name);
  for (const std::string_view name : presets::without_16bit_kernels()) add(name);
  return operators;
}

c10::KernelFunction make_kernel(const c10::OperatorHandle& op, OpId id, c10::DeviceType device,
                                c10::DispatchKey key) {
  const bool is_watched = std::find(kWatched.begin(), kWatched.end(),
                                    display_name(op.operator_name())) != kWatched.end();
  return is_watched ? make_watching_kernel(op, id, device, key)
                    : make_cast_kernel(op, id, device, key);
}

class Registry {
 public:
  // Never destroyed: kernels may be called while the process ends.
  static Registry& instance() {
    static auto* const registry = new Registry;
    return *registry;
  }

  OpId id(const c10::OperatorHandle& op) {
    const std::lock_guard lock(mutex_);
    return id_locked(op);
  }

  const std::vector<std::string>& stock(c10::DeviceType device) {
    const std::lock_guard lock(mutex_);
    return stock_locked(device);
  }

  void install_stock(c10::DeviceType device) {
    const std::lock_guard lock(mutex_);
    if (!stock_installed_.insert(device).second) return;
    install_fallback_locked(device);
    for (const std::string& name : stock_locked(device)) {
      if (const auto op = find_operator(name)) install_locked(*op, device);
    }
    for (const std::string_view name : kScriptCasts) {
      if (const auto op = find_operator(name)) install_locked(*op, device);
    }
    for (const std::string_view name : kWatched) {
      if (const auto op = find_operator(name)) install_locked(*op, device);
    }
  }

  void install(const c10::OperatorHandle& op, c10::DeviceType device) {
    const std::lock_guard lock(mutex_);
    stock_locked(device);  // before the first kernel of Semitone replaces one
    install_locked(op, device);
  }

 private:
  OpId id_locked(const c10::OperatorHandle& op) {
    return ids_.emplace(op.operator_name(), static_cast<OpId>(ids_.size())).first->second;
  }

  const std::vector<std::string>& stock_locked(c10::DeviceType device) {
    const auto found = stock_.find(device);
    if (found != stock_.end()) return found->second;
    const auto key = at::autocast::get_autocast_dispatch_key_from_device_type(device);
    auto names = aten_operators_with_kernel(key);
    if (names.empty() && device != c10::DeviceType::CUDA) names = stock_locked(at::kCUDA);
    return stock_.emplace(device, std::move(names)).first->second;
  }

  // LibTorch has neither a list nor a fallback for a device type of another library. An operator
  // without a row then has no kernel on the Autocast key, and a region would end with its call.
  void install_fallback_locked(c10::DeviceType device) {
    const auto key = at::autocast::get_autocast_dispatch_key_from_device_type(device);
    auto& dispatcher = c10::Dispatcher::singleton();
    if (dispatcher.hasBackendFallbackForDispatchKey(key)) return;
    fallbacks_.push_back(dispatcher.registerFallback(key, c10::KernelFunction::makeFallthrough(),
                                                     "semitone autocast"));
  }

  void install_locked(const c10::OperatorHandle& op, c10::DeviceType device) {
    const OpId id = id_locked(op);
    if (installed_.count({id, device}) > 0) return;
    const auto key = at::autocast::get_autocast_dispatch_key_from_device_type(device);
    Silence silence;
    const c10::WarningUtils::WarningHandlerGuard guard(&silence);
    installed_.emplace(std::pair(id, device),
                       c10::Dispatcher::singleton().registerImpl(
                           op.operator_name(), key, make_kernel(op, id, device, key), std::nullopt,
                           nullptr, "semitone autocast"));
  }

  std::mutex mutex_;
  std::unordered_map<c10::OperatorName, OpId> ids_;
  std::map<c10::DeviceType, std::vector<std::string>> stock_;
  std::set<c10::DeviceType> stock_installed_;
  std::vector<c10::RegistrationHandleRAII> fallbacks_;
  std::map<std::pair<OpId, c10::DeviceType>, c10::RegistrationHandleRAII> installed_;
};

}  // namespace

OpId op_id(const c10::OperatorHandle& op) {
  return Registry::instance().id(op);
}

void install_stock_kernels(c10::DeviceType device) {
  Registry::instance().install_stock(device);
}

void install_kernel(const c10::OperatorHandle& op, c10::DeviceType device) {
  Registry::instance().install(op, device);
}

void install_mixed_kernels(c10::DeviceType device) {
  for (const auto& op : matrix_products()) install_kernel(op, device);
  for (const auto& op : operators_of_16bit_models()) install_kernel(op, device);
}

const std::vector<std::string>& stock_operators(c10::DeviceType device) {
  return Registry::instance().stock(device);
}

}  // namespace semitone::amp
