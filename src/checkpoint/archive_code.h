#pragma once

#include <torch/csrc/jit/api/object.h>

#include <caffe2/serialize/read_adapter_interface.h>

#include <memory>
#include <string>
#include <string_view>

// LibTorch's archives are TorchScript modules. It compiles their classes when it loads them, and
// runs some of what they define. A checkpoint needs classes with attributes only.
namespace semitone::checkpoint {

// FileError, which is no DamageError, if loading the archive could run code of its author: unless
// the classes in it have nothing but attributes. `path` is for the message.
void require_no_code(const std::shared_ptr<caffe2::serialize::ReadAdapterInterface>& archive,
                     const std::string& path);

// Error if the classes of an object, or of what it holds, have functions: require_no_code() would
// refuse the archive.
void require_no_functions(const torch::jit::Object& object);

// Whether the text of an archive's classes declares attributes only.
bool has_attributes_only(std::string_view code);

}  // namespace semitone::checkpoint
