#pragma once

#include "semitone/core/map_tensors.h"
#include "semitone/parallel/detail/replica_sync.h"
#include "semitone/parallel/detail/replicas.h"
#include "semitone/parallel/detail/wrapped_model.h"

#include <c10/core/Device.h>
#include <torch/arg.h>
#include <torch/csrc/jit/api/module.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace semitone::parallel {

/// Options of DataParallel.
class DataParallelOptions {
  /// One replica per entry. All devices have one type, and the first is the model's. A device may
  /// appear several times. Default: the model's device and all others of its type, that is every
  /// GPU for a model on a GPU.
  TORCH_ARG(std::vector<c10::Device>, device_ids);
  /// Number of replicas on the model's own device, instead of device_ids. On a CPU they are
  /// threads.
  TORCH_ARG(std::optional<int>, replicas);
  /// The device of the results. Default: the model's device.
  TORCH_ARG(std::optional<c10::Device>, output_device);
  /// The dimension, counted from 0, along which batches are split and results concatenated.
  TORCH_ARG(std::int64_t, dim) = 0;
};

/// Runs a model on several devices of one process, each with its share of the batch, as
/// torch.nn.DataParallel does.
///
///     Net model;                                  // a torch::nn::Cloneable
///     model->to(torch::Device("cuda:0"));
///     parallel::DataParallel replicas(model);     // on all GPUs
///     torch::optim::SGD optimizer(model->parameters(), 0.1);
///     for (auto& batch : *loader) {
///       optimizer.zero_grad();
///       loss_of(replicas.forward(batch.data), batch.target).backward();
///       optimizer.step();
///     }
///
/// It is a handle on the model, not a copy. Optimizers, amp::initialize (before or after) and
/// checkpoints use the model itself, and gradients arrive there. `*replicas` is the model.
/// DistributedDataParallel is faster, also on one machine: here each forward copies the weights,
/// and on a CPU one thread runs the whole backward pass.
///
/// A forward
/// - splits every tensor of the arguments, nested ones too (see map_tensors), along `dim` as
///   torch::chunk does: into parts of equal size, of which the last may be smaller. A batch with
///   fewer rows than replicas uses fewer replicas. All tensors must have the same extent in that
///   dimension. Tensors without dimensions, and arguments that are not tensors, go to all replicas.
/// - copies the model (torch::nn::Module::clone) for all replicas except the first, which is the
///   model itself. Writes of a forward to buffers (running statistics) or members therefore persist
///   in the first replica only; in the others they are lost. The first replica gets the first part
///   of the batch. The copies have no hooks on their parameters. BatchNorm layers that
///   convert_sync_batchnorm has converted are ordinary ones there: they use the statistics of their
///   own part of the batch.
/// - runs the replicas in threads, with the caller's autocast region, grad mode, inference mode,
///   event listeners, and current stream of each device. CPU replicas divide the caller's intra-op
///   threads among themselves and share the random generator, so random layers differ from run to
///   run, and nn::checkpoint refuses them. Objects that the copies share, such as an object behind a pointer, are used by several
///   threads at the same time.
/// - concatenates the tensors of the results along `dim` on the output device. Other values are the
///   first replica's. Tensors without dimensions, such as losses, become a vector with one element
///   per replica. The mean of this vector weights replicas equally, so it is the mean over the
///   batch only if all parts have the same number of rows. Return losses by row, or sums, if that
///   matters.
///
/// With one device the model is called directly on the whole batch, and losses keep their shape.
///
/// An exception in a replica propagates when all replicas have ended, with the replica's number and
/// device. If several replicas throw, the first replica's exception propagates. LibTorch's errors
/// keep their type, and number and device are added to their context. Other exceptions become an
/// Error with the original nested in it.
///
/// The constructor throws Error for devices of different types, missing devices, a first device
/// that is not the model's, both device_ids and replicas, and a model that cannot be cloned. It and
/// forward throw Error for a layer whose weight is tied to another layer's by assignment
/// (`decoder->weight = embed->weight`), since clones lose the tie: share the weight in forward,
/// torch::linear(x, embed->weight). forward throws Error for arguments without a tensor to split,
/// tensors whose extents differ or that lack the dimension, a model that has moved, and results that
/// are tensors in some replicas only. A warning is logged if one GPU has less than 75 % of another's
/// memory or multiprocessors.
///
/// Use it from one thread at a time.
///
/// @tparam Model  a module holder (Net), a std::shared_ptr to a module, or torch::jit::Module. A
/// module object is taken by reference and must outlive this object.
template <typename Model>
class DataParallel : public detail::WrappedModel<Model> {
 public:
  explicit DataParallel(Model model, const DataParallelOptions& options = {})
      : detail::WrappedModel<Model>(std::move(model)),
        plan_(detail::tensors_of(this->module()), options) {
    const std::size_t two = 2;
    detail::replicate(
        this->module(), plan_,
        std::min(two, plan_.devices.size()));  // checks that the model can be replicated
  }

  /// Runs the model's forward on all replicas. Arguments are copied for each replica. Results are
  /// tensors in any containers, or void. A TorchScript module takes IValues, or arguments that
  /// convert to them.
  template <typename... Arguments>
  auto forward(const Arguments&... arguments) {
    using Output = std::decay_t<decltype(this->call(this->module(), arguments...))>;
    detail::BatchCut cut(plan_);
    const auto look = [&](const at::Tensor& tensor) {
      cut.look_at(tensor);
      return tensor;
    };
    (static_cast<void>(map_tensors(arguments, look)), ...);
    const std::size_t count = cut.parts();

    std::vector<std::tuple<semitone::detail::Mapped<const Arguments&>...>> inputs;
    for (std::size_t replica = 0; replica < count; ++replica) {
      const auto part = [&](const at::Tensor& tensor) { return cut.part(tensor, replica); };
      inputs.emplace_back(map_tensors(arguments, part)...);
    }
    auto replicas = detail::replicate(this->module(), plan_, count);
    const auto run = [&](std::size_t replica) {
      auto& one = replica == 0 ? this->module() : as_module(replicas.copies[replica - 1]);
      return std::apply([&](const auto&... input) { return this->call(one, input...); },
                        inputs[replica]);
    };
    if constexpr (std::is_void_v<Output>) {
      if (plan_.devices.size() == 1) return run(0);
      detail::run_replicas(plan_, count, replicas.parameters,
                           [&](std::size_t replica) { run(replica); });
    } else {
      if (plan_.devices.size() == 1) return to_output_device(run(0));
      std::vector<std::optional<Output>> results(count);
      detail::run_replicas(plan_, count, replicas.parameters,
                           [&](std::size_t replica) { results[replica] = run(replica); });
      std::vector<Output> outputs;
      outputs.reserve(count);
      for (auto& result : results) outputs.push_back(*std::move(result));
      return detail::gather(plan_, std::move(outputs));
    }
  }
  template <typename... Arguments>
  auto operator()(const Arguments&... arguments) {
    return forward(arguments...);
  }

  /// The devices of the replicas.
  const std::vector<c10::Device>& devices() const { return plan_.devices; }

 private:
  static torch::jit::Module& as_module(torch::jit::Module& copy) { return copy; }
  static auto& as_module(const std::shared_ptr<torch::nn::Module>& copy) {
    using Module =
        std::remove_reference_t<decltype(std::declval<detail::WrappedModel<Model>&>().module())>;
    return dynamic_cast<Module&>(*copy);
  }

  template <typename Output>
  Output to_output_device(const Output& output) const {
    const auto move = [this](const at::Tensor& tensor) {
      return tensor.defined() ? tensor.to(plan_.output_device) : tensor;
    };
    return map_tensors(output, move);
  }

  detail::ReplicaPlan plan_;
};

template <std::derived_from<torch::nn::Module> Module>
explicit DataParallel(Module&, const DataParallelOptions& = {})
    -> DataParallel<std::reference_wrapper<Module>>;

}  // namespace semitone::parallel
