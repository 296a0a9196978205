#pragma once

#include "semitone/autocast/model.h"

#include <ATen/core/Tensor.h>
#include <torch/arg.h>
#include <torch/ordered_dict.h>

#include <string>
#include <vector>

/// Weights of models by name, and the files that hold them, from C++ and from Python.
namespace semitone::weights {

/// Parameters and buffers by name, as in Python's `state_dict()`: "layer1.0.conv1.weight".
using StateDict = torch::OrderedDict<std::string, at::Tensor>;

/// Returns a model's parameters and buffers, in the model's order and with their names. A tensor
/// that the model has under two names is there twice.
///
/// Floating-point tensors below fp32 are returned in fp32: the fp32 master weight if the model
/// belongs to an `amp::initialize` with masters, otherwise the tensor itself, cast. Other tensors
/// keep their dtype. Tensors that were cast, and split masters, are copies. The others share memory
/// with the model or with its masters, as in Python: clone() what has to survive the next step. None
/// of them requires a gradient.
StateDict state_dict(const amp::Model& model);

/// What `load_state_dict` does about names.
class LoadOptions {
 public:
  /// Whether missing or unexpected names are an error. Default: true, as in Python. Two kinds of
  /// names are never missing: `num_batches_tracked` of a BatchNorm whose statistics are given (files
  /// from before PyTorch 0.4.1 lack it), and the second name of a tensor that is given under its
  /// first. Tensors that a TorchScript module has as plain attributes, not as parameters or buffers,
  /// are in its file, but are never unexpected: they keep their values.
  TORCH_ARG(bool, strict) = true;
  /// A prefix that is removed from the names of the file: "module." for a model that was saved
  /// inside Python's DataParallel or DistributedDataParallel, "_orig_mod." for a compiled one.
  /// Names without it stay as they are.
  TORCH_ARG(std::string, strip_prefix);
  /// For weights::load only: the part of the file to load; see ReadOptions::entry (weights/file.h).
  TORCH_ARG(std::string, entry);
};

/// The names that `load_state_dict` did not use. Both lists are empty if it was strict.
struct UnmatchedNames {
  std::vector<std::string> missing;     ///< parameters and buffers of the model that were not given
  std::vector<std::string> unexpected;  ///< names that the model does not have
};

/// Copies values into a model's parameters and buffers, each cast to the dtype and copied to the
/// device that it has there. The tensors of the model stay the same, so that optimizers, hooks and
/// data-parallel training keep them. If a 16-bit weight has an fp32 master (`amp::initialize` at
/// O2), the master gets the value, and the weight its rounding.
///
/// Everything is checked before anything is changed. FileError that names the first tensor at
/// fault: if names do not match (unless strict is false), if a shape or layout differs, if a tensor has
/// no values (on the meta device), or if a value would
/// be lost in the model's dtype: a finite one that becomes infinite, an imaginary part, or in an
/// integer or bool tensor any value that changes. Rounding to a floating-point dtype is no loss.
UnmatchedNames load_state_dict(const amp::Model& model, const StateDict& values,
                               const LoadOptions& options = {});

}  // namespace semitone::weights
