#include "src/weights/python_file.h"

#include "semitone/core/dtype.h"
#include "semitone/core/error.h"
#include "src/weights/named_tensors.h"
#include "src/weights/pickle.h"
#include "src/weights/tensor_bytes.h"
#include "src/weights/torch_calls.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <caffe2/serialize/inline_container.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <utility>

namespace semitone::weights {
namespace {

using caffe2::serialize::PyTorchStreamReader;

// Of the pickle alone, without the tensors' bytes.
constexpr std::uint64_t kMaxPickle = 100'000'000;

std::string quoted(const InputFile& file) {
  return "'" + file.path().string() + "'";
}

// The tensors of a pickle, once the bytes of their storages are known.
// @param read_storage  returns the bytes of a storage as a tensor of uint8, of any length
StateDict tensors_with_bytes(const InputFile& file, const NamedTensors& named,
                             const std::function<at::Tensor(const Storage&)>& read_storage) {
  std::map<std::string, at::Tensor> storages;
  std::set<std::string> of_bools;  // storages that were found to hold bools
  std::uint64_t total = 0;
  StateDict tensors;
  for (const auto& [name, tensor] : named) {
    const std::string& key = tensor->storage.key;
    auto found = storages.find(key);
    if (found == storages.end()) {
      found = storages.emplace(key, read_storage(tensor->storage)).first;
      total += static_cast<std::uint64_t>(found->second.numel());
      if (total > file.size()) file.refuse("storages of its size", "storages that overlap");
    }
    const at::Tensor& bytes = found->second;
    const auto spanned = elements_spanned(tensor->offset, tensor->sizes, tensor->strides);
    const auto element = static_cast<std::int64_t>(c10::elementSize(tensor->dtype));
    const auto count = count_elements(tensor->sizes);
    if (!spanned.has_value() || *spanned > bytes.numel() / element || !count.has_value())
      file.refuse("a place inside its storage for '" + name + "'", "one outside");
    // With strides of 0 a few bytes can be any number of elements.
    if (*count > std::max<std::int64_t>(bytes.numel() / element, 1 << 20))
      file.refuse("elements of its own for '" + name + "'", "a much smaller storage");
    if (tensor->dtype == at::kBool && of_bools.insert(key).second &&
        !are_bools(bytes.const_data_ptr(), static_cast<std::size_t>(bytes.numel())))
      file.refuse("bytes of 0 or 1 for '" + name + "'", "others");
    at::Tensor value = at::empty({0}, at::TensorOptions(tensor->dtype));
    value.set_(bytes.storage(), *count == 0 ? 0 : tensor->offset, tensor->sizes, tensor->strides);
    if (tensors.contains(name)) file.refuse("each name once", "'" + name + "' twice");
    tensors.insert(name, std::move(value));
  }
  return tensors;
}

// The records of an archive.
class Archive {
 public:
  explicit Archive(const InputFile& file) : file_(file) {
    tried("an archive of PyTorch",
          [&] { reader_ = std::make_unique<PyTorchStreamReader>(file.path().string()); });
  }

  bool has(const std::string& name) {
    bool found = false;
    tried("a directory of records", [&] { found = reader_->hasRecord(name); });
    return found;
  }

  // A record as text. torch.save does not compress records, so none is larger than the file.
  std::string text(const std::string& name, std::uint64_t limit) {
    std::string found(size_of(name, std::min(limit, file_.size())), '\0');
    read(name, found.data(), found.size());
    return found;
  }

  at::Tensor bytes(const std::string& name) {
    const std::uint64_t size = size_of(name, file_.size());
    at::Tensor found = at::empty({static_cast<std::int64_t>(size)}, at::TensorOptions(at::kByte));
    read(name, found.mutable_data_ptr(), size);
    return found;
  }

 private:
  template <typename Act>
  void tried(const std::string& expected, const Act& act) const {
    try {
      act();
    } catch (const c10::Error& error) {
      file_.refuse(expected, error.what_without_backtrace());
    } catch (const std::exception& error) {  // of std::stoull, for a version that is no number
      file_.refuse(expected, error.what());
    }
  }

  std::uint64_t size_of(const std::string& name, std::uint64_t limit) {
    std::uint64_t size = 0;
    tried("a record '" + name + "'", [&] { size = reader_->getRecordSize(name); });
    if (size > limit) {
      file_.refuse("at most " + std::to_string(limit) + " bytes of '" + name + "'",
                   std::to_string(size));
    }
    return size;
  }

  void read(const std::string& name, void* into, std::size_t size) {
    tried("a record '" + name + "'", [&] { reader_->getRecord(name, into, size); });
  }

  const InputFile& file_;
  std::unique_ptr<PyTorchStreamReader> reader_;
};

// The magic number of a row of pickles, in any protocol.
constexpr std::string_view kMagic = "\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.";

// The bytes of storages that follow the pickles: the number of elements, then these.
std::map<std::string, std::pair<std::uint64_t, std::uint64_t>> places_of_storages(
    const InputFile& file, const Value& keys,
    const std::map<std::string, std::size_t>& element_sizes, std::uint64_t place) {
  std::map<std::string, std::pair<std::uint64_t, std::uint64_t>> places;
  const auto* list = keys.get<List>();
  if (list == nullptr) file.refuse("a list of storages", "another value");
  for (const Value* item : list->items) {
    const auto* key = item->get<std::string>();
    const auto element = key == nullptr ? element_sizes.end() : element_sizes.find(*key);
    if (element == element_sizes.end()) file.refuse("storages of tensors", "another one");
    std::uint64_t elements = 0;
    file.read(place, &elements, sizeof(elements));
    place += sizeof(elements);
    if (elements > (file.size() - place) / element->second)
      file.refuse("bytes of storage " + *key, "the end");
    places[*key] = {place, elements * element->second};
    place += elements * element->second;
  }
  return places;
}

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

Contents read_archive(const InputFile& file, const std::string& entry) {
  Archive archive(file);
  if (!archive.has("data.pkl"))
    file.refuse("weights in an archive of PyTorch", "an archive without data.pkl");
  if (archive.has("byteorder") && archive.text("byteorder", 100) != "little")
    file.refuse("numbers in little-endian order", "another order");
  const bool is_script = archive.has("constants.pkl");
  const std::string text = archive.text("data.pkl", kMaxPickle);
  PickleReader pickle(text, quoted(file));
  const Value& root = pickle.read();
  const NamedTensors named = find_tensors(root, entry, is_script, quoted(file));
  Contents contents;
  contents.format = is_script ? Format::torchscript : Format::pytorch;
  contents.tensors = tensors_with_bytes(
      file, named, [&](const Storage& storage) { return archive.bytes("data/" + storage.key); });
  return contents;
}

bool begins_as_row_of_pickles(std::string_view first_bytes) {
  return first_bytes.starts_with('\x80') && first_bytes.find(kMagic) != std::string_view::npos;
}

Contents read_row_of_pickles(const InputFile& file, const std::string& entry) {
  // The pickles come first, and their length is not known before they are read.
  const std::string text = file.read(0, std::min(file.size(), kMaxPickle));
  PickleReader pickles(text, quoted(file));
  for (int i = 0; i < 3; ++i) pickles.read();  // magic number, version, sizes of C's types
  const Value& root = pickles.read();
  const Value& keys = pickles.read();
  // All of them, to know how long the storages are that lie before the others.
  std::map<std::string, std::size_t> element_sizes;
  for (const Storage* storage : pickles.storages())
    element_sizes[storage->key] = c10::elementSize(storage->dtype.value_or(at::kByte));
  const auto places = places_of_storages(file, keys, element_sizes, pickles.position());
  const auto read_storage = [&](const Storage& storage) {
    const auto place = places.find(storage.key);
    if (place == places.end()) file.refuse("bytes of storage " + storage.key, "none");
    at::Tensor bytes =
        at::empty({static_cast<std::int64_t>(place->second.second)}, at::TensorOptions(at::kByte));
    file.read(place->second.first, bytes.mutable_data_ptr(), place->second.second);
    return bytes;
  };
  const NamedTensors named = find_tensors(root, entry, /*nested=*/false, quoted(file));
  Contents contents;
  contents.format = Format::pytorch;
  contents.tensors = tensors_with_bytes(file, named, read_storage);
  return contents;
}

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
