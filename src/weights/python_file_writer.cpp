#include "semitone/core/dtype.h"
#include "semitone/core/error.h"
#include "src/weights/python_file.h"
#include "src/weights/tensor_bytes.h"
#include "src/weights/torch_calls.h"

#include <caffe2/serialize/inline_container.h>

#include <array>
#include <cstring>
#include <exception>
#include <string_view>

namespace semitone::weights {
namespace {

// Writes the instructions of a pickle of protocol 2.
class PickleWriter {
 public:
  const std::string& text() const { return text_; }

  PickleWriter& raw(std::string_view instructions) {
    text_ += instructions;
    return *this;
  }
  PickleWriter& global(std::string_view module, std::string_view name) {
    text_ += 'c';
    text_.append(module).append("\n").append(name).append("\n");
    return *this;
  }
  PickleWriter& string(std::string_view value) {
    text_ += 'X';
    return number<std::uint32_t>(value.size()).raw(value);
  }
  PickleWriter& integer(std::int64_t value) {
    text_ += "\x8a\x08";  // LONG1 of 8 bytes
    return number<std::int64_t>(value);
  }
  PickleWriter& tuple(at::IntArrayRef values) {
    text_ += '(';
    for (const std::int64_t value : values) integer(value);
    text_ += 't';
    return *this;
  }

 private:
  template <typename T, typename From>
  PickleWriter& number(From value) {
    const T narrowed = static_cast<T>(value);
    std::array<char, sizeof(T)> bytes{};
    std::memcpy(bytes.data(), &narrowed, sizeof(T));
    return raw({bytes.data(), bytes.size()});
  }

  std::string text_;
};

// The name in Python of a dtype without a storage class.
std::string_view python_dtype_of(c10::ScalarType dtype, const std::string& tensor) {
  if (const auto name = other_dtype_name(dtype)) return *name;
  throw Error(kWrite, "a dtype that PyTorch's files have for '" + tensor + "'", dtype_name(dtype));
}

// torch._utils._rebuild_tensor_v2(storage, 0, sizes, strides, False, OrderedDict()), or for dtypes
// without a storage class _v3, with the dtype behind.
void add_tensor(PickleWriter& pickle, const std::string& name, const std::string& key,
                const at::Tensor& tensor) {
  const auto storage_class = storage_class_of(tensor.scalar_type());
  pickle.global("torch._utils",
                storage_class.has_value() ? "_rebuild_tensor_v2" : "_rebuild_tensor_v3");
  pickle.raw("((").string("storage");
  if (storage_class.has_value()) {
    pickle.global("torch", *storage_class);
  } else {
    pickle.global("torch.storage", "UntypedStorage");
  }
  pickle.string(key).string("cpu").integer(tensor.numel() *
                                           (storage_class.has_value() ? 1 : tensor.element_size()));
  const auto contiguous = c10::contiguous_strides(tensor.sizes());
  pickle.raw("tQ").integer(0).tuple(tensor.sizes()).tuple(contiguous).raw("\x89");
  pickle.global("collections", "OrderedDict").raw(")R");
  if (!storage_class.has_value())
    pickle.global("torch", python_dtype_of(tensor.scalar_type(), name));
  pickle.raw("tR");
}

std::string pickle_of(const StateDict& tensors) {
  PickleWriter pickle;
  pickle.raw("\x80\x02").global("collections", "OrderedDict").raw(")R(");
  std::size_t key = 0;
  for (const auto& item : tensors) {
    pickle.string(item.key());
    add_tensor(pickle, item.key(), std::to_string(key++), item.value());
  }
  return pickle.raw("u.").text();
}

}  // namespace

void write_archive(const StateDict& tensors, const WritePiece& write) {
  // An exception must not pass through miniz, which is C, and the writer's destructor, which ends the
  // program if writing fails then. So the rest is dropped after a failure.
  std::exception_ptr failure;
  const auto write_bytes = [&](const void* data, std::size_t size) {
    try {
      if (failure == nullptr) write({static_cast<const char*>(data), size});
    } catch (...) {
      failure = std::current_exception();
    }
    return size;
  };
  const std::string pickle = pickle_of(tensors);
  caffe2::serialize::PyTorchStreamWriter writer(write_bytes);
  const auto add = [&](const std::string& name, std::string_view bytes) {
    writer.writeRecord(name, bytes.data(), bytes.size());
  };
  add("data.pkl", pickle);
  add("byteorder", "little");
  std::size_t key = 0;
  for (const auto& item : tensors) {
    if (failure != nullptr) break;
    add("data/" + std::to_string(key++), bytes_of(contiguous_on_cpu(item.value())));
  }
  writer.writeEndOfFile();
  if (failure != nullptr) std::rethrow_exception(failure);
}

}  // namespace semitone::weights
