#include "src/parallel/send_weights.h"

#include "semitone/core/dtype.h"
#include "src/core/exact_weights.h"

#include <torch/types.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

namespace semitone::parallel::detail {

void send_weights(const ModelTensors& model, const comm::Group& group, int root) {
  const at::NoGradGuard no_grad;
  const auto& parameters = model.parameters;
  std::vector<std::shared_ptr<ExactWeights>> holders(parameters.size());
  std::vector<at::Tensor> values(parameters.size());
  std::string exact(parameters.size(), '0');
  // All ranks have the same dtypes.
  const bool any_16bit = std::any_of(parameters.begin(), parameters.end(), [](const auto& entry) {
    return is_16bit(entry.tensor.scalar_type());
  });
  if (any_16bit) {
    std::vector<at::Tensor> tensors;
    tensors.reserve(parameters.size());
    for (const auto& entry : parameters) tensors.push_back(entry.tensor);
    values = exact_values_of(tensors);
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      if (!values[i].defined()) continue;
      holders[i] = exact_weights_of(parameters[i].tensor);
      exact[i] = '1';
    }
    exact = group.broadcast(std::move(exact), root);
  }
  std::vector<at::Tensor> sent;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& parameter = parameters[i].tensor;
    const bool has_value = values[i].defined();
    sent.push_back(exact[i] != '1' ? parameter.detach()
                   : has_value     ? values[i].detach()
                                   : at::empty_like(parameter.detach(), at::kFloat));
  }
  for (const auto& entry : model.buffers) sent.push_back(entry.tensor);
  group.broadcast(sent, root);
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& parameter = parameters[i].tensor;
    if (values[i].defined()) {
      holders[i]->set(parameter, exact[i] == '1' ? sent[i] : parameter.detach().to(at::kFloat));
    } else if (exact[i] == '1') {
      parameter.detach().copy_(sent[i]);
    }
  }
}

}  // namespace semitone::parallel::detail
