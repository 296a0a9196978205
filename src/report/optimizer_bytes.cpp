#include "src/report/optimizer_bytes.h"

#include <torch/serialize/archive.h>

#include <memory>
#include <string>

namespace semitone::report {
namespace {

// LibTorch's states do not list their tensors, but save and load them by name.
std::int64_t state_bytes(const torch::optim::OptimizerParamState& state) {
  std::string saved;
  {
    torch::serialize::OutputArchive archive;
    state.serialize(archive);
    archive.save_to([&](const void* data, std::size_t size) {
      saved.append(static_cast<const char*>(data), size);
      return size;
    });
  }
  torch::serialize::InputArchive archive;
  archive.load_from(saved.data(), saved.size());
  std::int64_t bytes = 0;
  for (const std::string& key : archive.keys()) {
    c10::IValue value;
    if (!archive.try_read(key, value) || !value.isTensor()) continue;
    const at::Tensor& tensor = value.toTensor();
    if (tensor.defined()) bytes += static_cast<std::int64_t>(tensor.nbytes());
  }
  return bytes;
}

}  // namespace

std::int64_t OptimizerBytes::bytes() {
  const auto& states = optimizer_.state();
  if (parameters_ == states.size()) return bytes_;
  bytes_ = 0;
  for (const auto& [parameter, state] : states)
    if (state != nullptr) bytes_ += state_bytes(*state);
  parameters_ = states.size();
  return bytes_;
}

}  // namespace semitone::report
