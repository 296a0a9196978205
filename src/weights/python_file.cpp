#include "src/weights/python_file.h"

#include "src/weights/named_tensors.h"
#include "src/weights/pickle.h"
#include "src/weights/script_tensors.h"
#include "src/weights/tensor_bytes.h"
#include "src/weights/zip_archive.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <string_view>
#include <utility>

namespace semitone::weights {
namespace {

// Of the pickle alone, without the tensors' bytes.
constexpr std::uint64_t kMaxPickle = 100'000'000;
// With strides of 0 a few bytes can be any number of elements. Tensors with more elements than their
// storage may have this many together.
constexpr std::int64_t kMaxRepeated = std::int64_t{1} << 24;

constexpr auto kSaveSafetensors =
    "save the model's state_dict() in Python with safetensors.torch.save_file";

at::Tensor bytes_of_size(std::uint64_t size) {
  return at::empty({static_cast<std::int64_t>(size)}, at::TensorOptions(at::kByte));
}

// Makes the tensors of a pickle.
class TensorReader {
 public:
  // @param read_storage  returns the bytes of a storage as a tensor of uint8, of any length
  // @param max_repeated  the number of elements in tensors with more than their storage has
  TensorReader(const InputFile& file, std::function<at::Tensor(const Storage&)> read_storage,
               std::int64_t max_repeated = kMaxRepeated)
      : file_(file), read_storage_(std::move(read_storage)), max_repeated_(max_repeated) {}

  StateDict read(const NamedTensors& named) {
    StateDict tensors;
    for (const auto& [name, tensor] : named) {
      if (tensors.contains(name)) file_.refuse("each name once", "'" + name + "' twice");
      tensors.insert(name, value_of(name, *tensor));
    }
    return tensors;
  }

 private:
  const at::Tensor& bytes_of(const Storage& storage) {
    auto found = storages_.find(storage.key);
    if (found == storages_.end()) {
      found = storages_.emplace(storage.key, read_storage_(storage)).first;
      total_ += static_cast<std::uint64_t>(found->second.numel());
      if (total_ > file_.size()) file_.refuse("storages of its size", "storages that overlap");
    }
    return found->second;
  }

  at::Tensor value_of(const std::string& name, const TensorInStorage& tensor) {
    const at::Tensor& bytes = bytes_of(tensor.storage);
    const auto spanned = elements_spanned(tensor.offset, tensor.sizes, tensor.strides);
    const auto element = static_cast<std::int64_t>(c10::elementSize(tensor.dtype));
    const auto count = count_elements(tensor.sizes);
    const std::int64_t available = bytes.numel() / element;
    if (!spanned.has_value() || *spanned > available || !count.has_value())
      file_.refuse("a place inside its storage for '" + name + "'", "one outside");
    if (*count > available) {
      if (*count > max_repeated_ - repeated_) {
        file_.refuse("at most 2^24 elements in tensors that repeat theirs",
                     std::to_string(*count) + " in '" + name + "'", "save its clone() in Python");
      }
      repeated_ += *count;
    }
    if (tensor.dtype == at::kBool && bools_.insert(tensor.storage.key).second &&
        !are_bools(bytes.const_data_ptr(), static_cast<std::size_t>(bytes.numel())))
      file_.refuse("bytes of 0 or 1 for '" + name + "'", "others");
    at::Tensor value = at::empty({0}, at::TensorOptions(tensor.dtype));
    value.set_(bytes.storage(), *count == 0 ? 0 : tensor.offset, tensor.sizes, tensor.strides);
    return value;
  }

  const InputFile& file_;
  std::function<at::Tensor(const Storage&)> read_storage_;
  std::int64_t max_repeated_;
  std::map<std::string, at::Tensor> storages_;
  std::set<std::string> bools_;  // storages that were found to hold bools
  std::uint64_t total_ = 0;      // bytes of the storages
  std::int64_t repeated_ = 0;    // elements of tensors with more than their storage
};

// Refuses an archive that is not one of torch.save, LibTorch or TorchScript.
[[noreturn]] void refuse_archive(const InputFile& file, const ZipArchive& archive) {
  const auto refuse = [&](const std::string& got, std::string_view remedy) {
    file.refuse("weights in an archive of PyTorch", got, remedy);
  };
  if (archive.has("archive_format")) {
    refuse("a program of torch.export (.pt2)",
           "save its state_dict in Python with safetensors.torch.save_file");
  }
  const auto& records = archive.records();
  if (std::any_of(records.begin(), records.end(),
                  [](const auto& record) { return record.first.ends_with(".npy"); })) {
    refuse("arrays of NumPy (.npz)", "save them in Python with safetensors.numpy.save_file");
  }
  file.refuse("weights in an archive of PyTorch", "an archive without data.pkl", kSaveSafetensors);
}

// The magic number of a legacy file, in any protocol.
constexpr std::string_view kMagic = "\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.";

// Where the bytes of a storage are in a legacy file.
struct StoragePlace {
  std::uint64_t begin;
  std::uint64_t size;
};

// The storages follow the pickles, in the order of the keys: for each the number of elements, then
// these.
// @param storages  all that the pickles name, to know how long those are that are not wanted
std::map<std::string, StoragePlace> places_of_storages(const InputFile& file, const Value& keys,
                                                       const std::vector<const Storage*>& storages,
                                                       std::uint64_t place) {
  std::map<std::string, const Storage*> by_key;
  for (const Storage* storage : storages) by_key[storage->key] = storage;
  std::map<std::string, StoragePlace> places;
  const auto* list = keys.get<List>();
  if (list == nullptr) file.refuse("a list of storages", "another value");
  for (const Value* item : list->items) {
    const auto* key = item->get<std::string>();
    const auto storage = key == nullptr ? by_key.end() : by_key.find(*key);
    if (storage == by_key.end()) file.refuse("storages of tensors", "another one");
    const std::uint64_t element = storage->second->element_size;
    if (element == 0) {
      file.refuse("storages of a known element size", "a " + storage->second->type,
                  kSaveSafetensors);
    }
    std::uint64_t elements = 0;
    file.read(place, &elements, sizeof(elements));
    place += sizeof(elements);
    if (elements > (file.size() - place) / element)
      file.refuse("bytes of storage " + *key, "the end");
    places[*key] = {place, elements * element};
    place += elements * element;
  }
  return places;
}

// An archive of torch.save, LibTorch or TorchScript.
class Archive {
 public:
  explicit Archive(const InputFile& file) : zip_(file) {
    if (!zip_.has("data.pkl")) refuse_archive(file, zip_);
    if (zip_.has("byteorder") && zip_.text("byteorder", 100) != "little") {
      file.refuse("numbers in little-endian order", "another order",
                  "save the file again on a little-endian machine");
    }
    text_ = zip_.text("data.pkl", kMaxPickle, kSaveAlone);
    pickle_.emplace(text_, file.quoted());
  }

  bool is_script() const { return zip_.has("constants.pkl"); }
  const Value& root() { return pickle_->read(); }

  at::Tensor bytes_of(const Storage& storage) const {
    const std::string record = "data/" + storage.key;
    at::Tensor bytes = bytes_of_size(zip_.size_of(record));
    zip_.read(record, bytes.mutable_data_ptr());
    return bytes;
  }

 private:
  ZipArchive zip_;
  std::string text_;
  std::optional<PickleReader> pickle_;
};

}  // namespace

Contents read_archive(const InputFile& file, const std::string& entry) {
  Archive archive(file);
  const NamedTensors named =
      find_tensors(archive.root(), entry, archive.is_script(), file.quoted());
  TensorReader tensors(file, [&](const Storage& storage) { return archive.bytes_of(storage); });
  Contents contents;
  contents.format = archive.is_script() ? Format::torchscript : Format::pytorch;
  contents.tensors = tensors.read(named);
  return contents;
}

std::unordered_map<std::string, at::Tensor> read_script_tensors(
    const std::filesystem::path& path, const std::unordered_set<std::string>& names) {
  const InputFile file(path);
  Archive archive(file);
  NamedTensors named = find_readable_tensors(archive.root(), file.quoted());
  std::erase_if(named, [&](const auto& one) { return !names.contains(one.first); });
  TensorReader tensors(
      file, [&](const Storage& storage) { return archive.bytes_of(storage); },
      std::numeric_limits<std::int64_t>::max());
  std::unordered_map<std::string, at::Tensor> found;
  for (const auto& item : tensors.read(named)) found.emplace(item.key(), item.value());
  return found;
}

bool begins_as_legacy(std::string_view first_bytes) {
  return first_bytes.starts_with('\x80') && first_bytes.find(kMagic) != std::string_view::npos;
}

Contents read_legacy(const InputFile& file, const std::string& entry) {
  // The pickles come first, and their length is not known before they are read.
  const std::string text = file.read(0, std::min(file.size(), kMaxPickle));
  PickleReader pickles(text, file.quoted());
  for (int i = 0; i < 3; ++i) pickles.read();  // magic number, version, sizes of C's types
  const Value& root = pickles.read();
  const Value& keys = pickles.read();
  const auto places = places_of_storages(file, keys, pickles.storages(), pickles.position());
  TensorReader tensors(file, [&](const Storage& storage) {
    const auto place = places.find(storage.key);
    if (place == places.end()) file.refuse("bytes of storage " + storage.key, "none");
    at::Tensor bytes = bytes_of_size(place->second.size);
    file.read(place->second.begin, bytes.mutable_data_ptr(), place->second.size);
    return bytes;
  });
  Contents contents;
  contents.format = Format::pytorch;
  contents.tensors = tensors.read(find_tensors(root, entry, /*nested=*/false, file.quoted()));
  return contents;
}

}  // namespace semitone::weights
