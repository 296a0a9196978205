#include "src/train/step_floor.h"

#include "semitone/autocast/autocast.h"
#include "semitone/core/dtype.h"
#include "src/core/operator_inputs.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <torch/types.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

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

// A call with the arguments of its first occurrence.
struct Call {
  c10::OperatorHandle op;
  std::vector<c10::IValue> arguments;
  amp::AutocastState autocast;  // under which it ran, without casts
  std::int64_t calls = 0;
  double seconds = std::numeric_limits<double>::infinity();
};

struct Recorded;

struct Recording {
  std::map<std::string, Call> calls;  // by signatures
  double attention_flops = 0;
  Recorded* innermost = nullptr;  // of the calls that run
};

thread_local Recording* recording = nullptr;

std::string signature_of(const at::RecordFunction& record,
                         c10::ArrayRef<const c10::IValue> arguments) {
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

// Two products forward and five backward, for what a causal mask leaves.
double attention_flops_of(const std::vector<c10::IValue>& arguments) {
  constexpr std::size_t kIsCausal = 5;
  const at::Tensor& query = arguments[0].toTensor();
  const at::Tensor& key = arguments[1].toTensor();
  const auto flops = 7 * 2 * static_cast<double>(query.numel()) * static_cast<double>(key.size(-2));
  return arguments[kIsCausal].toBool() ? flops / 2 : flops;
}

// A call that runs. One that is made of others does not count. If autocast will cast the arguments,
// they are cast here.
struct Recorded : at::ObserverContext {
  Recorded(const at::RecordFunction& record, c10::ArrayRef<const c10::IValue> given)
      : signature(signature_of(record, given)),
        arguments(given.begin(), given.end()),
        outer(std::exchange(recording->innermost, this)) {
    if (outer != nullptr) outer->has_inner = true;
    if (!amp::autocast_enabled(c10::DeviceType::CPU)) return;
    const at::DisableRecordFunctionGuard not_recorded;
    for (c10::IValue& argument : arguments) {
      if (argument.isTensor() && argument.toTensor().defined() &&
          argument.toTensor().scalar_type() == at::kFloat)
        argument = argument.toTensor().detach().to(amp::autocast_dtype(c10::DeviceType::CPU));
    }
  }

  std::string signature;
  std::vector<c10::IValue> arguments;
  Recorded* outer;
  bool has_inner = false;
};

std::unique_ptr<at::ObserverContext> start(const at::RecordFunction& record) {
  const std::string_view name = record.name();
  if (name != kAttention && std::ranges::find(kProducts, name) == kProducts.end()) return nullptr;
  return std::make_unique<Recorded>(record, inputs_of(record));
}

void end(const at::RecordFunction& record, at::ObserverContext* context) {
  auto* const call = static_cast<Recorded*>(context);
  if (call == nullptr) return;
  recording->innermost = call->outer;
  if (call->has_inner) return;
  if (record.name() == kAttention) {
    recording->attention_flops += attention_flops_of(call->arguments);
  } else if (const auto op = c10::Dispatcher::singleton().findOp(record.operator_name().value())) {
    const auto counted = recording->calls.try_emplace(
        std::move(call->signature),
        Call{*op, std::move(call->arguments), amp::AutocastState::current().without_casts()});
    ++counted.first->second.calls;
  }
}

// Records the products of this thread.
class Recorder {
 public:
  explicit Recorder(Recording& to) {
    recording = &to;
    handle_ = at::addThreadLocalCallback(at::RecordFunctionCallback(start, end)
                                             .needsInputs(true)
                                             .scopes({at::RecordScope::FUNCTION}));
  }
  ~Recorder() {
    at::removeCallback(handle_);
    recording = nullptr;
  }
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;

 private:
  at::CallbackHandle handle_;
};

void time_once(Call& call) {
  using Clock = std::chrono::steady_clock;
  torch::jit::Stack stack = call.arguments;
  const auto scope = call.autocast.enter();
  const auto before = Clock::now();
  call.op.callBoxed(stack);
  const std::chrono::duration<double> spent = Clock::now() - before;
  call.seconds = std::min(call.seconds, spent.count());
}

std::string name_of(const Call& call) {
  std::string text = call.op.schema().operator_name().name;
  text.erase(0, text.find_first_not_of('_', text.find("::") + 2));
  std::string shapes;
  std::string dtype;
  for (const c10::IValue& argument : call.arguments) {
    if (!argument.isTensor() || !argument.toTensor().defined()) continue;
    const at::Tensor& tensor = argument.toTensor();
    if (dtype.empty()) dtype = dtype_name(tensor.scalar_type());
    shapes += c10::str(' ', tensor.sizes());
  }
  return fmt::format("{} {}{}", text, dtype, shapes);
}

// Of mm and addmm; 0 of others.
double flops_per_second(const Call& call) {
  const std::string& name = call.op.schema().operator_name().name;
  const std::size_t first = name == "aten::addmm" ? 1 : 0;
  if (name != "aten::mm" && name != "aten::addmm") return 0;
  const at::Tensor& left = call.arguments[first].toTensor();
  const at::Tensor& right = call.arguments[first + 1].toTensor();
  return 2 * static_cast<double>(left.numel()) * static_cast<double>(right.size(1)) / call.seconds;
}

}  // namespace

double StepFloor::seconds() const {
  return std::accumulate(products.begin(), products.end(), attention_seconds,
                         [](double sum, const Product& product) { return sum + product.total(); });
}

StepFloor measure_floor(Workload& workload, std::int64_t rounds) {
  Recording seen;
  {
    const Recorder recorder(seen);
    workload.run(1);
  }
  StepFloor floor;
  floor.step_seconds = std::numeric_limits<double>::infinity();
  for (std::int64_t round = 0; round < rounds; ++round) {
    floor.step_seconds = std::min(floor.step_seconds, workload.run(1));
    const at::NoGradGuard no_grad;
    for (auto& [signature, call] : seen.calls) {
      time_once(call);
      time_once(call);  // with its data in the caches
    }
  }
  double fastest = 0;
  for (const auto& [signature, call] : seen.calls) {
    floor.products.push_back({name_of(call), call.calls, call.seconds});
    fastest = std::max(fastest, flops_per_second(call));
  }
  if (fastest > 0) floor.attention_seconds = seen.attention_flops / fastest;
  std::ranges::sort(floor.products, std::ranges::greater(), &StepFloor::Product::total);
  return floor;
}

}  // namespace semitone::train
