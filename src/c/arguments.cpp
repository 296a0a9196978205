#include "src/c/arguments.h"

#include "semitone/core/device.h"
#include "semitone/core/error.h"
#include "src/c/handles.h"
#include "src/core/checksum.h"
#include "src/core/expanded.h"

#include <torch/serialize.h>

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <sstream>
#include <string>
#include <string_view>
#include <unordered_set>

namespace semitone::c {
namespace {

// After the archive, since LibTorch compares no checksums.
constexpr std::string_view kEnd = "semitone.crc32:";
constexpr std::size_t kEndSize = kEnd.size() + 8;

std::string end_of(std::string_view archive) {
  return std::string(kEnd) + checksum_of(archive);
}

}  // namespace

const at::Tensor& tensor_of(const SemitoneTensor* tensor, const char* function) {
  require_pointer(tensor, "tensor", function);
  const auto& found = *reinterpret_cast<const at::Tensor*>(tensor);
  if (!found.defined()) throw Error(function, "a tensor", "an undefined tensor");
  return found;
}

at::Tensor& tensor_of(SemitoneTensor* tensor, const char* function) {
  tensor_of(static_cast<const SemitoneTensor*>(tensor), function);
  return *reinterpret_cast<at::Tensor*>(tensor);
}

std::vector<at::Tensor> tensors_of(const SemitoneTensor* const* tensors, std::size_t count,
                                   const char* function) {
  if (count > 0) require_pointer(tensors, "list of tensors", function);
  std::vector<at::Tensor> all;
  all.reserve(count);
  for (std::size_t i = 0; i < count; ++i) {
    const auto* const tensor = reinterpret_cast<const at::Tensor*>(tensors[i]);
    if (tensor == nullptr || !tensor->defined()) {
      throw Error(function, "a tensor in each place of a list",
                  std::string(tensor == nullptr ? "null" : "an undefined tensor") + " in place " +
                      std::to_string(i) + " of " + std::to_string(count));
    }
    all.push_back(*tensor);
  }
  return all;
}

void require_no_expanded_gradient(const at::Tensor& tensor, const char* function) {
  const at::Tensor& gradient = tensor.grad();
  if (!gradient.defined() || !is_expanded(gradient)) return;
  throw Error(function, "gradients with memory of their own for each element",
              "an expanded gradient", "replace it by a copy (clone) before");
}

SemitoneTensor* new_tensor(at::Tensor tensor) {
  return reinterpret_cast<SemitoneTensor*>(new at::Tensor(std::move(tensor)));
}

std::vector<std::string> names_of(const char* const* names, std::size_t count,
                                  const char* function) {
  std::vector<std::string> all;
  std::unordered_set<std::string_view> seen;
  all.reserve(count);
  for (std::size_t i = 0; i < count; ++i) {
    all.push_back(names == nullptr ? std::to_string(i)
                                   : string_of(names[i], "name for each parameter", function));
    const std::string& name = all.back();
    if (name.empty() || name.front() == '.' || name.back() == '.' ||
        name.find("..") != std::string::npos) {
      throw Error(function, "names of parameters like 'encoder.0.weight'", "'" + name + "'");
    }
    if (!seen.insert(name).second)
      throw Error(function, "a different name for each parameter", "'" + name + "' twice");
  }
  return all;
}

std::string string_of(const char* text, const char* what, const char* function) {
  require_pointer(text, what, function);
  return text;
}

char* new_string(const std::string& text) {
  auto* const copy = static_cast<char*>(std::malloc(text.size() + 1));
  if (copy == nullptr) throw std::bad_alloc();
  std::memcpy(copy, text.c_str(), text.size() + 1);
  return copy;
}

c10::Device device_of(const char* name, const char* function) {
  if (name == nullptr) return default_device();
  try {
    return c10::Device(name);
  } catch (const c10::Error&) {
    throw Error(function, "a device like 'cpu' or 'cuda:1'", "'" + std::string(name) + "'");
  }
}

void save_archive(const torch::serialize::OutputArchive& archive, char** bytes, std::size_t* size,
                  const char* function) {
  require_pointer(bytes, "pointer for the bytes", function);
  require_pointer(size, "pointer for the size", function);
  std::ostringstream stream;
  const_cast<torch::serialize::OutputArchive&>(archive).save_to(stream);
  std::string content = std::move(stream).str();
  content += end_of(content);
  *bytes = new_string(content);
  *size = content.size();
}

torch::serialize::InputArchive load_archive(const void* bytes, std::size_t size,
                                            const char* function) {
  require_pointer(bytes, "pointer to saved bytes", function);
  constexpr auto kExpected = "the bytes that the function for saving returned";
  const std::string_view all(static_cast<const char*>(bytes), size);
  const std::string_view content = all.substr(0, all.size() - std::min(all.size(), kEndSize));
  const std::string_view end = all.substr(content.size());
  if (!end.starts_with(kEnd))
    throw FileError(function, kExpected, std::to_string(size) + " bytes without a checksum");
  if (end != end_of(content))
    throw FileError(function, kExpected, "bytes that do not match their checksum");
  torch::serialize::InputArchive archive;
  try {
    archive.load_from(content.data(), content.size());
  } catch (const std::bad_alloc&) {
    throw;  // which says nothing about the bytes
  } catch (const std::exception& error) {
    // LibTorch's reader also throws ErrorReport and std::out_of_range.
    throw FileError(function, kExpected, error.what());
  }
  return archive;
}

}  // namespace semitone::c
