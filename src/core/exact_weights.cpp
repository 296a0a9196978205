#include "src/core/exact_weights.h"

#include "semitone/core/dtype.h"

#include <c10/core/GradMode.h>

#include <map>
#include <mutex>
#include <unordered_map>
#include <utility>

namespace semitone {
namespace {

struct Entry {
  std::weak_ptr<ExactWeights> holder;
  const ExactWeights* address;  // can be compared while the holder is destroyed
};

struct Table {
  std::mutex mutex;
  std::unordered_map<const c10::TensorImpl*, Entry> entries;

  // Never destroyed: holders may be destroyed after it.
  static Table& instance() {
    static auto* const table = new Table;
    return *table;
  }
};

}  // namespace

void announce_exact_weight(const at::Tensor& parameter, std::weak_ptr<ExactWeights> holder) {
  Table& table = Table::instance();
  const ExactWeights* const address = holder.lock().get();
  const std::lock_guard lock(table.mutex);
  table.entries.insert_or_assign(parameter.unsafeGetTensorImpl(),
                                 Entry{std::move(holder), address});
}

void withdraw_exact_weight(const at::Tensor& parameter, const ExactWeights* holder) noexcept {
  Table& table = Table::instance();
  const std::lock_guard lock(table.mutex);
  const auto found = table.entries.find(parameter.unsafeGetTensorImpl());
  if (found != table.entries.end() && found->second.address == holder) table.entries.erase(found);
}

std::shared_ptr<ExactWeights> exact_weights_of(const at::Tensor& parameter) {
  Table& table = Table::instance();
  const std::lock_guard lock(table.mutex);
  const auto found = table.entries.find(parameter.unsafeGetTensorImpl());
  return found == table.entries.end() ? nullptr : found->second.holder.lock();
}

std::vector<at::Tensor> exact_values_of(const std::vector<at::Tensor>& parameters) {
  // The parameters of each holder, and their places in the list.
  struct Share {
    std::vector<at::Tensor> parameters;
    std::vector<std::size_t> places;
  };
  std::map<std::shared_ptr<ExactWeights>, Share> shares;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& parameter = parameters[i];
    if (!parameter.defined() || !is_16bit(parameter.scalar_type())) continue;
    auto holder = exact_weights_of(parameter);
    if (holder == nullptr) continue;
    Share& share = shares[std::move(holder)];
    share.parameters.push_back(parameter);
    share.places.push_back(i);
  }
  std::vector<at::Tensor> values(parameters.size());
  for (const auto& [holder, share] : shares) {
    const std::vector<at::Tensor> found = holder->values_of(share.parameters);
    for (std::size_t i = 0; i < found.size(); ++i) values[share.places[i]] = found[i];
  }
  return values;
}

void settle_exact_weight(const at::Tensor& parameter) {
  if (!is_16bit(parameter.scalar_type())) return;
  const auto holder = exact_weights_of(parameter);
  if (holder == nullptr || !holder->value_of(parameter).defined()) return;
  const at::NoGradGuard no_grad;
  holder->set(parameter, parameter.detach().to(at::kFloat));
}

}  // namespace semitone
