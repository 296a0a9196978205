#pragma once

#include "src/weights/pickle.h"

#include <string>
#include <utility>
#include <vector>

namespace semitone::weights {

// The tensors in a value and their names: "layer.weight" for what is under "weight" in "layer".
using NamedTensors = std::vector<std::pair<std::string, const TensorInStorage*>>;

// @param entry   the part to take, "a.b", or empty for the whole
// @param nested  whether tensors may be in dicts or objects inside, as in TorchScript modules; they
//                may be in an entry
// FileError if there is no such entry, if it has no tensors or one that is not read (sparse,
// quantised), or if it is an object of a class that this library does not know.
NamedTensors find_tensors(const Value& root, const std::string& entry, bool nested,
                          const std::string& source);

// All tensors of a TorchScript module that are attributes and can be read.
NamedTensors find_readable_tensors(const Value& root, const std::string& source);

}  // namespace semitone::weights
