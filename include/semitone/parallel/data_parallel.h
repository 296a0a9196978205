#pragma once

#include "semitone/core/map_tensors.h"
#include "semitone/parallel/replica_sync.h"
#include "semitone/parallel/replicas.h"
#include "semitone/parallel/wrapped_model.h"

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
  /// One replica on each; all of one type, the first where the model is. A device may come several
  /// times. Default: the model's device and all others of its type: every GPU for a model on a GPU.
  TORCH_ARG(std::vector<c10::Device>, device_ids);
  /// In place of device_ids: so many replicas on the model's own device. On a CPU they are threads.
  TORCH_ARG(std::optional<int>, replicas);
  /// Where results are put together. Default: the model's device.
  TORCH_ARG(std::optional<c10::Device>, output_device);
  /// Along which batches are cut and results joined, counted from 0.
  TORCH_ARG(std::int64_t, dim) = 0;
};

/// Runs a model on several devices of one process, each with its share of the batch: what
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
/// It is a handle on the model, not a copy: optimizers, amp::initialize (before or after) and
/// checkpoints work on the model itself, and gradients arrive there. `*replicas` is the model.
/// DistributedDataParallel is faster, on one machine too: here each forward copies the weights, and
/// one thread runs all of a CPU's backward pass.
///
/// A forward
/// - cuts every tensor of the arguments, nested ones too (see map_tensors), along `dim` as
///   torch::chunk does: parts of equal size, the last one smaller where it does not come out even. A
///   batch with fewer rows than replicas takes fewer of them. All tensors must have the same extent
///   there. Tensors without dimensions, and everything that is no tensor, go to all replicas.
/// - copies the model (torch::nn::Module::clone) for all replicas but the first, which is the model
///   itself. So what a forward writes to buffers (running statistics) or members stays in the first
///   replica, which saw the first part of the batch, and is lost in the others. Parameters' hooks
///   and the marks of convert_sync_batchnorm are not in the copies.
/// - runs the replicas in threads, with the caller's autocast region, grad and inference mode, event
///   listeners, and the current stream of each device. CPU replicas share the caller's intra-op
///   threads out among themselves, and the random generator: random layers give other numbers in
///   each run. What copies of the model share, such as an object behind a pointer, is used by several
///   threads at a time.
/// - joins the tensors of the results along `dim` on the output device; what is no tensor is the
///   first replica's. Tensors without dimensions, such as losses, become a vector with one element
///   for each replica used. The mean of such a vector weighs replicas equally, whatever their
///   number of rows: it is the mean over the batch only if that comes out even. Return losses by
///   row, or sums, where that matters.
///
/// With one device the model is just called, on the whole batch, and losses stay as they are.
///
/// An exception in a replica goes on when all have ended, with the replica's number and device: the
/// first replica's if there are several. LibTorch's errors keep their type and get that as context;
/// others become an Error, with the original nested in it.
///
/// Error, at construction: devices of different types, missing ones, the first not the model's, both
/// device_ids and replicas, a model that cannot be cloned. In forward: no tensor that could be cut,
/// tensors whose extents differ or that lack the dimension, a model that was moved, results that
/// are tensors in some replicas only. GPUs of which one has less than 75 % of another's memory or
/// multiprocessors are worth a warning in the log.
///
/// Not for two threads at a time.
///
/// @tparam Model  a module holder (Net), a std::shared_ptr to a module, or torch::jit::Module. A module
/// that is an object itself is taken by reference and has to outlive this.
template <typename Model>
class DataParallel : public WrappedModel<Model> {
 public:
  explicit DataParallel(Model model, const DataParallelOptions& options = {})
      : WrappedModel<Model>(std::move(model)), plan_(tensors_of(this->module()), options) {
    const std::size_t two = 2;
    replicate(this->module(), plan_,
              std::min(two, plan_.devices.size()));  // whether that is possible
  }

  /// The model's forward on all replicas. Arguments are copied for each; results are tensors in any
  /// containers, or nothing. A TorchScript one takes IValues, or what becomes one.
  template <typename... Arguments>
  auto forward(const Arguments&... arguments) {
    using Output = std::decay_t<decltype(this->call(this->module(), arguments...))>;
    BatchCut cut(plan_);
    const auto look = [&](const at::Tensor& tensor) {
      cut.look_at(tensor);
      return tensor;
    };
    (static_cast<void>(map_tensors(arguments, look)), ...);
    const std::size_t count = cut.parts();

    std::vector<std::tuple<detail::Mapped<const Arguments&>...>> inputs;
    for (std::size_t replica = 0; replica < count; ++replica) {
      const auto part = [&](const at::Tensor& tensor) { return cut.part(tensor, replica); };
      inputs.emplace_back(map_tensors(arguments, part)...);
    }
    auto replicas = replicate(this->module(), plan_, count);
    const auto run = [&](std::size_t replica) {
      auto& one = replica == 0 ? this->module() : as_module(replicas.copies[replica - 1]);
      return std::apply([&](const auto&... input) { return this->call(one, input...); },
                        inputs[replica]);
    };
    if constexpr (std::is_void_v<Output>) {
      if (plan_.devices.size() == 1) return run(0);
      run_replicas(plan_, count, replicas.parameters, [&](std::size_t replica) { run(replica); });
    } else {
      if (plan_.devices.size() == 1) return to_output_device(run(0));
      std::vector<std::optional<Output>> results(count);
      run_replicas(plan_, count, replicas.parameters,
                   [&](std::size_t replica) { results[replica] = run(replica); });
      std::vector<Output> outputs;
      outputs.reserve(count);
      for (auto& result : results) outputs.push_back(*std::move(result));
      return gather(plan_, std::move(outputs));
    }
  }
  template <typename... Arguments>
  auto operator()(const Arguments&... arguments) {
    return forward(arguments...);
  }

  /// Where the replicas are.
  const std::vector<c10::Device>& devices() const { return plan_.devices; }

 private:
  static torch::jit::Module& as_module(torch::jit::Module& copy) { return copy; }
  static auto& as_module(const std::shared_ptr<torch::nn::Module>& copy) {
    using Module = std::remove_reference_t<decltype(std::declval<WrappedModel<Model>&>().module())>;
    return dynamic_cast<Module&>(*copy);
  }

  template <typename Output>
  Output to_output_device(const Output& output) const {
    const auto move = [this](const at::Tensor& tensor) {
      return tensor.defined() ? tensor.to(plan_.output_device) : tensor;
    };
    return map_tensors(output, move);
  }

  ReplicaPlan plan_;
};

template <std::derived_from<torch::nn::Module> Module>
explicit DataParallel(Module&, const DataParallelOptions& = {})
    -> DataParallel<std::reference_wrapper<Module>>;

}  // namespace semitone::parallel
