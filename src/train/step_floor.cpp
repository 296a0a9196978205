#include "src/train/step_floor.h"

#include "semitone/autocast/autocast.h"
#include "semitone/core/dtype.h"
#include "src/core/operator_inputs.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/function.h>
#include <torch/types.h>

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <limits>
#include <map>
#include <memory>
#include <numeric>
#include <string_view>
#include <utility>

namespace semitone::train {
namespace {

constexpr std::array<std::string_view, 7> kProducts{
    "aten::mm",          "aten::addmm",       "aten::bmm",
    "aten::baddbmm",     "aten::convolution", "aten::convolution_backward",
    "aten::_convolution"};
constexpr std::string_view kAttention = "aten::scaled_dot_product_attention";

// A product with the arguments of its first call.
struct Product {
  c10::OperatorHandle op;
  std::vector<c10::IValue> arguments;
  amp::AutocastState autocast;  // under which it ran, without casts
  std::int64_t calls = 0;
  double seconds = std::numeric_limits<double>::infinity();
};

struct RecordedCall;

struct StepRecord {
  std::map<std::string, Product> products;  // by signatures
  double attention_flops = 0;
  RecordedCall* innermost = nullptr;  // of the calls that run
};

thread_local StepRecord* step_record = nullptr;

std::string signature_of(const at::RecordFunction& record,
                         const std::vector<c10::IValue>& arguments) {
  std::string text = record.name();
  for (const c10::IValue& argument : arguments) {
    if (argument.isTensor() && argument.toTensor().defined()) {
      const at::Tensor& tensor = argument.toTensor();
      text += c10::str(' ', tensor.scalar_type(), tensor.sizes(), tensor.strides());
    } else {
      text += c10::str(' ', argument);
    }
  }
  return text;
}

// Two products in a forward pass, and five for the gradients, which a recomputation in the backward
// pass does not add again. Of each, what a causal mask leaves.
double attention_flops_of(const std::vector<c10::IValue>& arguments) {
  constexpr std::size_t kIsCausal = 5;
  const at::Tensor& query = arguments[0].toTensor();
  const at::Tensor& key = arguments[1].toTensor();
  const int products = torch::autograd::get_current_node() == nullptr ? 7 : 2;
  const auto flops =
      products * 2 * static_cast<double>(query.numel()) * static_cast<double>(key.size(-2));
  return arguments[kIsCausal].toBool() ? flops / 2 : flops;
}

// A call that runs. One that is made of others does not count.
struct RecordedCall : at::ObserverContext {
  std::vector<c10::IValue> arguments;
  RecordedCall* outer = nullptr;
  bool has_inner = false;
};

std::unique_ptr<at::ObserverContext> start(const at::RecordFunction& record) {
  if (step_record == nullptr) return nullptr;  // another thread, which works for this one
  const std::string_view name = record.name();
  if (name != kAttention && std::ranges::find(kProducts, name) == kProducts.end()) return nullptr;
  auto call = std::make_unique<RecordedCall>();
  const auto arguments = inputs_of(record);
  call->arguments.assign(arguments.begin(), arguments.end());
  call->outer = std::exchange(step_record->innermost, call.get());
  if (call->outer != nullptr) call->outer->has_inner = true;
  return call;
}

// Autocast casts arguments that the record has as they were given. Its results tell the dtype.
void cast_to_dtype_of_result(std::vector<c10::IValue>& arguments,
                             const at::RecordFunction& record) {
  const auto& results = record.outputs();
  if (results.empty() || !results[0].isTensor() || !results[0].toTensor().defined()) return;
  const auto dtype = results[0].toTensor().scalar_type();
  for (c10::IValue& argument : arguments) {
    if (argument.isTensor() && argument.toTensor().defined() &&
        argument.toTensor().is_floating_point())
      argument = argument.toTensor().detach().to(dtype);
  }
}

void end(const at::RecordFunction& record, at::ObserverContext* context) {
  auto* const call = static_cast<RecordedCall*>(context);
  if (call == nullptr) return;
  step_record->innermost = call->outer;
  if (call->has_inner) return;
  if (record.name() == kAttention) {
    step_record->attention_flops += attention_flops_of(call->arguments);
    return;
  }
  const std::string signature = signature_of(record, call->arguments);
  auto found = step_record->products.find(signature);
  if (found == step_record->products.end()) {
    const auto op = c10::Dispatcher::singleton().findOp(record.operator_name().value());
    if (!op.has_value()) return;
    const at::DisableRecordFunctionGuard not_recorded;
    cast_to_dtype_of_result(call->arguments, record);
    found = step_record->products
                .emplace(signature, Product{*op, std::move(call->arguments),
                                            amp::AutocastState::current().without_casts()})
                .first;
  }
  ++found->second.calls;
}

// Records the products of this thread.
class RecordScope {
 public:
  explicit RecordScope(StepRecord& record) {
    step_record = &record;
    handle_ = at::addThreadLocalCallback(at::RecordFunctionCallback(start, end)
                                             .needsInputs(true)
                                             .needsOutputs(true)
                                             .scopes({at::RecordScope::FUNCTION}));
  }
  ~RecordScope() {
    at::removeCallback(handle_);
    step_record = nullptr;
  }
  RecordScope(const RecordScope&) = delete;
  RecordScope& operator=(const RecordScope&) = delete;

 private:
  at::CallbackHandle handle_;
};

void time_once(Product& product) {
  using Clock = std::chrono::steady_clock;
  torch::jit::Stack stack = product.arguments;
  const auto scope = product.autocast.enter();
  const auto before = Clock::now();
  product.op.callBoxed(stack);
  const std::chrono::duration<double> spent = Clock::now() - before;
  product.seconds = std::min(product.seconds, spent.count());
}

std::string name_of(const Product& product) {
  std::string text = product.op.schema().operator_name().name;
  text.erase(0, text.find_first_not_of('_', text.find("::") + 2));
  std::string shapes;
  std::string dtype;
  for (const c10::IValue& argument : product.arguments) {
    if (!argument.isTensor() || !argument.toTensor().defined()) continue;
    const at::Tensor& tensor = argument.toTensor();
    if (dtype.empty()) dtype = dtype_name(tensor.scalar_type());
    shapes += c10::str(' ', tensor.sizes());
  }
  return fmt::format("{} {}{}", text, dtype, shapes);
}

// Of mm and addmm; 0 of others.
double flops_per_second(const Product& product) {
  const std::string& name = product.op.schema().operator_name().name;
  const std::size_t first = name == "aten::addmm" ? 1 : 0;
  if (name != "aten::mm" && name != "aten::addmm") return 0;
  const at::Tensor& left = product.arguments[first].toTensor();
  const at::Tensor& right = product.arguments[first + 1].toTensor();
  return 2 * static_cast<double>(left.numel()) * static_cast<double>(right.size(1)) /
         product.seconds;
}

}  // namespace

double StepFloor::seconds() const {
  return std::accumulate(products.begin(), products.end(), attention_seconds,
                         [](double sum, const Product& product) { return sum + product.total(); });
}

StepFloor measure_floor(Workload& workload, std::int64_t rounds) {
  StepRecord record;
  {
    const RecordScope scope(record);
    workload.run(1);
  }
  StepFloor floor;
  floor.step_seconds = std::numeric_limits<double>::infinity();
  for (std::int64_t round = 0; round < rounds; ++round) {
    floor.step_seconds = std::min(floor.step_seconds, workload.run(1));
    const at::NoGradGuard no_grad;
    for (auto& [signature, product] : record.products) {
      time_once(product);
      time_once(product);  // with its data in the caches
    }
  }
  double fastest = 0;
  for (const auto& [signature, product] : record.products) {
    floor.products.push_back({name_of(product), product.calls, product.seconds});
    fastest = std::max(fastest, flops_per_second(product));
  }
  if (fastest > 0) floor.attention_seconds = record.attention_flops / fastest;
  std::ranges::sort(floor.products, std::ranges::greater(), &StepFloor::Product::total);
  return floor;
}

}  // namespace semitone::train
