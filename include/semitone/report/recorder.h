#pragma once

#include "semitone/report/run_log.h"

#include <torch/arg.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <memory>
#include <string>

namespace semitone::report {

/// Options of Recorder.
struct RecorderOptions {
  /// Look at every n-th step, beginning with the first one. At least 1. Default 100.
  TORCH_ARG(std::int64_t, every) = 100;
};

/// Samples how a training uses its number formats, time and memory, into a RunLog's samples.jsonl:
///
///     report::RunLog log("runs/7");
///     report::Recorder recorder(log, *model);
///     for (std::int64_t step = 1; step <= steps; ++step) {
///       log.set_step(step);
///       …
///     }
///
/// `log.set_step(n)` ends the step before, and begins step n; calling it again with the same n has
/// no effect here. The end of the Recorder or of the RunLog ends the last step, unless an exception
/// does. If `first` is the first step that begins after the construction, a step n is looked at if
/// n - first is a multiple of RecorderOptions::every. LibTorch sets up its kernels in the first
/// step of a program, so its times are longer than those of later steps.
///
/// samples.jsonl then has one line of the kind `model`, before the first step, and one line of the
/// kind `sample` for each step that is looked at. docs/run_records.md lists their keys. A sample
/// has
///
/// - the values of weights (at the beginning of the step), of gradients (divided by the loss scale),
///   of the outputs of layers, and of the gradients of these outputs: how many of them have which
///   power of two, and how many are 0, inf or NaN
/// - the updates: |update| / |weight| in fp32, how many elements changed, and how many of these
///   would not change if the weight were kept in 16 bits
/// - the operators: calls, time without the operators inside, bytes, casts
/// - the time of each part of the step, and the memory of each kind of tensor
/// - for each batch norm, whether it used the statistics of its batch
///
/// Rules:
/// - Gradients are those of the parameters that events::GradientsReady names, which MixedPrecision
///   and GradScaler emit, as the last events::GradientsUnscaled of the step had them, if there was
///   one: before the program clips them. Without a loss scale, a parameter without this event has
///   `.grad()` at the end of the step. Once a scale is known it has none: `.grad()` may still be
///   multiplied by it, as in a step that only accumulates gradients.
/// - A loss scale is known after its first update. Until then, in a step without GradientsReady in
///   which no weight changes, gradients of weights and outputs are left out: a scaler that is still
///   to come may have multiplied them. If weights do change, an optimizer has used them as they are.
/// - Updates are those of parameters that GradientsReady names. They are of the fp32 weights of that
///   event, master weights if there are some, from the event to the end of the step. In a step
///   without the event, the parameters are compared between the beginning and the end of the step;
///   if none has changed, there are no updates. Frozen parameters have none, nor have parameters
///   with split masters in a training without MixedPrecision, which knows their fp32 values.
/// - The output of a layer is the result of the outermost operator that has one of the layer's
///   parameters among its arguments, in the forward pass. Calls in one step are counted together.
///   Of a layer with several such operators, as `x * weight + bias`, it is the one that ran last. A
///   parameter of several layers counts for the first of them. A result that is a number is no
///   output, nor is that of an elementwise operator on a parameter and what broadcasts to its shape,
///   as in a penalty `(weight - start).pow(2).sum()`. Nor is what runs without GradMode after a
///   backward pass, or in a layer that also runs with it: that is an evaluation.
///   Layers that have no parameters or have other layers inside, and functions that compute without
///   operators, such as Semitone's fused layers, have no outputs here. Gradients of outputs are left
///   out if there are several losses with scales of their own, and if the scale changes between two
///   optimizer steps of one step.
/// - The parts of a step are those of events::PhaseBegan. Without such events, the backward pass is
///   from the first node of the graph to the end of the last one, and the forward pass is from the
///   beginning of the step to that first node. What is in no part is `other`. The parts sum to the
///   time of the step. It does not include the time that the recorder itself took.
/// - The memory of activations is that of the tensors that operators of the forward pass made, as far
///   as it is in use when the backward pass begins. Copies of weights in 16 bits count, arguments that
///   existed before do not. If a step has several backward passes, it is the most before one of them.
/// - Sparse, nested, quantised and complex tensors are left out, and so are tensors that are
///   wrapped by functorch.
///
/// Weights, gradients and random numbers are bit for bit the same as without a Recorder. In a step
/// that is not looked at, no operator is watched. In one that is, the recorder holds an fp32 copy of
/// the weights, and reads each of the tensors above once. On a GPU each of them costs a wait for its
/// values. Do not look at a step in which a CUDA graph is captured, which forbids that.
///
/// If something cannot be looked at, the log has one warning, and the sample is left out: training
/// goes on. Nothing is recorded where the RunLog does not write, on ranks above 0 for example.
///
/// A thread has one Recorder. It belongs to the thread that constructs it, and records what this
/// thread does, and the threads that work for it (autograd's, at::launch's). It nests with
/// NonFiniteCheck, whose time then counts as that of the operators. Destroy it before the model, and
/// on the same thread. While it exists, `RunLog::set_step` is an Error on any other thread. If
/// another thread closes the RunLog, the step in progress is left out.
class Recorder {
 public:
  /// Error for options out of range, and if the RunLog or this thread already has a Recorder. The
  /// parameters stay alive as long as this object.
  Recorder(RunLog& log, const torch::nn::Module& model, const RecorderOptions& options = {});
  ~Recorder();
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;

  /// Samples one more model, a GAN's second network for example. The prefix precedes its names:
  /// "critic" makes "critic.conv1.weight". Error if a name exists, and after the first step has
  /// begun.
  void add_model(const torch::nn::Module& model, const std::string& prefix = {});

  /// Adds an optimizer: the dtype and the eps of its groups to the line `model`, if it is added before
  /// the first step, and the memory of its state to the samples, as far as it is saved. That is
  /// measured again when the number of parameters with state has changed, and that of LBFGS in
  /// each sample. The optimizer must outlive this object.
  void add_optimizer(torch::optim::Optimizer& optimizer);

 private:
  class Impl;

  std::unique_ptr<Impl> impl_;
};

}  // namespace semitone::report
